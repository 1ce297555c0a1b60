"""The noise that a target takes and what is spent of it, against what the field knows."""

import math
import sys

import pytest
from scipy.stats import norm

from fedweave.config import Config, from_tree
from fedweave.errors import UserError
from fedweave.privacy import budget as budgets
from fedweave.privacy.budget import Budget, planned

dp_accounting = pytest.importorskip("dp_accounting", reason="pip install 'fedweave[privacy]'")


def private(level: str = "client", **sections) -> Config:
    tree = {"privacy": {"level": level}, "discovery": {"max_buckets": 1, "sketch": 4}}
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values} if isinstance(values, dict) else values
    return from_tree(tree)


def delta_of(epsilon: float, noise: float) -> float:
    """The exact δ of one Gaussian mechanism (Balle and Wang, 2018)."""
    half, far = 1 / (2 * noise), epsilon * noise
    return norm.cdf(half - far) - math.exp(epsilon) * norm.cdf(-half - far)


@pytest.mark.parametrize("epsilon, delta", [(1.0, 1e-5), (8.0, 1e-6), (0.1, 1e-3)])
def test_one_noised_sum_is_the_analytic_gaussian_mechanism(epsilon, delta):
    noise = budgets._noise(((1.0, 1),), epsilon, delta)
    assert delta_of(epsilon, noise) == pytest.approx(delta, rel=1e-6)
    assert budgets._epsilon(((1.0, 1),), noise, delta) == pytest.approx(epsilon, rel=1e-6)


def test_noise_of_many_sums_grows_with_the_root_of_their_number():
    one = budgets._noise(((1.0, 1),), 2.0, 1e-5)
    assert budgets._noise(((1.0, 9), (1.0, 16)), 2.0, 1e-5) == pytest.approx(5 * one)


def test_drawn_examples_are_accounted_as_the_tightest_known_accountant_does_or_a_little_worse():
    """DP-SGD on a hundredth of the data, 1000 steps; the other accountant composes whole distributions of loss."""
    sums = ((0.01, 1000),)
    noise = budgets._noise(sums, 3.0, 1e-5)
    exact = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3)
    exact.compose(budgets._event(sums, noise))
    assert exact.get_epsilon(1e-5) <= 3.0 <= 1.25 * exact.get_epsilon(1e-5)


@pytest.mark.parametrize("epsilon, delta", [(0.2, 1e-5), (1.0, 1e-6), (8.0, 1e-5), (30.0, 1e-5)])
@pytest.mark.parametrize("sums", [((0.2, 10), (0.2, 12), (0.2, 20)), ((0.01, 1000),), ((0.9, 4), (1.0, 1))])
def test_the_orders_that_are_tried_hold_the_best_of_all(sums, epsilon, delta):
    noise = budgets._noise(sums, epsilon, delta)
    whole = budgets._ledger(budgets._ALL, sums, noise).get_epsilon(delta)
    assert whole == pytest.approx(epsilon, rel=1e-4) == budgets._epsilon(sums, noise, delta)


@pytest.mark.parametrize("level", ["client", "example"])
def test_the_whole_plan_spends_the_target_and_half_of_it_less(level):
    budget = Budget(private(level))
    plan = planned(budget.config)
    assert plan == {"discover": 1, "start": 1, "warm": 10, "train": 20, "evaluate": 21}
    assert budget.spent(plan, 100) == pytest.approx(8.0, rel=1e-3)
    spent = [budget.spent({**plan, "train": t}, 100) for t in (0, 5, 10, 20)]
    assert spent == sorted(spent) and (level == "example" or spent[0] < spent[1] < spent[2] < spent[3])
    assert budget.spent({}, 100) == 0.0


def test_every_kind_of_answer_takes_its_share():
    """Leaving a step out lowers the noise of all others."""
    whole = Budget(private()).noise("train")
    assert Budget(private(router={"warm_start": {"enabled": False}})).noise("train") < whole
    assert Budget(private(experts={"start": "zero"})).noise("train") < whole
    assert Budget(private(evaluation={"every": 20})).noise("train") < whole
    assert Budget(private(method="fedit")).noise("train") < whole


def test_an_example_that_validates_does_not_train():
    few, many = (Budget(private("example", evaluation={"every": e})) for e in (20, 1))
    assert few.noise("train", 100) == many.noise("train", 100) == few.noise("discover", 100)
    assert few.noise("evaluate", 100) < many.noise("evaluate", 100)


def test_a_small_client_needs_more_noise_because_its_examples_are_drawn_more_often():
    budget = Budget(private("example"))
    assert budget.noise("train", 50) > budget.noise("train", 500) > budget.noise("train", 5000)


def test_a_question_is_answered_as_often_as_planned_and_an_unplanned_one_never():
    budget = Budget(private(router={"warm_start": {"enabled": False}}))
    assert (budget.limit("train"), budget.limit("warm"), budget.limit("moments")) == (20, 0, 0)
    assert Budget(private(method="fedit")).limit("discover") == math.inf  # it tells how many examples there are


def test_without_the_package_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(UserError, match=r"pip install 'fedweave\[privacy\]'"):
        budgets.accounting()


@pytest.mark.parametrize(
    "sections, sentence",
    [
        ({"method": "ifca"}, "no guarantee for method=ifca; choose one of fedweave"),
        ({"discovery": {"max_buckets": 8}}, r"needs discovery\.max_buckets=1"),
        ({"discovery": {"sketch": 0}}, r"set discovery\.sketch, as in 4"),
        ({"method": "fedlease"}, "does not go with fedlease"),
        ({"method": "fedsa-lora"}, "does not go with fedsa-lora in one process"),
        ({"experts": {"labels": "router"}}, r"needs experts\.labels=buckets"),
        ({"router": {"familiar": 0.9}}, r"needs router\.familiar=1"),
        ({"data": {"source": "sites"}, "federation": {"repeats": 1}}, r"needs federation\.repeats=0"),
    ],
)
def test_what_would_tell_more_than_the_noise_allows_is_refused_first(sections, sentence):
    with pytest.raises(UserError, match=sentence):
        private(**sections)


def test_parameters_that_clients_keep_are_in_no_model_without_noise():
    """Over sites nobody has a model of them, and noise for single examples is in every step that they come from."""
    for other in ({"engine": "flower"}, {"data": {"source": "sites"}}, {"privacy": {"level": "example"}}):
        private(**{"method": "fedsa-lora", "federation": {"repeats": 0}, **other})
