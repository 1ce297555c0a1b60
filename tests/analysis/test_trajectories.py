"""Router paths on two parabolas, R_1 = ½(φ − 1)² and R_2 = 3/2 (φ + 1)², with every step worked out by hand."""

import numpy as np
import pytest

from fedweave.analysis.trajectories import consensus_bound_holds, follow, pl_most, residual, weight_mismatch

HALF = np.array([0.5, 0.5])


def parabolas(states, buckets):
    curve, centre = np.array([1.0, 3.0])[buckets], np.array([1.0, -1.0])[buckets]
    away = states[:, 0] - centre
    return curve * away**2 / 2, (curve * away)[:, None]


@pytest.fixture
def paths():
    """From φ = 0 at rate 0.1, bucket 0 then bucket 1. At the start g_1 = −1, g_2 = 3, g = 1."""
    return follow(parabolas, np.zeros(1), HALF, order=[0, 1], rate=0.1)[0]


def test_the_first_reset_step_spreads_by_the_gradients_heterogeneity(paths):
    # states 0.1 and −0.3 around −0.1; ζ² = ½·2² + ½·2² = 4
    assert paths["heterogeneity"] == pytest.approx(4.0)
    assert paths["dispersion"][:2] == pytest.approx([0.0, 0.04])
    assert paths["first_step_ratio"] == pytest.approx(1.0)


def test_consensus_error_comes_from_unequal_curvature(paths):
    # at s = 1: ½[(0.1−1) − (−0.1−1)] + ½[3(−0.3+1) − 3(−0.1+1)] = ½·0.2 − ½·0.6
    assert paths["consensus_error"] == pytest.approx([0.0, 0.04])
    assert paths["smoothness"] == pytest.approx(3.0) and paths["consensus_bound_holds"]
    assert paths["consensus_term"] == pytest.approx(0.05 * 0.04)


def test_order_bias_is_the_scheduled_buckets_gradient_less_the_clients(paths):
    # q_0 = −1 − 1; then φ = 0.1: g_1 = −0.9, g_2 = 3.3, g = 1.2 and q_1 = 2.1
    assert paths["order_bias"] == pytest.approx([4.0, 4.41])
    assert paths["net_order_bias"] == pytest.approx(0.05**2)  # the two nearly cancel
    assert paths["order_term"] == pytest.approx(0.05 * 8.41)
    assert residual(paths["order_bias"], 0.1, mu=2.0) == pytest.approx(0.05 * (0.8 * 4.0 + 4.41))


def test_both_walks_end_where_they_should(paths):
    # persistent: 0 → 0.1 → 0.1 − 0.33 = −0.23; reset: 0.1 + 0.09 = 0.19 and −0.3 − 0.21 = −0.51, mean −0.16
    def whole(phi):
        return (phi - 1) ** 2 / 4 + 3 * (phi + 1) ** 2 / 4

    assert paths["loss_start"] == pytest.approx(1.0)
    assert paths["loss_persistent"] == pytest.approx(whole(-0.23))
    assert paths["loss_reset"] == pytest.approx(whole(-0.16))
    assert paths["dispersion"][2] == pytest.approx(0.35**2)


def test_equal_buckets_have_no_conflict_of_any_kind():
    def same(states, buckets):
        return states[:, 0] ** 2 / 2, states.copy()

    paths, _ = follow(same, np.ones(1), HALF, order=[0, 1], rate=0.1)
    assert paths["order_term"] == paths["consensus_term"] == paths["heterogeneity"] == max(paths["dispersion"]) == 0
    assert paths["first_step_ratio"] == 1.0


def test_the_consensus_bound_is_not_a_tautology(paths):
    over = 9 * 0.04 * 1.01  # just over L² D_1
    assert not consensus_bound_holds([0.0, over], paths["dispersion"], paths["smoothness"])


def test_reset_endpoints_by_size_after_steps_by_size_square_the_shares():
    # π = (3/4, 1/4), H = (3, 1): π̃ = (9, 1)/10; the shift ±0.15 times g = (1, −1)
    found = weight_mismatch(np.array([0.75, 0.25]), [3, 1], np.array([[1.0], [-2.0]]))
    assert found["weight_mismatch"] == pytest.approx(0.3)
    assert found["weight_mismatch_bias"] == pytest.approx(0.15 * 3) and found["weight_mismatch_bound_holds"]
    assert found["largest_gradient"] == 2 and found["weight_mismatch_bound"] == pytest.approx(0.6)


def test_the_pl_constant_is_bounded_from_above(paths):
    # R is a parabola of curvature 2 around −½ with R* = 3/4, so μ = 2 and ‖g‖² = 1 = 2 · 2 · (1 − 3/4) at φ = 0
    assert paths["gradient_norm"] == pytest.approx(1.0)
    assert paths["pl_most"] == pytest.approx(1 / (2 * (1.0 - paths["loss_persistent"]))) and paths["pl_most"] > 2
    assert pl_most(1.0, 1.0, 0.8, 0.75) == pytest.approx(2.0)  # a walk that has met the minimum: exact
    assert pl_most(1.0, 1.0, 1.5, 1.5) == float("inf")


def test_residual_weighs_late_steps_most():
    assert residual([1.0, 1.0], rate=0.5, mu=1.0) == pytest.approx(0.25 * 1.5)
