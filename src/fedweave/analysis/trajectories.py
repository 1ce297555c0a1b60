"""Two ways to train one client's router on its buckets (paper, Appendix C.3), followed step by step.

Persistent: one state walks through the interleaved schedule. Reset-and-average: every bucket walks alone from the
same start, and the states are averaged. R_c is bucket c's loss, π_c its share, R = Σ π_c R_c the client's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

# (states [B, Q], bucket of each [B]) -> (losses [B], gradients of R_bucket [B, Q])
Gradient = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


@dataclass
class RouterPaths:
    """What both walks met, step by step; norms are squared."""

    rate: float  # η
    heterogeneity: float  # ζ² = Σ π_c ‖g_c − g‖² at the common start
    order_bias: list[float] = field(default_factory=list)  # ‖q_s‖², s = 0 … S−1
    net_order_bias: float = 0.0  # ‖mean of q_s‖²: what does not cancel over the schedule
    dispersion: list[float] = field(default_factory=list)  # D_s, s = 0 … S
    consensus_error: list[float] = field(default_factory=list)  # ‖e_s‖², s = 0 … S−1
    smoothness: float = 0.0  # the largest ‖g_c(φ) − g_c(φ̄)‖ / ‖φ − φ̄‖ met: L_R as far as it was seen
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
    """Walk both ways for S steps. A step asks for all gradients it needs at once: each bucket's at the persistent
    state, at its own reset state and at the reset mean."""
    buckets = np.arange(len(shares))
    persistent, reset = start.copy(), np.tile(start, (len(shares), 1))  # [Q], [C, Q]
    biases = []
    paths = RouterPaths(rate, 0.0)
    for s in range(len(order) + 1):
        mean = shares @ reset  # φ̄_s [Q]
        own = np.tile(persistent, (len(shares), 1))
        centre = np.tile(mean, (len(shares), 1))
        losses, gradients = gradient(np.concatenate([own, reset, centre]), np.tile(buckets, 3))
        at_persistent, at_reset, at_mean = gradients.reshape(3, len(shares), -1)  # [C, Q] each
        loss_persistent, _, loss_mean = losses.reshape(3, len(shares)) @ shares
        away = ((reset - mean) ** 2).sum(1)  # [C]
        paths.dispersion.append(float(shares @ away))
        on_step()
        if s == 0:
            paths.loss_start = float(loss_persistent)
            whole = shares @ at_persistent
            paths.heterogeneity = float(shares @ ((at_persistent - whole) ** 2).sum(1))
        if s == len(order):
            paths.loss_persistent, paths.loss_reset = float(loss_persistent), float(loss_mean)
            break
        bias = at_persistent[order[s]] - shares @ at_persistent  # q_s
        biases.append(bias)
        paths.order_bias.append(float(bias @ bias))
        drift = at_reset - at_mean  # [C, Q]
        error = shares @ drift  # e_s
        paths.consensus_error.append(float(error @ error))
        moved = away > 0
        if moved.any():
            ratio = (drift[moved] ** 2).sum(1) / away[moved]
            paths.smoothness = max(paths.smoothness, float(np.sqrt(ratio.max())))
        persistent = persistent - rate * at_persistent[order[s]]
        reset = reset - rate * at_reset
    net = np.mean(biases, axis=0)
    paths.net_order_bias = float(net @ net)
    return paths


def weight_mismatch(shares: np.ndarray, steps: Sequence[int], gradients: np.ndarray) -> tuple[float, float]:
    """(‖π̃ − π‖₁, ‖Σ_c (π̃_c − π_c) g_c‖) of reset endpoints after H_c steps that are averaged by bucket size:
    π̃ ∝ π_c H_c, as in *w/o client-router*; gradients [C, Q]."""
    effective = shares * np.asarray(steps)
    shift = effective / effective.sum() - shares
    return float(np.abs(shift).sum()), float(np.linalg.norm(shift @ gradients))
