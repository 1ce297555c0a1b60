"""Buckets: found where they are, and sensible where there is nothing to find."""

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.metrics import silhouette_score

from fedweave.config import DiscoveryConfig
from fedweave.discovery import clusterers, gram
from fedweave.discovery.clusterers import CLUSTERERS, Buckets, discover_all, discover_buckets
from fedweave.discovery.gram import _exchanged, _to_centroids, distances_of, gram_kmeans
from fedweave.discovery.silhouette import silhouette
from fedweave.evaluation.audit import purity


def blobs(groups: int, per_group: int = 15, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(groups, 20)) * 4
    labels = np.repeat(np.arange(groups), per_group)
    return centres[labels] + rng.normal(size=(len(labels), 20)) * 0.3, labels


def labels_of(buckets: Buckets) -> list[int]:
    """The bucket of every point."""
    owner = {i: c for c, members in enumerate(buckets.members) for i in members.tolist()}
    return [owner[i] for i in range(len(owner))]


@pytest.mark.parametrize("clusterer", CLUSTERERS)
@pytest.mark.parametrize("groups", [2, 4])
def test_clear_groups_are_found_by_every_clusterer(clusterer, groups):
    points, labels = blobs(groups)
    buckets = discover_buckets(points, DiscoveryConfig(clusterer=clusterer), seed=1)
    assert len(buckets.members) == groups
    assert purity(labels_of(buckets), labels.tolist()) == 1.0
    assert sorted(np.concatenate(buckets.members)) == list(range(len(points)))


def test_buckets_come_in_the_order_of_their_first_examples(monkeypatch):
    """Equal partitions whose numbers differ, as rounding may decide, are the same buckets."""
    points = np.random.default_rng(0).normal(size=(12, 8))
    found = []
    for labels in ([0] * 4 + [1] * 5 + [2] * 3, [2] * 4 + [0] * 5 + [1] * 3):
        monkeypatch.setitem(CLUSTERERS, "kmeans", lambda *_, labels=labels: {3: np.array(labels)})
        found.append([b.tolist() for b in discover_buckets(points, DiscoveryConfig(), 0).members])
    assert found[0] == found[1] == [[0, 1, 2, 3], [4, 5, 6, 7, 8], [9, 10, 11]]


@pytest.mark.parametrize(("count", "word"), [(1, "1 example:"), (2, "too few")])
def test_too_few_examples_are_one_bucket_and_say_so(count, word):
    buckets = discover_buckets(np.random.default_rng(0).normal(size=(count, 5)), DiscoveryConfig(), 0)
    assert len(buckets.members) == 1 and word in buckets.note


def test_identical_prompts_are_one_bucket_and_say_so():
    buckets = discover_buckets(np.ones((30, 5)), DiscoveryConfig(), 0)
    assert len(buckets.members) == 1 and "identical" in buckets.note


@pytest.mark.parametrize("clusterer", CLUSTERERS)
def test_three_examples_with_a_duplicate_still_cluster(clusterer):
    points = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    buckets = discover_buckets(points, DiscoveryConfig(clusterer=clusterer), 0)
    assert sum(map(len, buckets.members)) == 3


def test_unit_features_see_directions_only():
    points, _ = blobs(3)
    scaled = points * np.random.default_rng(1).uniform(0.1, 10, (len(points), 1))
    a, b = (discover_buckets(x, DiscoveryConfig(features="unit"), 0) for x in (points, scaled))
    assert [m.tolist() for m in a.members] == [m.tolist() for m in b.members]


def test_standard_features_do_not_let_one_huge_channel_decide():
    points, labels = blobs(4)
    points[:, 0] = np.random.default_rng(2).normal(size=len(points)) * 300
    found = {
        kind: purity(labels_of(discover_buckets(points, DiscoveryConfig(features=kind), 0)), labels.tolist())
        for kind in ("unit", "standard")
    }
    assert found["standard"] == 1.0 > found["unit"]


def test_clients_side_by_side_find_what_each_finds_alone():
    clients = [blobs(2 + i % 3, seed=i)[0] for i in range(5)]
    together = discover_all(clients, DiscoveryConfig(), seeds=range(5))
    for i, buckets in enumerate(together):
        alone = discover_buckets(clients[i], DiscoveryConfig(), seed=i)
        assert [m.tolist() for m in alone.members] == [m.tolist() for m in buckets.members]


def test_clients_side_by_side_share_the_cores(monkeypatch):
    """torch would give each of them all cores; afterwards it has what it had."""
    seen, before = [], torch.get_num_threads()
    monkeypatch.setattr(clusterers.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(
        clusterers, "discover_buckets", lambda *_: seen.append(torch.get_num_threads()) or Buckets([], {})
    )
    torch.set_num_threads(8)
    try:
        for clients in (20, 4, 1):
            discover_all([np.ones((5, 2))] * clients, DiscoveryConfig(), range(clients))
        assert seen == [1] * 20 + [2] * 4 + [8] and torch.get_num_threads() == 8
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("empty", [False, True])
def test_the_silhouette_is_scikit_learns(empty):
    points, labels = blobs(4, seed=3)
    labels = np.where(labels == 2, 3, labels) if empty else labels
    labels[:2] = [4, 0]  # one point alone
    distances = np.linalg.norm(points[:, None] - points, axis=2)
    filled = np.unique(labels, return_inverse=True)[1]
    expected = silhouette_score(distances, labels, metric="precomputed")
    assert silhouette(distances, filled) == pytest.approx(expected, abs=1e-12)


def inertia(points: np.ndarray, labels: np.ndarray) -> float:
    return sum(((points[labels == c] - points[labels == c].mean(0)) ** 2).sum() for c in np.unique(labels))


def unit_points(count: int, width: int, seed: int) -> np.ndarray:
    """Directions without groups, or of two to eight groups that overlap."""
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(count, width))
    if seed % 2:
        groups = rng.integers(2, 9)
        points += 2 * rng.normal(size=(groups, width))[rng.integers(0, groups, count)]
    return points / np.linalg.norm(points, axis=1, keepdims=True)


@pytest.mark.parametrize(("count", "problems"), [(12, 12), (25, 12), (60, 6), (150, 4)])
def test_kmeans_on_inner_products_is_as_good_as_scikit_learns(count, problems):
    """The excess of inertia over scikit-learn's, which has as many restarts: none on average among few points."""
    excess = []
    for seed in range(problems):
        points = unit_points(count, (4, 16, 64)[seed % 3], seed)
        x = torch.from_numpy(points)
        for k, labels in gram_kmeans(x @ x.T, range(2, 9), 10, seed).items():
            centres = np.stack([points[labels == c].mean(0) for c in range(k)])
            nearest = ((points[:, None] - centres) ** 2).sum(2).argmin(1)
            assert (nearest == labels).all(), "not a fixed point of Lloyd's algorithm"
            reference = KMeans(k, n_init=10, random_state=seed).fit(points).inertia_
            excess.append(inertia(points, labels) / reference - 1)
    assert np.mean(excess) <= (0.0 if count < 100 else 0.005) and np.max(excess) <= 0.1
    assert np.mean(np.array(excess) > 0.01) <= (0.05 if count < 100 else 0.15)


@pytest.mark.parametrize("seed", range(4))
def test_kmeans_finds_the_best_partition_of_a_handful(seed):
    """All 3^8 ways to label nine points, the first of which is in cluster 0."""
    points = unit_points(9, 3, seed)
    x = torch.from_numpy(points)
    labels = gram_kmeans(x @ x.T, [3], 10, seed)[3]
    ways = np.stack(np.unravel_index(np.arange(3**8), (3,) * 8), 1)
    least = min(inertia(points, np.array([0, *way])) for way in ways)
    assert inertia(points, labels) == pytest.approx(least, rel=1e-9)


def test_an_empty_cluster_is_filled_and_a_surplus_one_is_not():
    """One problem of two clusters beside others of three, with all its points in the first: the farthest moves."""
    x = torch.tensor([[0.0], [0.1], [0.2], [5.0]], dtype=torch.float64)
    labels = torch.zeros(1, 4, dtype=torch.long)
    distances, sizes = _to_centroids(x @ x.T, labels, torch.ones(1, 3, dtype=torch.bool))
    assert distances[1:].isinf().all() and sizes.tolist() == [4, 0, 0]
    assert _exchanged(labels, distances[None], sizes[None], torch.tensor([2]))[0].tolist() == [0, 0, 0, 1]
    assert _exchanged(labels, distances[None], sizes[None], torch.tensor([1]))[0].tolist() == [0, 0, 0, 0]


def test_only_clusters_that_have_changed_are_measured_anew(monkeypatch):
    """The same labels as if all were, for a third of the work."""
    x = torch.from_numpy(unit_points(300, 16, 1))
    real, measured = gram._to_centroids, []

    def look(gram, labels, which):
        measured.append(int(which.sum()))
        return real(gram, labels, which)

    monkeypatch.setattr(gram, "_to_centroids", look)
    counts = range(2, 9)
    found = gram_kmeans(x @ x.T, counts, 5, seed=0)
    assert measured[0] == 5 * sum(counts) and sum(measured) < len(measured) * 5 * 8 * len(counts) / 3

    def everything(gram, labels, which):
        distances, sizes = real(gram, labels, torch.ones_like(which))
        return distances.view(*which.shape, -1)[which], sizes.view_as(which)[which]

    monkeypatch.setattr(gram, "_to_centroids", everything)
    for k, labels in gram_kmeans(x @ x.T, counts, 5, seed=0).items():
        assert (found[k] == labels).all()


def test_distances_from_inner_products():
    x = torch.from_numpy(blobs(3)[0])
    np.testing.assert_allclose(distances_of(x @ x.T), torch.cdist(x, x).numpy(), atol=1e-6)
