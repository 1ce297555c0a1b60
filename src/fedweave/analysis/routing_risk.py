"""From router error to the risk of one active expert (paper, Appendix C.4).

m†(x) is the oracle expert of x's pattern, m̂(x) the one with the largest router weight. Margins are differences of
log weights, which for one router are differences of its logits.
"""

import numpy as np

from fedweave.analysis.diagnosis import SparseRiskFigures


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


def sparse_risk(
    weights: np.ndarray,  # [n, M] router weights
    oracle: np.ndarray,  # [n] m†
    alone: np.ndarray,  # [n, M] ℓ_m: loss with expert m alone
    soft: np.ndarray,  # [n] loss of the soft mixture
) -> SparseRiskFigures:
    rows = np.arange(len(oracle))
    best = alone[rows, oracle]
    chosen = weights.argmax(1)
    over = alone - best[:, None]  # [n, M] what an expert costs beside the oracle's
    others = over.copy()
    others[rows, oracle] = np.inf
    gap = float(others.min(1).mean()) if alone.shape[1] > 1 else 0.0
    missing, margin, worst = deficit(weights, oracle), margin_risk(weights, oracle), max(0.0, float(over.max()))
    loss_soft, loss_sparse, loss_oracle = float(soft.mean()), float(alone[rows, chosen].mean()), float(best.mean())
    mix = max(0.0, gap * missing - float(soft.mean() - best.mean()))
    bound = 2 * worst / gap * (loss_soft - loss_oracle + mix) if gap > 0 else None
    slack = 1e-6 * max(1.0, worst)
    return {
        "deficit": missing,
        "margin_risk": margin,
        "mismatch": float((chosen != oracle).mean()),
        "soft": loss_soft,
        "sparse": loss_sparse,
        "oracle": loss_oracle,
        "worst": worst,
        "gap": gap,
        "mix": mix,
        "examples": len(rows),
        "excess": loss_sparse - loss_oracle,
        "approximation_most": max(0.0, loss_soft - loss_oracle),
        "margin_bound": worst * margin,
        "bound": bound,
        "calibrated": gap > 0,
        "chain_holds": loss_sparse - loss_oracle <= worst * margin + slack
        and (bound is None or worst * margin <= bound + slack),
    }
