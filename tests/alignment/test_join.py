"""A newcomer's bucket: the distance to an expert is the mean distance to its buckets, as in average linkage."""

import numpy as np
import pytest

from fedweave.alignment.align import expert_distances, expert_means, joining_limit, signature_distance


@pytest.fixture
def patterns():
    """Signatures of two blocks around three directions, and their experts."""
    rng = np.random.default_rng(0)
    centres = [rng.normal(size=(3, 40)), rng.normal(size=(3, 24))]
    labels = np.array([0, 0, 1, 1, 1, 2])
    return [c[labels] + 0.3 * rng.normal(size=(6, c.shape[1])) for c in centres], labels, centres, rng


def test_distances_are_means_over_the_experts_buckets(patterns):
    blocks, labels, centres, rng = patterns
    fresh = [c[[1]] + 0.3 * rng.normal(size=(1, c.shape[1])) for c in centres]
    found = expert_distances(fresh, expert_means(blocks, labels, 3))[0]
    together = signature_distance([np.concatenate([b, f]) for b, f in zip(blocks, fresh, strict=True)])
    assert found == pytest.approx([together[-1, :-1][labels == m].mean() for m in range(3)], abs=1e-5)
    assert found.argmin() == 1


def test_zero_blocks_count_as_in_the_alignment():
    """Two zero blocks are alike, a zero block is unlike any other: to the newcomer as to those before it."""
    rng = np.random.default_rng(1)
    blocks = [rng.normal(size=(5, 8)), rng.normal(size=(5, 6))]
    blocks[0][[0, 3]] = 0.0
    blocks[1][[1, 3, 4]] = 0.0
    known, fresh = [b[:3] for b in blocks], [b[3:] for b in blocks]
    found = expert_distances(fresh, expert_means(known, [0, 1, 2], 3))
    np.testing.assert_allclose(found, signature_distance(blocks)[3:, :3], atol=1e-6)
    np.testing.assert_allclose(found[0], [0.5, 0.5, 1.0], atol=1e-6)


def test_the_limit_lets_the_known_patterns_in_and_keeps_others_out(patterns):
    blocks, labels, centres, rng = patterns
    limit, means = joining_limit(signature_distance(blocks), labels), expert_means(blocks, labels, 3)
    known = [c[[0, 1, 2]] + 0.3 * rng.normal(size=(3, c.shape[1])) for c in centres]
    strange = [rng.normal(size=(4, c.shape[1])) for c in centres]
    assert (expert_distances(known, means).min(1) < limit).all()
    assert (expert_distances(strange, means).min(1) > limit).all()


def test_one_expert_takes_everybody(patterns):
    blocks, _, _, _ = patterns
    assert joining_limit(signature_distance(blocks), [0] * 6) == float("inf")
