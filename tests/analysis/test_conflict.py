"""Gradient conflict: three gradients in the plane, worked out on paper."""

import numpy as np
import pytest

from fedweave.analysis.conflict import cancelled, conflict, cosines, pure_bucket_bound

# g1 = (1, 0), g2 = (−1, 1), g3 = (0, 2):  ⟨g1,g2⟩ = −1, ⟨g1,g3⟩ = 0, ⟨g2,g3⟩ = 2
GRADIENTS = np.array([[1.0, 0.0], [-1.0, 1.0], [0.0, 2.0]])
GRAM = GRADIENTS @ GRADIENTS.T


def test_only_opposed_pairs_count_with_both_shares():
    assert conflict(GRAM, np.array([0.5, 0.3, 0.2])) == pytest.approx(0.15)  # 0.5 · 0.3 · 1
    assert conflict(GRAM, np.array([0.0, 0.6, 0.4])) == 0.0  # g2 and g3 agree
    assert conflict(GRAM, np.array([1.0, 0.0, 0.0])) == 0.0  # a pure unit


def test_cancelled_is_the_part_of_the_squared_norm_that_goes_missing():
    # half g1, half g2: the mean is (0, 1/2) with squared norm 1/4; without the cross term it were
    # 1/4·1 + 1/4·2 = 3/4. Conflict takes 1/2 of 3/4.
    assert cancelled(GRAM, np.array([0.5, 0.5, 0.0])) == pytest.approx(2 / 3)
    assert cancelled(GRAM * 0, np.array([0.5, 0.5, 0.0])) == 0.0


def test_the_pure_bucket_bound_is_met_by_opposed_unit_gradients_and_never_broken():
    opposed = np.array([[1.0, -1.0], [-1.0, 1.0]])
    shares = np.array([0.9, 0.1])
    assert conflict(opposed, shares) == pytest.approx(0.09)
    assert pure_bucket_bound(shares, 1.0) == pytest.approx(0.105)  # 0.1 + 0.1²/2
    assert pure_bucket_bound(shares, 2.0) == pytest.approx(0.42)
    rng = np.random.default_rng(0)
    for _ in range(200):
        gradients = rng.normal(size=(4, 3))
        shares = rng.dirichlet(np.full(4, 0.5))
        largest = np.linalg.norm(gradients, axis=1).max()
        assert conflict(gradients @ gradients.T, shares) <= pure_bucket_bound(shares, largest)


def test_cosines():
    assert cosines(GRAM)[0, 1] == pytest.approx(-1 / 2**0.5) and cosines(GRAM)[0, 2] == 0
    assert cosines(np.zeros((2, 2))).tolist() == [[0, 0], [0, 0]]
