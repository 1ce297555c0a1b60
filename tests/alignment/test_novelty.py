"""When a bucket counts as new: the stated rate of false alarms holds, and one kind gets one expert."""

import numpy as np
import pytest

from fedweave.alignment.align import signature_distance
from fedweave.alignment.novelty import kinds_of, novel, novelty_limit, own_distances
from fedweave.config import from_tree
from fedweave.methods.newcomers import Arrived, decide


def blobs(centres: int, each: int, spread: float, seed: int = 0) -> np.ndarray:
    """[centres * each, 24] signatures of one block around orthogonal directions, one kind after another."""
    rng = np.random.default_rng(seed)
    means = np.eye(24)[:centres].repeat(each, 0)
    return (means + spread * rng.normal(size=means.shape)).astype(np.float32)


@pytest.mark.parametrize(("n", "alarms"), [(99, 0.05), (59, 0.1), (19, 0.05)])
def test_false_alarms_come_at_the_rate_that_was_asked_for(n, alarms):
    """Whatever the distribution; here one with a long tail."""
    rng = np.random.default_rng(0)
    draws = rng.lognormal(sigma=2.0, size=(4000, n + 1))
    alarms_found = np.mean([row[-1] > novelty_limit(sorted(row[:-1]), alarms) for row in draws])
    assert alarms_found == pytest.approx(alarms, abs=0.012)


def test_few_buckets_promise_no_less_than_one_in_all_of_them():
    assert novelty_limit([0.1, 0.2, 0.3], 0.05) == 0.3
    assert novelty_limit([], 0.05) == float("inf"), "nothing is new where nothing is known"


def test_where_experts_lie_far_apart_there_is_room():
    assert novelty_limit([0.1, 0.2, 0.3], 0.05, halfway=0.5) == 0.5
    assert novelty_limit([0.1, 0.2, 0.7], 0.05, halfway=0.5) == 0.7, "the rate holds in any case"


def test_a_bucket_is_compared_with_the_others_of_its_expert():
    distance = np.array([[0, 0.2, 0.9], [0.2, 0, 0.8], [0.9, 0.8, 0]])
    assert own_distances(distance, [0, 0, 1]) == [0.2, 0.2], "who has an expert alone says nothing"
    assert own_distances(distance, [0, 0, 0]) == pytest.approx([0.5, 0.55, 0.85])


def test_far_buckets_that_are_near_each_other_are_one_kind():
    rows = blobs(3, 4, 0.05)[[0, 4, 1, 8, 5, 2, 9, 3]]
    assert kinds_of([rows], 0.5).tolist() == [0, 1, 0, 2, 1, 0, 2, 0]
    assert kinds_of([rows[:1]], 0.5).tolist() == [0]


def decided(sizes, whose="abcde", held=None, strange=False, **living):
    """Five buckets: one of a known kind (its expert is the first direction), four of two new kinds."""
    rows = blobs(3, 2, 0.05)[1:]
    distances = 1 - rows @ np.eye(24, dtype=np.float32)[:2][[0, 23 % 2]].T  # experts 0 and 1
    distances[:, 1] = 1.0  # expert 1 is like none of them
    most = living.pop("most", 8)
    config = from_tree({"living": {"notice": "open", **living}, "alignment": {"max_experts": most}})
    far = distances.min(1) > 0.5
    arrived = Arrived(whose, sizes, [rows], distances, far, far & strange, 0.5)
    return decide(arrived, held or {}, config)


def test_every_new_kind_opens_one_expert():
    assert decided([9, 10, 10, 10, 10], least=16) == ([0, 2, 2, 3, 3], [""] * 5)


def test_a_bucket_within_the_limit_joins_an_expert_that_opens_nearer_to_it():
    """Of one new kind, a bucket lies just within the limit of an old expert."""
    rows = blobs(1, 3, 0.05)
    config = from_tree({"living": {"notice": "open", "least": 16}})
    for away, found in (([0.6, 0.6, 0.45], [1, 1, 1]), ([0.4, 0.4, 0.4], [0, 0, 0])):
        distances = np.array(away)[:, None]
        far = distances[:, 0] > 0.5
        arrived = Arrived("abc", [10, 10, 10], [rows], distances, far, far, 0.5)
        assert decide(arrived, {}, config)[0] == found


def test_a_kind_with_too_few_examples_or_without_room_joins_the_nearest():
    found, _ = decided([9, 10, 10, 3, 3], least=16)
    assert found[:3] == [0, 2, 2] and found[3] in (0, 1, 2)
    assert set(decided([9, 10, 10, 10, 10], least=16, most=3)[0]) <= {0, 1, 2}
    assert set(decided([9, 1, 1, 1, 1], least=16)[0]) <= {0, 1}


def test_too_few_examples_wait_where_their_prompts_are_strange_and_there_is_room():
    """The signature of a few rows is no witness by itself."""
    few = [9, 1, 1, 1, 1]
    assert decided(few, least=16, strange=True) == ([0, -1, -1, -1, -1], [""] * 5)
    assert set(decided(few, least=16, most=2, strange=True)[0]) <= {0, 1}
    assert decided([9, 10, 10, 3, 3], least=16, strange=True)[0] == [0, 2, 2, 2, 2], "what opens may be nearer"


def test_one_client_alone_opens_one_expert_and_is_told_what_would_open_more():
    rows, alone = [9, 10, 10, 10, 10], [""] * 3 + ["living.alone=2"] * 2
    assert decided(rows, "abbbb") == ([0, 2, 2, -1, -1], alone)
    assert decided(rows, "abbbb", alone=2) == decided(rows, "abbcc") == ([0, 2, 2, 3, 3], [""] * 5)
    assert decided(rows, "abbcc", held={"c": 1}) == ([0, 2, 2, -1, -1], alone)
    assert decided(rows, "abbbb", notice="ask") == (
        [0, -1, -1, -1, -1], ["", *["living.notice=open"] * 2, *["living.notice=open living.alone=2"] * 2]
    )  # fmt: skip


def test_what_several_clients_bring_comes_first_and_has_the_last_place():
    rows = [9, 10, 10, 10, 10]
    assert decided(rows, "abbcd", alone=0) == ([0, -1, -1, 2, 2], ["", *["living.alone=1"] * 2, "", ""])
    found, waits = decided(rows, "abbcd", most=3)
    assert found[3:] == [2, 2] and -1 not in found and not any(waits), "without room it joins the nearest"
    assert max(decided(rows, "abbcc", most=3)[0]) < 2


def test_strange_prompts_make_a_bucket_new_unless_its_signature_is_near():
    """Of own distances of 0.1 to 0.9 half are below 0.5; the limit is 0.9."""
    own = [0.1, 0.3, 0.5, 0.7, 0.9]
    distance, strange = np.array([0.95, 0.8, 0.8, 0.4, 0.8]), [0.0, 1.0, 0.5, 1.0, 0.0]
    assert novel(distance, strange, own, 0.9).tolist() == [True, True, False, False, False]
    assert not novel(distance, strange, [], float("inf")).any(), "nothing is new where nothing is known"


def test_most_of_a_known_bucket_is_strange_no_more_often_than_promised():
    """A tenth of known prompts counts as strange. At worst all strange ones share buckets, just over half of each:
    then a fifth of the buckets looks new, and no more."""
    rng = np.random.default_rng(0)
    shares = {
        "alone": rng.binomial(9, 0.1, 10_000) / 9,
        "together": np.where(rng.random(10_000) < 0.18, 5 / 9, 0.0),
        "whole buckets": (rng.random(10_000) < 0.1).astype(float),
    }
    for how, strange in shares.items():
        assert strange.mean() <= 0.105, how
        assert novel(np.ones(10_000), strange, [0.5], 2.0).mean() <= 2 * 0.105, how


def test_a_known_kind_opens_nothing():
    rows = blobs(2, 10, 0.1)
    distance = signature_distance([rows])
    owners = [0] * 10 + [1] * 10
    limit = novelty_limit(own_distances(distance, owners), 0.05)
    fresh = blobs(2, 50, 0.1, seed=1)
    units = fresh / np.linalg.norm(fresh, axis=1, keepdims=True)
    known = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    means = np.stack([known[:10].mean(0), known[10:].mean(0)])
    assert np.mean((1 - units @ means.T).min(1) > limit) <= 0.1
