"""Sparse risk: four examples and two experts, by hand."""

import numpy as np
import pytest

from fedweave.analysis.routing_risk import deficit, margin_risk, margins, sparse_risk

WEIGHTS = np.array([[0.8, 0.2], [0.6, 0.4], [0.3, 0.7], [0.5, 0.5]])
ORACLE = np.array([0, 0, 0, 1])  # example 2 is routed wrongly, example 3 stands on the edge
ALONE = np.array([[1.0, 3.0], [1.0, 2.0], [1.0, 2.5], [4.0, 2.0]])
SOFT = np.array([1.2, 1.3, 2.0, 2.5])


def test_deficit_margin_and_margin_risk():
    assert deficit(WEIGHTS, ORACLE) == pytest.approx((0.2 + 0.4 + 0.7 + 0.5) / 4)
    assert margins(WEIGHTS, ORACLE)[0] == pytest.approx(np.log(4))  # softmax: log r is the logit but for a constant
    assert margin_risk(WEIGHTS, ORACLE) == 0.5  # examples 2 and 3
    assert margin_risk(WEIGHTS, ORACLE, tau=0.5) == 0.75  # log(0.6 / 0.4) = 0.41
    assert margin_risk(WEIGHTS, ORACLE, tau=-0.5) == 0.25  # log(3/7) = −0.85 is below, 0 is not


def test_every_term_of_the_bound():
    risk = sparse_risk(WEIGHTS, ORACLE, ALONE, SOFT)
    assert risk["oracle"] == pytest.approx(1.25) and risk["soft"] == pytest.approx(1.75)
    assert risk["sparse"] == pytest.approx((1 + 1 + 2.5 + 4) / 4)  # arg max takes the first of equals: wrong on 3
    assert risk["mismatch"] == 0.5 and risk["margin_risk"] == 0.5
    assert risk["worst"] == 2.0 and risk["gap"] == pytest.approx((2 + 1 + 1.5 + 2) / 4)
    # c_gap S = 1.625 · 0.45 = 0.73125 against R − R_oracle = 0.5
    assert risk["mix"] == pytest.approx(0.23125)
    assert risk["approximation_most"] == pytest.approx(0.5)
    assert risk["excess"] == pytest.approx(0.875) and risk["margin_bound"] == pytest.approx(1.0)
    assert risk["bound"] == pytest.approx(2 * 2 / 1.625 * 0.73125) and risk["chain_holds"]


def test_a_certain_and_right_router_has_no_risk():
    sure = np.eye(2)[ORACLE]
    risk = sparse_risk(sure, ORACLE, ALONE, ALONE[np.arange(4), ORACLE])
    assert (
        risk["deficit"] == risk["margin_risk"] == risk["excess"] == risk["mix"] == risk["bound"] == 0
        and risk["chain_holds"]
    )


def test_experts_that_cannot_be_told_apart_are_not_calibrated():
    risk = sparse_risk(WEIGHTS, ORACLE, ALONE[:, ::-1], SOFT)  # the oracle expert is the worse one
    assert not risk["calibrated"] and risk["bound"] is None and risk["chain_holds"]


def test_the_chain_holds_for_any_router_and_any_losses():
    rng = np.random.default_rng(3)
    for _ in range(200):
        weights, alone = rng.dirichlet(np.ones(3), size=8), rng.exponential(size=(8, 3))
        risk = sparse_risk(weights, rng.integers(3, size=8), alone, rng.exponential(size=8))
        assert risk["chain_holds"] and risk["mismatch"] <= risk["margin_risk"]
