"""Two ways to train one client's router on its buckets (paper, Appendix C.3), followed step by step.

Persistent: one state walks through the interleaved schedule. Reset-and-average: every bucket walks alone from the
same start, and the states are averaged. R_c is bucket c's loss, π_c its share, R = Σ π_c R_c the client's.
"""

from collections.abc import Callable, Sequence

import numpy as np

from fedweave.analysis.diagnosis import MismatchFigures, PathFigures

# (states [B, Q], bucket of each [B]) -> (losses [B], gradients of R_bucket [B, Q])
Gradient = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def first_step_ratio(dispersion: Sequence[float], rate: float, heterogeneity: float) -> float:
    """D_1 / (η² ζ²): 1 by the first-step identity."""
    expected = rate**2 * heterogeneity
    return dispersion[1] / expected if expected > 0 else 1.0


def consensus_bound_holds(errors: Sequence[float], dispersion: Sequence[float], smoothness: float) -> bool:
    """‖e_s‖² ≤ L² D_s with the smoothness that was met."""
    pairs = zip(errors, dispersion, strict=False)
    return all(e <= smoothness**2 * d * (1 + 1e-6) + 1e-30 for e, d in pairs)


def pl_most(gradient_norm: float, start: float, *ends: float) -> float:
    """The largest μ with ‖g‖² ≥ 2μ (R − R*) at the start. In place of the unknown R* stands the lowest loss met,
    which is no lower; infinite where no walk got below the start."""
    gained = start - min(ends)
    return gradient_norm**2 / (2 * gained) if gained > 0 else float("inf")


def residual(squared_norms: Sequence[float], rate: float, mu: float = 0.0) -> float:
    """η/2 Σ_s (1−μη)^(S−1−s) ‖·‖²: how a biased direction enters the bound on the router's loss; μ = 0 leaves the
    contraction out."""
    decay = (1 - mu * rate) ** np.arange(len(squared_norms) - 1, -1, -1)
    return float(rate / 2 * (decay * np.asarray(squared_norms)).sum())


def follow(
    gradient: Gradient,
    start: np.ndarray,  # [Q] φ_0
    shares: np.ndarray,  # [C] π
    order: Sequence[int],  # bucket of every persistent step; its length is S
    rate: float,
    on_step: Callable[[], None] = lambda: None,
) -> tuple[PathFigures, np.ndarray]:
    """Walk both ways for S steps; ``on_step`` is called S + 1 times. A step asks for all gradients it needs at
    once: each bucket's at the persistent state, at its own reset state and at the reset mean. (What was met, the
    buckets' gradients g_c at the start [C, Q])"""
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
    heterogeneity = float(shares @ ((first - whole) ** 2).sum(1))
    order_bias, consensus_error, dispersion, smoothness = [], [], [], 0.0
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
        order_bias.append(float(bias @ bias))
        consensus_error.append(float(error @ error))
        dispersion.append(float(shares @ away) if s > 0 else 0.0)
        if s > 0 and (moved := away > 0).any():
            ratio = (drift[moved] ** 2).sum(1) / away[moved]
            smoothness = max(smoothness, float(np.sqrt(ratio.max())))
        persistent = persistent - rate * at_persistent[chosen]
        reset = reset - rate * at_reset
        on_step()
    mean = shares @ reset
    dispersion.append(float(shares @ ((reset - mean) ** 2).sum(1)))
    gradient_norm, loss_start = float(np.linalg.norm(whole)), float(losses[0] @ shares)
    loss_persistent, loss_reset = map(float, at(persistent, mean)[0] @ shares)
    on_step()
    return {
        "rate": rate,
        "heterogeneity": heterogeneity,
        "order_bias": order_bias,
        "net_order_bias": float(net @ net),
        "dispersion": dispersion,
        "consensus_error": consensus_error,
        "smoothness": smoothness,
        "gradient_norm": gradient_norm,
        "loss_start": loss_start,
        "loss_persistent": loss_persistent,
        "loss_reset": loss_reset,
        "order_term": residual(order_bias, rate),
        "consensus_term": residual(consensus_error, rate),
        "first_step_ratio": first_step_ratio(dispersion, rate, heterogeneity),
        "consensus_bound_holds": consensus_bound_holds(consensus_error, dispersion, smoothness),
        "pl_most": pl_most(gradient_norm, loss_start, loss_persistent, loss_reset),
    }, first


def weight_mismatch(shares: np.ndarray, steps: Sequence[int], gradients: np.ndarray) -> MismatchFigures:
    """Of buckets with shares π [C], steps H [C] and gradients g_c [C, Q], whose reset endpoints after H_c steps are
    averaged by bucket size: π̃ ∝ π_c H_c, as in *w/o client-router*."""
    effective = shares * np.asarray(steps)
    shift = effective / effective.sum() - shares
    distance, bias = float(np.abs(shift).sum()), float(np.linalg.norm(shift @ gradients))
    largest = float(np.linalg.norm(gradients, axis=1).max())
    return {
        "weight_mismatch": distance,
        "weight_mismatch_bias": bias,
        "weight_mismatch_bound": largest * distance,
        "weight_mismatch_bound_holds": bias <= largest * distance * (1 + 1e-9) + 1e-30,
        "largest_gradient": largest,
    }
