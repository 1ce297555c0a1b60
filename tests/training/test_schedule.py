"""Step budget, interleaving and batches: check vectors of the authors' release, and properties."""

import numpy as np
import pytest

from fedweave.training.schedule import allot_steps, bucket_batches, interleave, local_schedule
from tests.properties import given, st

sizes_strategy = st.lists(st.integers(0, 500), min_size=1, max_size=8).filter(any)


@pytest.mark.parametrize(
    ("sizes", "steps", "budget"),
    [
        ([50, 30, 20], 10, [5, 3, 2]),
        ([100, 1, 1], 10, [8, 1, 1]),
        ([400, 300, 200, 100], 10, [3, 3, 2, 2]),
        ([7, 5, 3, 2, 1], 10, [3, 2, 2, 2, 1]),
        ([9] * 8, 10, [2, 2, 1, 1, 1, 1, 1, 1]),
        ([4, 9, 1], 2, [1, 1, 0]),
    ],
)
def test_budget_vectors(sizes, steps, budget):
    assert allot_steps(sizes, steps) == budget


@pytest.mark.parametrize(
    ("budget", "order"),
    [
        ([5, 3, 2], "0120010210"),
        ([8, 1, 1], "0001002000"),
        ([3, 3, 2, 2], "0123012301"),
        ([5, 5], "0101010101"),
    ],
)
def test_interleaving_vectors(budget, order):
    assert "".join(map(str, interleave(budget))) == order


@given(sizes_strategy, st.integers(1, 40))
def test_budget_spends_every_step_on_non_empty_buckets(sizes, steps):
    budget = allot_steps(sizes, steps)
    filled = sum(s > 0 for s in sizes)
    assert sum(budget) == steps
    assert all(b == 0 for b, s in zip(budget, sizes, strict=True) if s == 0)
    if steps >= filled:
        assert all(b >= 1 for b, s in zip(budget, sizes, strict=True) if s > 0)
        rest, total = steps - filled, sum(sizes)
        assert all(abs(b - 1 - rest * s / total) < 1 for b, s in zip(budget, sizes, strict=True) if s > 0)
    else:  # the largest buckets first
        smallest_served = min(s for b, s in zip(budget, sizes, strict=True) if b)
        assert all(s <= smallest_served for b, s in zip(budget, sizes, strict=True) if not b)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any))
def test_interleaving_spends_the_budget_evenly(budget):
    order = interleave(budget)
    assert [order.count(c) for c in range(len(budget))] == budget
    for c, share in enumerate(budget):  # after any prefix a bucket is close to its due
        for n in range(1, len(order) + 1):
            assert abs(order[:n].count(c) - n * share / len(order)) < len(budget)


@given(st.integers(1, 30), st.integers(1, 9))
def test_batches_are_shuffled_passes(size, batch_size):
    bucket = np.arange(100, 100 + size)
    stream = bucket_batches(bucket, batch_size, key=5)
    per_pass = -(-size // batch_size)
    for _ in range(2):
        batches = [next(stream) for _ in range(per_pass)]
        assert sorted(np.concatenate(batches)) == list(bucket)
        assert all(len(b) == batch_size for b in batches[:-1])


def test_schedule_is_bucket_homogeneous_and_a_function_of_its_key():
    buckets = [np.arange(0, 20), np.arange(20, 26), np.arange(26, 27)]
    schedule = local_schedule(buckets, 10, 4, 42, 0, 3)
    owners = [{next(c for c, b in enumerate(buckets) if i in b) for i in batch} for batch in schedule]
    assert all(len(owner) == 1 for owner in owners) and {c for o in owners for c in o} == {0, 1, 2}
    again, other = local_schedule(buckets, 10, 4, 42, 0, 3), local_schedule(buckets, 10, 4, 42, 1, 3)
    assert all(np.array_equal(a, b) for a, b in zip(schedule, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(schedule, other, strict=True))
