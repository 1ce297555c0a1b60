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
    labels = _seeded(gram, wanted, most, np.random.default_rng(seed))  # [P, n]
    inertia = gram.new_zeros(len(problems))
    distances = gram.new_full((len(problems), most, len(gram)), torch.inf)  # [P, k, n]
    sizes = gram.new_zeros(len(problems), most)  # [P, k]
    moved = torch.arange(most, device=gram.device) < wanted[:, None]  # [P, k] clusters whose points have changed
    active = torch.arange(len(problems), device=gram.device)  # most settle long before the last one does
    for _ in range(_ITERATIONS):
        distances[moved], sizes[moved] = _to_centroids(gram, labels, moved)
        before, own = labels[active], distances[active]
        nearest = own.min(1)  # [active, n]
        after, inertia[active] = nearest.indices, nearest.values.sum(1)
        if len(gram) <= _FEW:
            settled = (after == before).all(1, keepdim=True)
            after = torch.where(settled, _exchanged(before, own, sizes[active], wanted[active]), after)
        labels[active] = after
        problem, point = (after != before).nonzero(as_tuple=True)
        moved = torch.zeros_like(moved)
        for labelled in (before, after):
            moved[active[problem], labelled[problem, point]] = True
        active = active[problem.unique()]
        if not len(active):
            break
    best = inertia.view(len(counts), restarts).argmin(1).tolist()
    return {k: labels[i * restarts + best[i]].cpu().numpy() for i, k in enumerate(counts)}


def _seeded(gram: torch.Tensor, wanted: torch.Tensor, most: int, rng: np.random.Generator) -> torch.Tensor:
    """Greedy k-means++: candidates are points drawn by their squared distance to the nearest centre so far, and the
    one that leaves the least distance in all becomes the next centre."""
    n, count, trials = len(gram), len(wanted), 2 + int(math.log(most))
    squares = gram.diagonal()
    draws = torch.from_numpy(rng.random((most, count, trials))).to(gram)  # the same on every device
    candidates = (draws[0, :, :1] * n).long().clamp_(max=n - 1)  # [P, 1]
    nearest = torch.full((count, n), torch.inf, dtype=gram.dtype, device=gram.device)
    labels = torch.zeros((count, n), dtype=torch.long, device=gram.device)
    for c in range(most):
        taking = (wanted > c).nonzero()[:, 0]  # [p] problems that still take a centre
        if c > 0:
            cumulative = nearest[taking].cumsum(1)  # [p, n]
            candidates = torch.searchsorted(cumulative, draws[c, taking] * cumulative[:, -1:]).clamp_(max=n - 1)
        to_each = squares[candidates][:, :, None] + squares  # [p, L, n]
        to_each.sub_(gram[candidates], alpha=2).clamp_(min=0)
        left = torch.minimum(to_each, nearest[taking, None]).sum(2)  # [p, L]
        distance = to_each[torch.arange(len(taking), device=gram.device), left.argmin(1)]  # [p, n]
        labels[taking] = torch.where(distance < nearest[taking], c, labels[taking])
        nearest[taking] = torch.minimum(distance, nearest[taking])
    return labels


def _to_centroids(
    gram: torch.Tensor, labels: torch.Tensor, which: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared distances of all points to the centroids of some clusters, which [P, k]: [c, n], infinite where one
    is empty; and their sizes [c]."""
    problem, cluster = which.nonzero(as_tuple=True)
    member = (labels[problem] == cluster[:, None]).to(gram)  # [c, n]
    sizes = member.sum(1)
    sums = member @ gram
    spread = (member * sums).sum(1) / sizes.square()
    distances = torch.sub(gram.diagonal(), sums.div_(sizes[:, None]), alpha=2).add_(spread[:, None])
    return distances.nan_to_num_(nan=torch.inf), sizes


def _exchanged(
    labels: torch.Tensor, distances: torch.Tensor, sizes: torch.Tensor, wanted: torch.Tensor
) -> torch.Tensor:
    """Labels [P, n] after the one move of each problem that lowers its inertia most, where any does.

    Centroids follow their points: whoever leaves a cluster of a points saves a/(a-1) of its squared distance, and a
    cluster of b points costs it b/(b+1) of the distance there. Lloyd compares the distances alone, and stops where
    such moves are left (Hartigan, 1975)."""
    own = labels[:, None]
    held = sizes.gather(1, labels)  # [P, n]
    saved = distances.gather(1, own)[:, 0] * held / (held - 1).clamp(min=1)
    cost = (distances * (sizes / (sizes + 1))[:, :, None]).nan_to_num_(nan=0.0)  # an empty cluster costs nothing
    surplus = torch.arange(sizes.shape[1], device=sizes.device) >= wanted[:, None]  # [P, k]
    to = cost.masked_fill_(surplus[:, :, None], torch.inf).scatter_(1, own, torch.inf).min(1)  # [P, n]
    gain = (saved - to.values - _ROUNDING * saved).max(1)  # [P]
    mover = gain.indices[:, None]
    return labels.scatter(
        1, mover, torch.where(gain.values[:, None] > 0, to.indices.gather(1, mover), labels.gather(1, mover))
    )


def distances_of(gram: torch.Tensor) -> np.ndarray:
    """Euclidean distances [n, n]."""
    squares = gram.diagonal()
    distances = (squares[:, None] + squares[None] - 2 * gram).clamp_(min=0).sqrt_()
    return distances.fill_diagonal_(0).cpu().numpy()
