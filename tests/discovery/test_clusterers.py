"""Buckets: found where they are, and sensible where there is nothing to find."""

import numpy as np
import pytest

from fedweave.config import DiscoveryConfig
from fedweave.discovery.clusterers import CLUSTERERS, discover_all, discover_buckets
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
