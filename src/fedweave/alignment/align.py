"""Cross-client alignment: signatures of all buckets to M experts, M chosen by silhouette (paper, Eq. 1).

Ten thousand prototypes take seconds: one matrix product gives all distances, one tree serves every M, and a
silhouette is another product.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform

from fedweave.discovery.silhouette import silhouette

_ZERO = 1e-12
_ALIKE = 1e-6  # float32 rounding of a distance of zero


def unit_blocks(blocks: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Blocks [n, size], one per layer, at unit length side by side [n, D], and where a block is zero [n, L].

    Inner products of both together are sums of cosines over blocks, by this definition: two zero blocks are alike
    (cosine 1), a zero block is unlike any other (cosine 0).
    """
    units, zeros = [], []
    for block in blocks:
        norms = np.sqrt(np.einsum("ij,ij->i", block, block, dtype=np.float64))[:, None]  # no overflow
        zeros.append(norms <= _ZERO)
        units.append(np.where(zeros[-1], 0.0, block / np.maximum(norms, _ZERO)).astype(np.float32))
    return np.concatenate(units, axis=1), np.concatenate(zeros, axis=1).astype(np.float32)


def signature_distance(blocks: Sequence[np.ndarray]) -> np.ndarray:
    """d_uv: the mean over LoRA-B blocks of 1 - cosine; blocks are [prototypes, size], one per layer."""
    units, zeros = unit_blocks(blocks)
    rows = np.concatenate([units, zeros], axis=1) if zeros.any() else units
    distance = rows @ rows.T
    distance *= -1.0 / len(blocks)
    distance += 1.0
    np.maximum(distance, 0.0, out=distance)
    np.fill_diagonal(distance, 0.0)
    return distance


@dataclass
class Alignment:
    """The one-time decision that fixes M and a(i,c)."""

    experts: int
    labels: np.ndarray  # [prototypes] the expert of each
    silhouettes: dict[int, float]
    note: str = ""


def align(
    distance: np.ndarray,
    max_experts: int,
    method: str = "average",
    least: float = -1.0,
    sizes: np.ndarray | None = None,
    min_share: float = 0.0,
) -> Alignment:
    """Hierarchical clustering for every feasible M in 2 … min(max_experts, P - 1); the best silhouette wins. One
    expert it is where none is above ``least``, or where every M has an expert with less than ``min_share`` of all
    examples; ``sizes`` [P] are the prototypes'."""
    prototypes = len(distance)
    one = np.zeros(prototypes, dtype=int)
    if prototypes < 3 or max_experts < 2:
        return Alignment(1, one, {}, f"{prototypes} prototypes are too few to align: one expert")
    if distance.max() <= _ALIKE:
        return Alignment(1, one, {}, "all signatures are alike: one expert")
    best, silhouettes = None, {}
    for labels in cuts(distance, min(max_experts, prototypes - 1), method):
        count = int(labels.max()) + 1
        silhouettes[count] = silhouette(distance, labels)
        shares = np.bincount(labels, sizes)
        if silhouettes[count] < least or shares.min() < min_share * shares.sum():
            continue
        if best is None or silhouettes[count] > silhouettes[best[0]]:  # ties keep the smaller count
            best = (count, labels)
    if best is None:
        return Alignment(1, one, silhouettes, "no number of experts parts the buckets well enough: one expert")
    note = ""
    if prototypes - 1 < max_experts:
        note = f"only {prototypes} prototypes: at most {prototypes - 1} experts were considered"
    return Alignment(best[0], _by_first_appearance(best[1]), silhouettes, note)


def cuts(distance: np.ndarray, most: int, method: str = "average") -> Iterator[np.ndarray]:
    """Labels [prototypes] of 2, 3, … ``most`` clusters of one tree. Ward's spread is Euclidean: the mean of
    1 - cosine is half of a squared distance between unit vectors."""
    prototypes = len(distance)
    pairs = squareform(distance, checks=False)
    tree = linkage(pairs if method == "average" else np.sqrt(2 * pairs), method=method)
    order = leaves_list(tree)  # the leaves under a node are a stretch of it
    sizes = np.concatenate([np.ones(prototypes, dtype=int), tree[:, 3].astype(int)])
    stretches = {2 * prototypes - 2: 0}  # node → where its stretch begins; the root covers everything
    for _ in range(most - 1):
        latest = max(stretches)  # nodes are numbered in the order of merging: undo the last merge
        start = stretches.pop(latest)
        left, right = (int(node) for node in tree[latest - prototypes, :2])
        stretches |= {left: start, right: start + sizes[left]}
        labels = np.empty(prototypes, dtype=int)
        for label, (node, begin) in enumerate(stretches.items()):
            labels[order[begin : begin + sizes[node]]] = label
        yield labels


def _by_first_appearance(labels: np.ndarray) -> np.ndarray:
    """Renumber so that expert 0 is the first prototype's, whatever the library's own order."""
    order: dict[int, int] = {}
    return np.array([order.setdefault(int(label), len(order)) for label in labels])


# -------------------------------------------------------------------------------------- after alignment
# Does a newcomer's bucket belong to one of the experts? The distance of a bucket to an expert is the mean of its
# distances to that expert's buckets, as in the average linkage that formed the experts. It needs only the mean of
# their unit blocks, so the server forgets the buckets.


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
