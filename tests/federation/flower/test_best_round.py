"""Which round is best, where every site says for itself how it does."""

import pytest

from fedweave.federation.evaluate import Choice, Loss, overall
from fedweave.federation.message import Message
from fedweave.runs.federated import SitesRun
from tests.federation.flower.conftest import Federation
from tests.federations import changed


def best_of(rounds: list[dict[str, float]]) -> int:
    choice = Choice()
    losses = [choice.follow(sites, sum(sites.values()) / len(sites)) for sites in rounds]
    return losses.index(min(losses))


@pytest.mark.parametrize(("wanted", "others"), [(0.0, 1e4), (0.5, 3.0)])
def test_one_of_five_sites_does_not_pick_the_round(wanted, others):
    honest = [{f"site {i}": (1 + i) * 0.99**t for i in range(4)} for t in range(6)]
    assert best_of(honest) == 5
    assert best_of([sites | {"liar": wanted if t == 1 else others} for t, sites in enumerate(honest)]) == 5


def test_who_comes_and_goes_does_not_move_it():
    rounds = [{"a": 1.0, "b": 4.0}, {"a": 0.9}, {"a": 0.8, "b": 3.0, "c": 9.0}, {"b": 3.1, "c": 9.2}]
    assert best_of(rounds) == 2


def test_a_mean_over_sites_counts_nobody_beyond_three_medians_nor_beyond_the_ceiling():
    sites = [Loss(2.0 * 10, 1.0, 10) for _ in range(4)]
    assert overall([*sites, Loss(1e9, 1.0, 10)], 1.0).mean == pytest.approx((4 * 2 + 6) / 5)
    assert overall([*sites, Loss(0.0, 1.0, 1_000_000)], 0.25).mean == pytest.approx(0.75 * 2)


def test_a_run_over_sites_and_its_resumption_follow_the_median_site(config, models):
    config = changed(config, data={"clients": 4}, federation={"max_share": 0.3, "patience": 5.0, "deadline": 5.0})
    federation = Federation(config, models)
    honest = federation.grid.nodes[100]

    def lying(question):
        answer = honest(question)
        if question.facts["step"] != "evaluate":
            return answer
        total = 0.0 if question.facts["t"] == 1 else 1e6
        return Message(answer.tensors, answer.facts | {"total": total, "count": 10_000_000})

    lying.key = honest.key
    federation.grid.nodes[100] = lying
    state, final, _ = federation.run()
    run = SitesRun(config, federation.engine, None)
    events = [run.validate(s, t) for t, s in enumerate([state, state, final])]
    assert events[1]["loss"] == pytest.approx(events[0]["loss"]), "the same model has the same loss"
    again = SitesRun(config, federation.engine, None, events[:2])
    assert again.validate(final, 2)["loss"] == pytest.approx(events[2]["loss"])
