"""k-means on the Gram matrix: all candidate counts and all restarts at once.

Lloyd's algorithm needs distances to centroids only, and those follow from inner products of points:

    ‖x_i - μ_c‖² = G_ii - 2/|c| Σ_{j∈c} G_ij + 1/|c|² Σ_{j,l∈c} G_jl

A client has hundreds of prompts with features hundreds to thousands of numbers wide. After one product G = X Xᵀ
the width no longer matters, and one further product an iteration moves every problem of every count.

Seeding is scikit-learn's greedy k-means++, so that with many points both are equally good. What differs: random
draws; Lloyd's steps go on until nothing changes (scikit-learn stops at a tolerance); every count has as many
candidates as the largest; and among few points, where Lloyd's optima lie far apart, single points are exchanged
after it, which also fills a cluster that became empty (scikit-learn fills it with the farthest point; here, with
many points, it stays empty and the count finds fewer clusters).
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

_ITERATIONS = 100
_FEW = 128  # points; with more, Lloyd's optima are close to each other, and single moves many
_ROUNDING = 1e-9  # of a gain


def gram_kmeans(gram: torch.Tensor, counts: Sequence[int], restarts: int, seed: int) -> dict[int, np.ndarray]:
    """Labels [n] for every count, the best of ``restarts``; gram [n, n] in float64."""
    problems = np.repeat(counts, restarts)  # [P] clusters of each problem
    wanted, most = torch.from_numpy(problems).to(gram.device), int(problems.max())
    labels = _seeded(gram, wanted, most, np.random.default_rng(seed))  # [n, P]
    inertia = gram.new_zeros(len(problems))
    active = torch.arange(len(problems), device=gram.device)  # most settle long before the last one does
    for _ in range(_ITERATIONS):
        before = labels[:, active]
        distances, sizes = _to_centroids(gram, before, most)
        nearest = distances.min(2)  # [n, active]
        after, inertia[active] = nearest.indices, nearest.values.sum(0)
        if len(gram) <= _FEW:
            settled = (after == before).all(0)
            after = torch.where(settled, _exchanged(before, distances, sizes, wanted[active]), after)
        labels[:, active] = after
        active = active[(after != before).any(0)]
        if not len(active):
            break
    best = inertia.view(len(counts), restarts).argmin(1).tolist()
    return {k: labels[:, i * restarts + best[i]].cpu().numpy() for i, k in enumerate(counts)}


def _seeded(gram: torch.Tensor, wanted: torch.Tensor, most: int, rng: np.random.Generator) -> torch.Tensor:
    """Greedy k-means++: candidates are points drawn by their squared distance to the nearest centre so far, and the
    one that leaves the least distance in all becomes the next centre."""
    n, count, trials = len(gram), len(wanted), 2 + int(math.log(most))
    squares = gram.diagonal()
    draws = torch.from_numpy(rng.random((most, count, trials))).to(gram)  # the same on every device
    candidates = (draws[0, :, :1] * n).long().clamp_(max=n - 1)  # [P, 1]
    nearest = torch.full((n, count), torch.inf, dtype=gram.dtype, device=gram.device)
    labels = torch.zeros((n, count), dtype=torch.long, device=gram.device)
    for c in range(most):
        if c > 0:
            cumulative = nearest.cumsum(0).T.contiguous()  # [P, n]
            candidates = torch.searchsorted(cumulative, draws[c] * cumulative[:, -1:]).clamp_(max=n - 1)
        # [n, P, L]
        to_each = (squares[:, None, None] + squares[candidates] - 2 * gram[:, candidates]).clamp_(min=0)
        left = torch.minimum(to_each, nearest[:, :, None]).sum(0)  # [P, L]
        distance = to_each.gather(2, left.argmin(1)[None, :, None].expand(n, -1, 1))[:, :, 0]  # [n, P]
        closer = (distance < nearest) & (wanted > c)  # a problem that has all its centres takes no more
        labels[closer] = c
        nearest = torch.where(closer, distance, nearest)
    return labels


def _to_centroids(gram: torch.Tensor, labels: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared distances to every centroid, [n, P, k], infinite where a cluster is empty; and the sizes [P, k]."""
    member = gram.new_zeros(*labels.shape, most).scatter_(2, labels[:, :, None], 1)  # [n, P, k]
    sizes = member.sum(0)
    sums = (gram @ member.flatten(1)).view_as(member)
    spread = (member * sums).sum(0) / sizes.square()
    distances = gram.diagonal()[:, None, None] - 2 * sums / sizes + spread
    return distances.nan_to_num_(nan=torch.inf), sizes


def _exchanged(
    labels: torch.Tensor, distances: torch.Tensor, sizes: torch.Tensor, wanted: torch.Tensor
) -> torch.Tensor:
    """Labels [n, P] after the one move of each problem that lowers its inertia most, where any does.

    Centroids follow their points: whoever leaves a cluster of a points saves a/(a-1) of its squared distance, and a
    cluster of b points costs it b/(b+1) of the distance there. Lloyd compares the distances alone, and stops where
    such moves are left (Hartigan, 1975)."""
    own = labels[:, :, None]
    held = sizes.gather(1, labels.T).T  # [n, P]
    saved = distances.gather(2, own)[:, :, 0] * held / (held - 1).clamp(min=1)
    cost = (distances * (sizes / (sizes + 1))).nan_to_num_(nan=0.0)  # an empty cluster costs nothing
    surplus = torch.arange(sizes.shape[1], device=sizes.device) >= wanted[:, None]  # [P, k]
    to = cost.masked_fill_(surplus, torch.inf).scatter_(2, own, torch.inf).min(2)  # [n, P]
    gain = (saved - to.values - _ROUNDING * saved).max(0)  # [P]
    mover = gain.indices[None]
    return labels.scatter(
        0, mover, torch.where(gain.values > 0, to.indices.gather(0, mover), labels.gather(0, mover))
    )


def distances_of(gram: torch.Tensor) -> np.ndarray:
    """Euclidean distances [n, n]."""
    squares = gram.diagonal()
    distances = (squares[:, None] + squares[None] - 2 * gram).clamp_(min=0).sqrt_()
    return distances.fill_diagonal_(0).cpu().numpy()
