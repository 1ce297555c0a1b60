"""k-means on the Gram matrix: all candidate counts and all restarts at once.

Lloyd's algorithm needs distances to centroids only, and those follow from inner products of points:

    ‖x_i - μ_c‖² = G_ii - 2/|c| Σ_{j∈c} G_ij + 1/|c|² Σ_{j,l∈c} G_jl

A client has hundreds of prompts with features hundreds to thousands of numbers wide. After one product G = X Xᵀ
the width no longer matters, and one further product an iteration moves every problem of every count.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_ITERATIONS = 100


def gram_kmeans(gram: torch.Tensor, counts: Sequence[int], restarts: int, seed: int) -> dict[int, np.ndarray]:
    """Labels [n] for every count, the best of ``restarts``; gram [n, n] in float64."""
    problems = np.repeat(counts, restarts)  # [P] clusters of each problem
    labels = _seeded(gram, problems, np.random.default_rng(seed))  # [n, P]
    inertia = gram.new_zeros(len(problems))
    active = torch.arange(len(problems), device=gram.device)  # most settle long before the last one does
    for _ in range(_ITERATIONS):
        before = labels[:, active]
        nearest = _to_centroids(gram, before, int(problems.max())).min(2)  # [n, active]
        labels[:, active], inertia[active] = nearest.indices, nearest.values.sum(0)
        active = active[(nearest.indices != before).any(0)]
        if not len(active):
            break
    best = inertia.view(len(counts), restarts).argmin(1).tolist()
    return {k: labels[:, i * restarts + best[i]].cpu().numpy() for i, k in enumerate(counts)}


def _seeded(gram: torch.Tensor, problems: np.ndarray, rng: np.random.Generator) -> torch.Tensor:
    """k-means++: each new centre is a point drawn by its squared distance to the nearest one so far."""
    n, most = len(gram), int(problems.max())
    squares = gram.diagonal()
    draws = torch.from_numpy(rng.random((most, len(problems)))).to(gram)  # the same on every device
    chosen = (draws[0] * n).long().clamp_(max=n - 1)  # [P]
    nearest = torch.full((n, len(problems)), torch.inf, dtype=gram.dtype, device=gram.device)
    labels = torch.zeros((n, len(problems)), dtype=torch.long, device=gram.device)
    wanted = torch.from_numpy(problems).to(gram.device)
    for c in range(most):
        if c > 0:
            cumulative = nearest.cumsum(0).T.contiguous()  # [P, n]
            chosen = torch.searchsorted(cumulative, (draws[c] * cumulative[:, -1])[:, None])[:, 0].clamp_(max=n - 1)
        distance = (squares[:, None] + squares[chosen] - 2 * gram[:, chosen]).clamp_(min=0)  # [n, P]
        closer = (distance < nearest) & (wanted > c)  # a problem that has all its centres takes no more
        labels[closer] = c
        nearest = torch.where(closer, distance, nearest)
    return labels


def _to_centroids(gram: torch.Tensor, labels: torch.Tensor, most: int) -> torch.Tensor:
    """Squared distances to every centroid, [n, P, k]; infinite where a cluster is empty."""
    member = gram.new_zeros(*labels.shape, most).scatter_(2, labels[:, :, None], 1)  # [n, P, k]
    sizes = member.sum(0)  # [P, k]
    sums = (gram @ member.flatten(1)).view_as(member)
    spread = (member * sums).sum(0) / sizes.square()
    distances = gram.diagonal()[:, None, None] - 2 * sums / sizes + spread
    return distances.nan_to_num_(nan=torch.inf)


def distances_of(gram: torch.Tensor) -> np.ndarray:
    """Euclidean distances [n, n]."""
    squares = gram.diagonal()
    distances = (squares[:, None] + squares[None] - 2 * gram).clamp_(min=0).sqrt_()
    return distances.fill_diagonal_(0).cpu().numpy()
