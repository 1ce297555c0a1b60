"""Gradient conflict under pattern mixtures (paper, Appendix C.1).

g_k is the gradient of pattern k's loss. All that conflict needs of the gradients is their Gram matrix
⟨g_k, g_l⟩, [K, K], so that a million columns are touched once and mixtures are then free.
"""

import numpy as np


def conflict(gram: np.ndarray, shares: np.ndarray) -> float:
    """Γ = Σ_{k<l} p_k p_l [−⟨g_k, g_l⟩]₊ of a unit with pattern shares p [K]; a client or a bucket."""
    opposed = np.clip(-gram, 0.0, None)
    return float(np.triu(np.outer(shares, shares) * opposed, k=1).sum())


def cancelled(gram: np.ndarray, shares: np.ndarray) -> float:
    """2Γ / Σ_k p_k² ‖g_k‖²: the part of the patterns' own squared norm that conflict takes from ‖Σ_k p_k g_k‖²."""
    own = float((shares**2 * np.diag(gram)).sum())
    return 2 * conflict(gram, shares) / own if own > 0 else 0.0


def pure_bucket_bound(shares: np.ndarray, largest_norm: float) -> float:
    """(ε + ε²/2) G²: no bucket with off-dominant share ε has more conflict, whatever the gradients."""
    off = 1.0 - float(np.max(shares))
    return (off + off**2 / 2) * largest_norm**2


def cosines(gram: np.ndarray) -> np.ndarray:
    """Cosine of every pair of gradients, [K, K]; 0 where one of them vanishes."""
    norms = np.sqrt(np.diag(gram))
    scale = np.outer(norms, norms)
    return np.divide(gram, scale, out=np.zeros_like(gram), where=scale > 0)
