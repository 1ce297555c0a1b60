"""From router error to the risk of one active expert (paper, Appendix C.4).

m†(x) is the oracle expert of x's pattern, m̂(x) the one with the largest router weight. Margins are differences of
log weights, which for one router are differences of its logits.
"""

from dataclasses import dataclass

import numpy as np


def deficit(weights: np.ndarray, oracle: np.ndarray) -> float:
    """S = E[1 − r_{m†(x)}(x)]: the router weight that misses the oracle expert; weights [n, M], oracle [n]."""
    return float(1 - weights[np.arange(len(oracle)), oracle].mean())


def margins(weights: np.ndarray, oracle: np.ndarray) -> np.ndarray:
    """log r_{m†} − max_{j≠m†} log r_j of every example, [n]."""
    logs = np.log(np.clip(weights, 1e-30, None))
    rows = np.arange(len(oracle))
    own = logs[rows, oracle]
    others = logs.copy()
    others[rows, oracle] = -np.inf
    return own - others.max(1)


def margin_risk(weights: np.ndarray, oracle: np.ndarray, tau: float = 0.0) -> float:
    """R_τ = Pr[margin ≤ τ]; at τ = 0 it bounds how often the wrong expert is active."""
    return float((margins(weights, oracle) <= tau).mean())


@dataclass
class SparseRisk:
    """Every term of the sparse-risk bound on one client's examples."""

    deficit: float  # S
    margin_risk: float  # R_0
    mismatch: float  # Pr[m̂ ≠ m†]
    soft: float  # R: loss of the soft mixture
    sparse: float  # R_sparse: loss of m̂
    oracle: float  # R_oracle: loss of m†
    worst: float  # Δ_max: the most that any wrong expert costs on any example
    gap: float  # c_gap: what the best wrong expert costs on average; ≤ 0: experts are not told apart
    mix: float  # β_mix: the least that makes c_gap S ≤ R − R_oracle + β_mix true here

    @property
    def excess(self) -> float:
        return self.sparse - self.oracle

    @property
    def approximation_most(self) -> float:
        """[R − R_oracle]₊, which A = [R* − R_oracle]₊ cannot exceed: the best router's loss R* is at most R."""
        return max(0.0, self.soft - self.oracle)

    @property
    def margin_bound(self) -> float:
        """Δ_max R_0."""
        return self.worst * self.margin_risk

    @property
    def calibrated(self) -> bool:
        return self.gap > 0

    @property
    def bound(self) -> float:
        """2 Δ_max / c_gap · (R − R_oracle + β_mix), the last line of the chain; infinite without calibration."""
        return 2 * self.worst / self.gap * (self.soft - self.oracle + self.mix) if self.calibrated else float("inf")

    @property
    def chain_holds(self) -> bool:
        """excess ≤ Δ_max R_0 ≤ 2 Δ_max / c_gap (R − R_oracle + β_mix)."""
        slack = 1e-6 * max(1.0, self.worst)
        return self.excess <= self.margin_bound + slack and self.margin_bound <= self.bound + slack


def sparse_risk(
    weights: np.ndarray,  # [n, M] router weights
    oracle: np.ndarray,  # [n] m†
    alone: np.ndarray,  # [n, M] ℓ_m: loss with expert m alone
    soft: np.ndarray,  # [n] loss of the soft mixture
) -> SparseRisk:
    rows = np.arange(len(oracle))
    best = alone[rows, oracle]
    chosen = weights.argmax(1)
    over = alone - best[:, None]  # [n, M] what an expert costs beside the oracle's
    others = over.copy()
    others[rows, oracle] = np.inf
    gap = float(others.min(1).mean()) if alone.shape[1] > 1 else 0.0
    missing = deficit(weights, oracle)
    excess_soft = float(soft.mean() - best.mean())
    return SparseRisk(
        deficit=missing,
        margin_risk=margin_risk(weights, oracle),
        mismatch=float((chosen != oracle).mean()),
        soft=float(soft.mean()),
        sparse=float(alone[rows, chosen].mean()),
        oracle=float(best.mean()),
        worst=max(0.0, float(over.max())),
        gap=gap,
        mix=max(0.0, gap * missing - excess_soft),
    )
