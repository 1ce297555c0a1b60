"""How well a partition parts: buckets and experts are as many as part best."""

import numpy as np

_ZERO = 1e-12


def silhouette(distance: np.ndarray, labels: np.ndarray) -> float:
    """Mean silhouette: (b - a) / max(a, b), where a is the mean distance to the own cluster and b to the nearest
    other one; 0 for a cluster of one. distance [n, n]; labels [n] of clusters of which none is empty. One product:
    scikit-learn takes longer to look at what it was given."""
    rows = np.arange(len(labels))
    members = np.eye(labels.max() + 1, dtype=distance.dtype)[labels]  # [n, k]
    sums, sizes = (distance @ members).astype(np.float64), members.sum(0)
    own = sums[rows, labels] / np.maximum(sizes[labels] - 1, 1)
    means = sums / sizes
    means[rows, labels] = np.inf
    other = means.min(1)
    scores = (other - own) / np.maximum(np.maximum(own, other), _ZERO)
    return float(np.where(sizes[labels] > 1, scores, 0.0).mean())
