"""Cross-client alignment: signatures of all buckets to M experts, M chosen by silhouette (paper, Eq. 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from sklearn.cluster import AgglomerativeClustering
from sklearn.metrics import silhouette_score

_ZERO = 1e-12


def signature_distance(blocks: Sequence[np.ndarray]) -> np.ndarray:
    """d_uv: the mean over LoRA-B blocks of 1 - cosine; blocks are [prototypes, size], one per layer.

    Two zero blocks are alike (distance 0); a zero block is unlike any other (distance 1).
    """
    prototypes = len(blocks[0])
    similarity = np.zeros((prototypes, prototypes))
    for block in blocks:
        norms = np.linalg.norm(block, axis=1, keepdims=True)
        empty = norms[:, 0] <= _ZERO
        unit = np.where(empty[:, None], 0.0, block / np.maximum(norms, _ZERO))
        similarity += np.clip(unit @ unit.T, -1.0, 1.0) + np.outer(empty, empty)
    distance = 1.0 - similarity / len(blocks)
    distance = np.maximum((distance + distance.T) / 2, 0.0)
    np.fill_diagonal(distance, 0.0)
    return distance


@dataclass
class Alignment:
    """The one-time decision that fixes M and a(i,c)."""

    experts: int
    labels: np.ndarray  # [prototypes] the expert of each
    silhouettes: dict[int, float]
    note: str = ""


def align(distance: np.ndarray, max_experts: int) -> Alignment:
    """Average-linkage clustering for every feasible M in 2 … min(max_experts, P - 1); the best silhouette wins."""
    prototypes = len(distance)
    one = np.zeros(prototypes, dtype=int)
    if prototypes < 3 or max_experts < 2:
        return Alignment(1, one, {}, f"{prototypes} prototypes are too few to align: one expert")
    if distance.max() <= _ZERO:
        return Alignment(1, one, {}, "all signatures are alike: one expert")
    best, silhouettes = None, {}
    for count in range(2, min(max_experts, prototypes - 1) + 1):
        model = AgglomerativeClustering(count, metric="precomputed", linkage="average")
        labels = model.fit_predict(distance)
        silhouettes[count] = float(silhouette_score(distance, labels, metric="precomputed"))
        if best is None or silhouettes[count] > silhouettes[best[0]]:  # ties keep the smaller count
            best = (count, labels)
    assert best is not None
    note = ""
    if prototypes - 1 < max_experts:
        note = f"only {prototypes} prototypes: at most {prototypes - 1} experts were considered"
    return Alignment(best[0], _by_first_appearance(best[1]), silhouettes, note)


def _by_first_appearance(labels: np.ndarray) -> np.ndarray:
    """Renumber so that expert 0 is the first prototype's, whatever the library's own order."""
    order: dict[int, int] = {}
    return np.array([order.setdefault(int(label), len(order)) for label in labels])
