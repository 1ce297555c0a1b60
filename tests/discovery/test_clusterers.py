"""Buckets: found where they are, and sensible where there is nothing to find."""

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans

from fedweave.config import DiscoveryConfig
from fedweave.discovery.clusterers import CLUSTERERS, discover_all, discover_buckets
from fedweave.discovery.gram import distances_of, gram_kmeans
from fedweave.evaluation.audit import purity


def blobs(groups: int, per_group: int = 15, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(groups, 20)) * 4
    labels = np.repeat(np.arange(groups), per_group)
    return centres[labels] + rng.normal(size=(len(labels), 20)) * 0.3, labels


@pytest.mark.parametrize("clusterer", CLUSTERERS)
@pytest.mark.parametrize("groups", [2, 4])
def test_clear_groups_are_found_by_every_clusterer(clusterer, groups):
    points, labels = blobs(groups)
    buckets = discover_buckets(points, DiscoveryConfig(clusterer=clusterer), seed=1)
    assert len(buckets.members) == groups
    assert purity(buckets.labels(len(points)).tolist(), labels.tolist()) == 1.0
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
        kind: purity(
            discover_buckets(points, DiscoveryConfig(features=kind), 0).labels(60).tolist(), labels.tolist()
        )
        for kind in ("unit", "standard")
    }
    assert found["standard"] == 1.0 > found["unit"]


def test_clients_side_by_side_find_what_each_finds_alone():
    clients = [blobs(2 + i % 3, seed=i)[0] for i in range(5)]
    together = discover_all(clients, DiscoveryConfig(), seeds=range(5))
    for i, buckets in enumerate(together):
        alone = discover_buckets(clients[i], DiscoveryConfig(), seed=i)
        assert [m.tolist() for m in alone.members] == [m.tolist() for m in buckets.members]


@pytest.mark.parametrize("seed", range(3))
def test_kmeans_on_inner_products_is_as_good_as_scikit_learns(seed):
    """All counts and restarts at once: the same objective, within what another seeding would change."""
    points = np.random.default_rng(seed).normal(size=(80, 12)) + 2 * blobs(5, 16, seed)[0][:, :12]
    x = torch.from_numpy(points)
    for k, labels in gram_kmeans(x @ x.T, range(2, 7), 10, seed).items():
        centres = np.stack([points[labels == c].mean(0) for c in range(k)])
        distances = ((points[:, None] - centres) ** 2).sum(2)
        assert (distances.argmin(1) == labels).all(), "not a fixed point of Lloyd's algorithm"
        reference = KMeans(k, n_init=10, random_state=seed).fit(points).inertia_
        assert distances.min(1).sum() <= 1.02 * reference


def test_distances_from_inner_products():
    x = torch.from_numpy(blobs(3)[0])
    np.testing.assert_allclose(distances_of(x @ x.T), torch.cdist(x, x).numpy(), atol=1e-6)
