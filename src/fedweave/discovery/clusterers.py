"""Local prototype discovery: a client's prompt features to buckets, the count chosen by silhouette.

scikit-learn is imported where it is used: it takes a second, and most commands discover nothing.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from fedweave.config import DiscoveryConfig
from fedweave.discovery.gram import distances_of, gram_kmeans
from fedweave.discovery.silhouette import silhouette


@dataclass
class Points:
    """A client's scaled features, and their inner products where there are few enough points to hold them."""

    rows: np.ndarray  # [n, d]
    gram: torch.Tensor | None  # [n, n]

    @classmethod
    def of(cls, rows: np.ndarray, device: torch.device | str) -> Points:
        on_gpu = torch.device(device).type != "cpu"
        if len(rows) > (_HELD_ON_GPU if on_gpu else max(_HELD, 2 * rows.shape[1])):
            return cls(rows, None)
        # few points are many small kernels for a GPU; all cores at once are faster
        x = torch.from_numpy(rows).to(device if len(rows) > _HELD else "cpu")
        return cls(rows, x @ x.T)


# (points, counts, seed, restarts) -> labels [n] of every count
Clusterer = Callable[[Points, Sequence[int], int, int], dict[int, np.ndarray]]


def kmeans(points: Points, counts: Sequence[int], seed: int, restarts: int) -> dict[int, np.ndarray]:
    if points.gram is not None:
        return gram_kmeans(points.gram, counts, restarts, seed)
    from sklearn.cluster import KMeans

    return {k: KMeans(k, n_init=restarts, random_state=seed).fit_predict(points.rows) for k in counts}


def agglomerative(points: Points, counts: Sequence[int], seed: int, restarts: int) -> dict[int, np.ndarray]:
    from scipy.cluster.hierarchy import fcluster, linkage

    tree = linkage(points.rows, "average")  # one tree, cut at every count
    return {k: fcluster(tree, k, "maxclust") - 1 for k in counts}


def spectral(points: Points, counts: Sequence[int], seed: int, restarts: int) -> dict[int, np.ndarray]:
    from sklearn.cluster import SpectralClustering

    def labels(k: int) -> np.ndarray:
        near = min(max(k + 1, 5), len(points.rows) - 1)
        model = SpectralClustering(k, affinity="nearest_neighbors", n_neighbors=near, random_state=seed)
        return model.fit_predict(points.rows)

    with warnings.catch_warnings():  # an unconnected neighbour graph is what well-parted patterns look like
        warnings.simplefilter("ignore")
        return {k: labels(k) for k in counts}


CLUSTERERS: dict[str, Clusterer] = {"kmeans": kmeans, "agglomerative": agglomerative, "spectral": spectral}


_HELD, _HELD_ON_GPU = 1024, 8192  # points whose inner products are held
_NUMBERS_PER_THREAD = 1_000_000  # fewer than that, and threads spend their time waiting for each other


@dataclass
class Buckets:
    """A client's buckets B(i,c) as index arrays, and how their count was chosen."""

    members: list[np.ndarray]
    silhouettes: dict[int, float]
    note: str = ""  # why there is only one bucket, when that was forced

    def joined(self, enough: Callable[[np.ndarray], bool], features: np.ndarray) -> Buckets:
        """These buckets, where the smallest one that is not ``enough`` joins the one whose mean feature is
        nearest, until all are; features [n, d]."""
        members = list(self.members)
        while len(members) > 1 and (few := [c for c, bucket in enumerate(members) if not enough(bucket)]):
            small = members.pop(min(few, key=lambda c: len(members[c])))
            means = np.stack([features[bucket].mean(0) for bucket in members])
            near = int(np.linalg.norm(means - features[small].mean(0), axis=1).argmin())
            members[near] = np.sort(np.concatenate([members[near], small]))
        if len(members) == len(self.members):
            return self
        return replace(self, members=sorted(members, key=lambda bucket: bucket[0]))


def discover_buckets(
    features: np.ndarray, config: DiscoveryConfig, seed: int, device: torch.device | str = "cpu"
) -> Buckets:
    """Cluster one client's features [n, d]; candidates are 2 … min(max_buckets, n - 1) buckets."""
    n = len(features)
    points = features.astype(np.float64)
    if config.features == "standard" and n > 1:
        points = (points - points.mean(0)) / (points.std(0) + 1e-6)
    points /= np.maximum(np.linalg.norm(points, axis=1, keepdims=True), 1e-12)
    everything = [np.arange(n)]
    if n < 3 or config.max_buckets < 2:
        return Buckets(everything, {}, f"{n} example{'s' if n > 1 else ''}: too few to cluster" if n < 3 else "")
    distinct = len(np.unique(points.round(6), axis=0))
    if distinct < 2:
        return Buckets(everything, {}, "all prompts are identical")
    held = Points.of(points, device)
    distances = distances_of(held.gram) if held.gram is not None else None  # they serve every candidate
    counts = range(2, min(config.max_buckets, n - 1, distinct) + 1)
    best, silhouettes = None, {}
    for k, found in CLUSTERERS[config.clusterer](held, counts, seed, config.restarts).items():
        clusters, labels = np.unique(found, return_inverse=True)  # some may be empty
        if len(clusters) < 2:
            continue
        silhouettes[k] = _silhouette(points, labels) if distances is None else silhouette(distances, labels)
        if best is None or silhouettes[k] > silhouettes[best[0]]:  # ties keep the smaller count
            best = (k, labels)
    if best is None:
        return Buckets(everything, silhouettes, "the clusterer found no two groups")
    if silhouettes[best[0]] < config.least_silhouette:
        return Buckets(everything, silhouettes)
    members = (np.flatnonzero(best[1] == c) for c in np.unique(best[1]))
    # in the order of their first examples: which of several equal restarts wins is a matter of rounding
    return Buckets(sorted(members, key=lambda bucket: bucket[0]), silhouettes)


def discover_all(
    features: Sequence[np.ndarray],
    config: DiscoveryConfig,
    seeds: Sequence[int],
    on_done: Callable[[], None] = lambda: None,
    device: torch.device | str = "cpu",
) -> list[Buckets]:
    """Many clients at once. Small problems run one thread each, side by side (ten times faster than the default,
    where every small k-means wakes all cores); a single large one gets all cores."""
    cores = os.cpu_count() or 1
    largest = max(f.size for f in features)
    threads = max(1, min(cores // len(features), largest // _NUMBERS_PER_THREAD))

    def one(job: tuple[np.ndarray, int]) -> Buckets:
        buckets = discover_buckets(job[0], config, job[1], device)
        on_done()
        return buckets

    # torch does not know of these limits: unless it is told, every new thread of ours gets all cores
    before, own = torch.get_num_threads(), max(1, cores // len(features))
    limited = partial(ThreadPoolExecutor, initializer=torch.set_num_threads, initargs=(own,))
    try:
        with threadpool_limits(threads), limited(max(1, cores // threads)) as pool:
            return list(pool.map(one, zip(features, seeds, strict=True)))
    finally:
        torch.set_num_threads(before)


def _silhouette(points: np.ndarray, labels: np.ndarray) -> float:
    """Of points whose distances are too many to hold."""
    from sklearn.metrics import silhouette_score

    return float(silhouette_score(points, labels))
