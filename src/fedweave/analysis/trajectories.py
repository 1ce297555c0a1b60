"""Two ways to train one client's router on its buckets (paper, Appendix C.3), followed step by step.

Persistent: one state walks through the interleaved schedule. Reset-and-average: every bucket walks alone from the
same start, and the states are averaged. R_c is bucket c's loss, π_c its share, R = Σ π_c R_c the client's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedweave.analysis.diagnosis import PathFigures

# (states [B, Q], bucket of each [B]) -> (losses [B], gradients of R_bucket [B, Q])
Gradient = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


@dataclass
class RouterPaths:
    """What both walks met, step by step; norms are squared."""

    rate: float  # η
    heterogeneity: float  # ζ² = Σ π_c ‖g_c − g‖² at the common start
    first_gradients: np.ndarray = field(repr=False)  # [C, Q] g_c there
    order_bias: list[float] = field(default_factory=list)  # ‖q_s‖², s = 0 … S−1
    net_order_bias: float = 0.0  # ‖mean of q_s‖²: what does not cancel over the schedule
    dispersion: list[float] = field(default_factory=list)  # D_s, s = 0 … S
    consensus_error: list[float] = field(default_factory=list)  # ‖e_s‖², s = 0 … S−1
    smoothness: float = 0.0  # the largest ‖g_c(φ) − g_c(φ̄)‖ / ‖φ − φ̄‖ met: L_R as far as it was seen
    gradient_norm: float = 0.0  # ‖g‖ at the start
    loss_start: float = 0.0
    loss_persistent: float = 0.0  # R(φ_S)
    loss_reset: float = 0.0  # R(φ̄_S)

    def order_term(self, mu: float = 0.0) -> float:
        """O = η/2 Σ_s (1−μη)^(S−1−s) ‖q_s‖²; μ = 0 leaves the contraction out."""
        return residual(self.order_bias, self.rate, mu)

    def consensus_term(self, mu: float = 0.0) -> float:
        """C, the same sum over ‖e_s‖²."""
        return residual(self.consensus_error, self.rate, mu)

    @property
    def first_step_ratio(self) -> float:
        """D_1 / (η² ζ²): 1 by the first-step identity."""
        expected = self.rate**2 * self.heterogeneity
        return self.dispersion[1] / expected if expected > 0 else 1.0

    @property
    def consensus_bound_holds(self) -> bool:
        """‖e_s‖² ≤ L² D_s with the smoothness that was met."""
        pairs = zip(self.consensus_error, self.dispersion, strict=False)
        return all(e <= self.smoothness**2 * d * (1 + 1e-6) + 1e-30 for e, d in pairs)

    @property
    def pl_most(self) -> float:
        """The largest μ with ‖g‖² ≥ 2μ (R − R*) at the start. In place of the unknown R* stands the lowest loss
        met, which is no lower; infinite where no walk got below the start."""
        gained = self.loss_start - min(self.loss_persistent, self.loss_reset)
        return self.gradient_norm**2 / (2 * gained) if gained > 0 else float("inf")

    def figures(self) -> PathFigures:
        """Everything but the vectors."""
        return {
            "rate": self.rate,
            "heterogeneity": self.heterogeneity,
            "order_bias": self.order_bias,
            "net_order_bias": self.net_order_bias,
            "dispersion": self.dispersion,
            "consensus_error": self.consensus_error,
            "smoothness": self.smoothness,
            "gradient_norm": self.gradient_norm,
            "loss_start": self.loss_start,
            "loss_persistent": self.loss_persistent,
            "loss_reset": self.loss_reset,
            "order_term": self.order_term(),
            "consensus_term": self.consensus_term(),
            "first_step_ratio": self.first_step_ratio,
            "consensus_bound_holds": self.consensus_bound_holds,
            "pl_most": self.pl_most,
        }


def residual(squared_norms: Sequence[float], rate: float, mu: float = 0.0) -> float:
    """η/2 Σ_s (1−μη)^(S−1−s) ‖·‖²: how a biased direction enters the bound on the router's loss."""
    decay = (1 - mu * rate) ** np.arange(len(squared_norms) - 1, -1, -1)
    return float(rate / 2 * (decay * np.asarray(squared_norms)).sum())


def follow(
    gradient: Gradient,
    start: np.ndarray,  # [Q] φ_0
    shares: np.ndarray,  # [C] π
    order: Sequence[int],  # bucket of every persistent step; its length is S
    rate: float,
    on_step: Callable[[], None] = lambda: None,
) -> RouterPaths:
    """Walk both ways for S steps; ``on_step`` is called S + 1 times. A step asks for all gradients it needs at
    once: each bucket's at the persistent state, at its own reset state and at the reset mean."""
    count = len(shares)
    buckets = np.arange(count)

    def at(*states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Losses [.., C] and gradients [.., C, Q] of all buckets at [Q] (the same for all) or [C, Q] states."""
        rows = np.concatenate([np.broadcast_to(state, (count, len(start))) for state in states])
        losses, gradients = gradient(rows, np.tile(buckets, len(states)))
        return losses.reshape(len(states), count), gradients.reshape(len(states), count, -1)

    losses, gradients = at(start)
    first = gradients[0]  # [C, Q]
    whole = shares @ first  # g [Q]
    spread = shares @ ((first - whole) ** 2).sum(1)
    paths = RouterPaths(rate, float(spread), first_gradients=first, loss_start=float(losses[0] @ shares))
    paths.gradient_norm = float(np.linalg.norm(whole))
    persistent, reset = start, np.tile(start, (count, 1))  # [Q], [C, Q]
    at_persistent = at_reset = at_mean = first
    net = np.zeros_like(start)
    for s, chosen in enumerate(order):
        mean = shares @ reset  # φ̄_s [Q]
        away = ((reset - mean) ** 2).sum(1)  # [C]
        if s > 0:
            at_persistent, at_reset, at_mean = at(persistent, reset, mean)[1]
        bias = at_persistent[chosen] - shares @ at_persistent  # q_s
        drift = at_reset - at_mean  # [C, Q]
        error = shares @ drift  # e_s
        net += bias / len(order)
        paths.order_bias.append(float(bias @ bias))
        paths.consensus_error.append(float(error @ error))
        paths.dispersion.append(float(shares @ away) if s > 0 else 0.0)
        if s > 0 and (moved := away > 0).any():
            ratio = (drift[moved] ** 2).sum(1) / away[moved]
            paths.smoothness = max(paths.smoothness, float(np.sqrt(ratio.max())))
        persistent = persistent - rate * at_persistent[chosen]
        reset = reset - rate * at_reset
        on_step()
    mean = shares @ reset
    paths.dispersion.append(float(shares @ ((reset - mean) ** 2).sum(1)))
    paths.net_order_bias = float(net @ net)
    paths.loss_persistent, paths.loss_reset = map(float, at(persistent, mean)[0] @ shares)
    on_step()
    return paths


@dataclass
class WeightMismatch:
    """Reset endpoints after H_c steps that are averaged by bucket size: π̃ ∝ π_c H_c, as in *w/o client-router*."""

    distance: float  # ‖π̃ − π‖₁
    bias: float  # ‖b_wt‖ = ‖Σ_c (π̃_c − π_c) g_c‖
    largest_gradient: float  # G_R = max_c ‖g_c‖

    @property
    def bound(self) -> float:
        """G_R ‖π̃ − π‖₁."""
        return self.largest_gradient * self.distance

    @property
    def bound_holds(self) -> bool:
        return self.bias <= self.bound * (1 + 1e-9) + 1e-30


def weight_mismatch(shares: np.ndarray, steps: Sequence[int], gradients: np.ndarray) -> WeightMismatch:
    """Of buckets with shares π [C], steps H [C] and gradients g_c [C, Q]."""
    effective = shares * np.asarray(steps)
    shift = effective / effective.sum() - shares
    norms = np.linalg.norm(gradients, axis=1)
    return WeightMismatch(float(np.abs(shift).sum()), float(np.linalg.norm(shift @ gradients)), float(norms.max()))
