"""Which round is best, where every site says for itself how it does."""

from types import SimpleNamespace

import pytest

from fedweave.federation.evaluate import Loss, does_better, overall
from fedweave.federation.message import Message, Refused
from fedweave.methods import build_method
from fedweave.runs.federated import SitesRun
from tests.federation.flower.conftest import Federation
from tests.federations import changed


@pytest.mark.parametrize("liar", [0.0, 0.5, 1e4])
def test_one_of_five_sites_does_not_pick_the_round(liar):
    honest = [{f"site {i}": (1 + i) * 0.99**t for i in range(4)} for t in range(2)]
    before, now = (sites | {"liar": 1.0} for sites in honest)
    assert does_better(now | {"liar": liar}, before) is True
    assert does_better(before | {"liar": liar}, now) is False


@pytest.mark.parametrize("told", [{"total": 1e9, "count": 1}, {"total": 1.0, "count": 0}, {"entropy": 1e9}])
def test_losses_are_such_as_so_many_examples_can_have(told, config):
    step = build_method(config).evaluate
    with pytest.raises(Refused, match="of no examples"):
        step.read(None, {}, {"total": 5.0, "entropy": 1.0, "count": 3} | told)
    assert step.read(None, {}, {"total": 0.0, "entropy": 0.0, "count": 0}).count == 0


def test_who_comes_and_goes_decides_nothing():
    assert does_better({"a": 0.9, "new": 5.0}, {"a": 1.0, "gone": 1.0}) is True
    assert does_better({"new": 5.0}, {"gone": 1.0}) is None


def test_a_mean_over_sites_counts_nobody_beyond_three_medians_nor_beyond_the_ceiling():
    sites = [Loss(2.0 * 10, 1.0, 10) for _ in range(4)]
    assert overall([*sites, Loss(1e9, 1.0, 10)], 1.0).mean == pytest.approx((4 * 2 + 6) / 5)
    assert overall([*sites, Loss(0.0, 1.0, 1_000_000)], 0.25).mean == pytest.approx(0.75 * 2)


def test_a_run_over_strangers_and_its_resumption_ask_the_median_site(config, models):
    config = changed(config, data={"clients": 4}, federation={"max_share": 0.3, "patience": 5.0, "deadline": 5.0})
    federation = Federation(config, models)
    honest = federation.grid.nodes[100]

    def lying(question):
        """Round 1 is the best there ever was."""
        answer = honest(question)
        if question.facts["step"] != "evaluate":
            return answer
        total = 0.0 if question.facts["t"] == 1 else 1e6
        return Message(answer.tensors, answer.facts | {"total": total, "count": 10_000_000})

    lying.key = honest.key
    federation.grid.nodes[100] = lying
    state, final, _ = federation.run()
    run = SitesRun(config, federation.engine, None)
    first, again, last = (run.validate(s, t) for t, s in enumerate([state, state, final]))
    resumed = SitesRun(config, federation.engine, None, [first, again])
    resumed.validate(final, 2)
    for context in (run, resumed):
        best = SimpleNamespace(best_round=0, best_loss=first["loss"])
        assert again["loss"] < first["loss"] and not context.better(again, best), "the same model is no better"
        best = SimpleNamespace(best_round=1, best_loss=again["loss"])
        assert last["loss"] > again["loss"] and context.better(last, best), "a better one is"
        best = SimpleNamespace(best_round=1, best_loss=float("inf"))
        assert context.better(again, best), "after a change of data whatever comes first is the best"
