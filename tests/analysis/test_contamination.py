"""Contamination: a federation small enough for a sheet of paper.

Client 0 has buckets u0 (three a, one b; aligned to expert 0) and u1 (two b; expert 1), client 1 has u2 (two b; but
aligned to expert 0: a mistake). The router gives every a (0.9, 0.1) and every b (0.2, 0.8).
"""

import numpy as np
import pytest

from fedweave.analysis.contamination import (
    contamination,
    effective_budget,
    match_patterns,
    mixture_contamination,
    routed_weight,
)

A, B = 0, 1
UNIT = np.array([0, 0, 0, 0, 1, 1, 2, 2])
PATTERN = np.array([A, A, A, B, B, B, B, B])
GATES = np.array([[0.9, 0.1] if k == A else [0.2, 0.8] for k in PATTERN])
STEPS = np.array([0.5, 0.5, 1.0])
# n(0,·) = (4, 2), n(1,·) = (2, 0): client 0 has 2/3 of expert 0 and all of expert 1
UPLOAD = np.array([[2 / 3, 1.0], [2 / 3, 1.0], [1 / 3, 0.0]])
DOMINANT, ANCHOR = np.array([A, B, B]), np.array([0, 1, 0])
TARGET = np.array([A, B])


@pytest.fixture
def weight():
    return routed_weight(GATES, UNIT, PATTERN, STEPS, UPLOAD, patterns=2)


def test_weights_multiply_sampling_upload_and_gate(weight):
    # expert 0: u0 gives 1/2 · 2/3 · (3/4 · 0.9 of a, 1/4 · 0.2 of b), u1 1/2 · 2/3 · 0.2, u2 1 · 1/3 · 0.2
    assert weight[:, :, 0] == pytest.approx(np.array([[0.225, 1 / 60], [0, 1 / 15], [0, 1 / 15]]))
    # expert 1: u0 gives 1/2 · (3/4 · 0.1, 1/4 · 0.8), u1 1/2 · 0.8, and u2 is not uploaded
    assert weight[:, :, 1] == pytest.approx(np.array([[0.0375, 0.1], [0, 0.4], [0, 0]]))


def test_chi_and_its_three_parts(weight):
    found = contamination(weight, DOMINANT, ANCHOR, TARGET)
    # expert 0, total 0.375: off target is all of b (0.15); impure is b in u0 (1/60); u2 is misaligned (1/15);
    # leaked is what came from u1 (1/15)
    assert found["chi"][0] == pytest.approx(0.15 / 0.375)
    assert found["local"][0] == pytest.approx((1 / 60) / 0.375)
    assert found["misalignment"][0] == pytest.approx((1 / 15) / 0.375)
    assert found["leakage"][0] == pytest.approx((1 / 15) / 0.375)
    bound = found["local"][0] + found["misalignment"][0] + found["leakage"][0]
    assert bound == pytest.approx(found["chi"][0])  # every cause is alone here: the lemma is tight
    # expert 1, total 0.5375: off target a of u0 (0.0375); u0 leaks whole (0.1375); its b are impure there (0.1)
    assert found["chi"][1] == pytest.approx(0.0375 / 0.5375)
    assert found["local"][1] == pytest.approx(0.1 / 0.5375) and found["leakage"][1] == pytest.approx(
        0.1375 / 0.5375
    )
    assert found["lemma_holds"]


def test_an_expert_without_weight_has_no_contamination_and_breaks_nothing(weight):
    weight[:, :, 1] = 0
    found = contamination(weight, DOMINANT, ANCHOR, TARGET)
    assert found["chi"][1] is None and found["lemma_holds"]


def test_the_lemma_holds_for_any_weights_and_any_alignment():
    rng = np.random.default_rng(1)
    for _ in range(100):
        weight = rng.random((6, 3, 4))
        found = contamination(weight, rng.integers(3, size=6), rng.integers(4, size=6), rng.integers(3, size=4))
        assert found["lemma_holds"]


def test_whole_clients_as_units_carry_their_whole_mixture():
    mixtures, aligned = np.array([[3, 3], [0, 2]]), np.array([[4, 2], [2, 0]])
    shares = mixture_contamination(mixtures, aligned, TARGET)
    assert shares[0] == pytest.approx(5 / 8) and np.isnan(shares[1])  # both clients go to expert 0: 5 b of 8


def test_matching_is_one_to_one_where_it_can_be():
    matching = match_patterns(np.array([[5, 6], [0, 7]]))  # pattern 0 leans to expert 1, but 5 + 7 > 6 + 0
    assert matching.oracle.tolist() == [0, 1] and matching.target.tolist() == [0, 1] and matching.clean
    crossed = match_patterns(np.array([[0, 9, 1], [1, 0, 9], [9, 1, 0]]))
    assert crossed.oracle.tolist() == [1, 2, 0] and crossed.target.tolist() == [2, 0, 1]
    split = match_patterns(np.array([[4, 5, 0], [0, 1, 8]]))  # two experts share pattern 0
    assert split.target.tolist() == [0, 0, 1] and split.oracle.tolist() == [1, 2] and not split.clean


def test_the_effective_budget_sums_the_routed_weight_over_all_steps():
    # rho of expert 0 falls from 0.4 after round 0 to 0.1 after round 3: rounds 1 to 3 start from 0.4, 0.3, 0.2
    kept = {0: np.array([0.4, 0.5]), 3: np.array([0.1, 0.5])}
    assert effective_budget(kept, rounds=3, steps=10, rate=0.01) == pytest.approx([0.09, 0.15])
