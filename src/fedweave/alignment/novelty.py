"""Is a bucket that arrives in mid-run of a known kind? Its signature against those that the server has kept.

A bucket of a known kind is one more draw from whatever the aligned buckets were drawn from. Of n + 1 draws each is
equally likely to lie farthest out, so the chance that the new one lies farther from its expert than all but k of
the n aligned ones lie from theirs is (k + 1) / (n + 1). The limit is the distance for which that chance is the
rate of false alarms that was asked for. It holds for any distribution, and promises nothing about new kinds: how
far these lie out is measured, not assumed (docs/living.md). Where experts lie far apart the limit is halfway to the
next one, if that is farther: smaller buckets have noisier signatures than the aligned ones, and there is room.

A router that knows familiar prompts is a second witness. A share q of them may count as strange, so the chance that
most of a bucket of a known kind does is 2q at most, however its prompts hang together (Markov's inequality). A
known kind in other words is strange, too, but its signature is not: such a bucket is new only if its signature lies
farther out than half of the aligned ones do.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from fedweave.alignment.align import signature_distance

MOSTLY = 0.5  # share of a bucket's prompts that are strange, beyond which the bucket is


def own_distances(distance: np.ndarray, labels: Sequence[int]) -> list[float]:
    """How far each aligned bucket lies from the others of its expert on average, ascending; distance [P, P].
    Buckets that have their expert alone say nothing."""
    owner, found = np.asarray(labels), []
    for p, m in enumerate(owner):
        mates = (owner == m) & (np.arange(len(owner)) != p)
        if mates.any():
            found.append(float(distance[p, mates].mean()))
    return sorted(found)


def novelty_limit(own: Sequence[float], alarms: float, halfway: float = 0.0) -> float:
    """The distance beyond which a bucket of a known kind lies with chance ``alarms``, or with chance 1 / (n + 1)
    where n aligned buckets cannot promise less; ``halfway`` to the next expert at least. Without any bucket to
    compare with, nothing is new."""
    if not own:
        return math.inf
    return max(halfway, own[min(len(own), math.ceil((len(own) + 1) * (1 - alarms))) - 1])


def novel(distance: np.ndarray, strange: Sequence[float], own: Sequence[float], limit: float) -> np.ndarray:
    """Which buckets are of no known kind, [n] bool: from their distances to the nearest expert, [n], and the share
    of each one's prompts that the router takes for strange."""
    usual = float(np.median(own)) if len(own) else math.inf
    return (distance > limit) | ((np.asarray(strange) > MOSTLY) & (distance > usual))


def alike(means: np.ndarray, own: Sequence[float], born: Sequence[int]) -> tuple[int, int] | None:
    """The nearest two experts, of which one opened in mid-run (``born`` > 0), if their buckets lie no farther from
    each other than half of the aligned buckets lie from their own; means [M, D] are of unit signatures, so that
    inner products are mean cosines."""
    distance = 1.0 - means @ means.T
    pairs = [(a, b) for b in range(len(means)) for a in range(b) if born[a] or born[b]]
    if not pairs or not own:
        return None
    nearest = min(pairs, key=lambda pair: distance[pair])
    return nearest if distance[nearest] <= float(np.median(own)) else None


def kinds_of(blocks: Sequence[np.ndarray], limit: float) -> np.ndarray:
    """Which of these buckets are one kind, [n]: clusters by average linkage whose buckets are nearer than the
    limit, numbered by first appearance. Blocks are [n, size], one per layer."""
    count = len(blocks[0])
    if count < 2:
        return np.zeros(count, dtype=int)
    tree = linkage(squareform(signature_distance(blocks), checks=False), method="average")
    found = fcluster(tree, limit, criterion="distance")
    return np.unique(found, return_index=True)[1].argsort().argsort()[found - 1]
