"""After alignment: does a newcomer's bucket belong to one of the experts?

The distance of a bucket to an expert is the mean of its distances to that expert's buckets, as in the average
linkage that formed the experts. It needs only the mean of their unit blocks, so the server forgets the buckets.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedweave.alignment.align import unit_blocks


def _rows(blocks: Sequence[np.ndarray]) -> np.ndarray:
    """Blocks [n, size] to rows [n, D] whose inner product is the mean cosine over blocks."""
    return np.concatenate(unit_blocks(blocks), axis=1) / np.sqrt(len(blocks), dtype=np.float32)


def expert_means(blocks: Sequence[np.ndarray], labels: Sequence[int], experts: int) -> np.ndarray:
    """[M, D]: what the server remembers of the aligned buckets."""
    rows, owner = _rows(blocks), np.asarray(labels)
    none = np.zeros_like(rows[0])
    return np.stack([rows[owner == m].mean(0) if (owner == m).any() else none for m in range(experts)])


def expert_distances(blocks: Sequence[np.ndarray], means: np.ndarray) -> np.ndarray:
    """[n, M]: mean distance of each bucket to the buckets of each expert."""
    return 1.0 - _rows(blocks) @ means.T


def joining_limit(distance: np.ndarray, labels: Sequence[int]) -> float:
    """Halfway between how far the aligned buckets [P, P] lie from their own expert's and from the next expert's."""
    owner = np.asarray(labels)
    experts = np.unique(owner)
    if len(experts) < 2:
        return float("inf")
    own, other = [], []
    for p, m in enumerate(owner):
        mates = (owner == m) & (np.arange(len(owner)) != p)
        if mates.any():
            own.append(distance[p, mates].mean())
        other.append(min(distance[p, owner == k].mean() for k in experts if k != m))
    return float((np.mean(own) if own else 0.0) + np.mean(other)) / 2
