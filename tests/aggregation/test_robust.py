"""Rules that a few hostile clients cannot carry away, each by what defines it, and in a real federation."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedweave.aggregation.robust import (
    RULES,
    capped,
    chosen_rule,
    chosen_share,
    client_average,
    expert_average,
)
from fedweave.aggregation.standing import Standing, Voices, by_output, refused_too
from fedweave.experts.layout import AdapterLayout
from fedweave.federation.rounds import federate
from fedweave.federation.state import broadcast
from fedweave.methods import build_method
from fedweave.router.mlp import RouterLayout
from tests.federations import changed, make_engine, run

HONEST, HOSTILE = 14, 6  # 30 %


MEMBERS = [SimpleNamespace(index=i, name=f"client {i}") for i in range(HONEST + HOSTILE)]


def updates(seed: int = 0) -> torch.Tensor:
    """[n, p] honest updates: a common direction and noise of the same length."""
    generator = torch.Generator().manual_seed(seed)
    return torch.ones(200) + torch.randn(HONEST, 200, generator=generator)


ATTACKS = {
    "sign flip": lambda honest: -honest[:HOSTILE],
    "ten times, against": lambda honest: -10 * honest[:HOSTILE],
    "huge": lambda honest: torch.full((HOSTILE, 200), 1e20),
    "together": lambda honest: (-3 * honest.mean(0)).repeat(HOSTILE, 1),
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("rule", ["median", "trimmed", "krum", "agreement"])
def test_thirty_in_a_hundred_do_not_turn_the_average(rule, attack, config):
    honest, standing = updates(), Standing(MEMBERS, config)
    config = changed(config, federation={"rule": rule, "hostile": 0.3})
    average = client_average(200, torch.device("cpu"), config, standing)
    for client, row in enumerate(torch.cat([ATTACKS[attack](honest), honest])):
        average.add(row, 1.0, client)
    standing.hear([average])
    found, wanted = average.step(), honest.mean(0)
    assert torch.cosine_similarity(found, wanted, dim=0) > 0.7
    assert 0.2 * wanted.norm() < found.norm() < 2 * wanted.norm()


@pytest.fixture
def heard(config):
    """Call with rows [n, p] of the clients that speak and a standing: it has heard them."""
    config = changed(config, federation={"rule": "agreement"})

    def hear(rows, standing, clients=None):
        average = client_average(rows.shape[1], torch.device("cpu"), config, standing)
        for client, row in zip(clients or range(len(rows)), rows, strict=True):
            average.add(row, 1.0, client)
        standing.hear([average])
        return average

    return hear


def bad(standing) -> list[int]:
    return [i for i in range(HONEST + HOSTILE) if i not in standing]


def test_standing_outlasts_rounds_in_which_nobody_agrees(heard, config):
    """Near an optimum updates add up to nothing, and everybody pulls against the rest: that is no evidence."""
    standing = Standing(MEMBERS, config)
    heard(torch.cat([-updates()[:HOSTILE], updates(1)]), standing)
    noise = torch.randn(HONEST + HOSTILE, 200, generator=torch.Generator().manual_seed(2))
    for _ in range(10):
        heard(noise - noise.mean(0), standing)
        assert bad(standing) == list(range(HOSTILE))


def test_a_good_name_does_not_last(heard, config):
    standing = Standing(MEMBERS, config)
    for seed in range(10):
        heard(torch.cat([updates(seed)[:HOSTILE], updates(seed + 50)]), standing)
    assert not bad(standing)
    for rounds in range(1, 13):
        heard(torch.cat([-updates(rounds)[:HOSTILE], updates(rounds + 50)]), standing)
        if bad(standing):
            break
    assert bad(standing) == list(range(HOSTILE))


def test_a_specialist_keeps_its_standing(heard, config):
    """It goes a way of its own, not the opposite one; and on the one expert that it shares with others theirs."""
    standing, own = Standing(MEMBERS, config), torch.zeros(1, 200)
    own[0, ::2], own[0, 1::2] = 3.0, -3.0  # at a right angle to the common direction
    rows = torch.cat([updates(), 0.2 * torch.ones(1, 200) + own])
    for _ in range(5):
        heard(rows, standing)
    assert not bad(standing)


def test_few_who_say_the_same_are_not_many(heard, config):
    """Six of twenty with one and the same update against all others: the others agree less, but are more."""
    standing = Standing(MEMBERS, config)
    heard(torch.cat([-torch.ones(HOSTILE, 200), torch.ones(200) + 2 * updates() - 2]), standing)
    assert bad(standing) == list(range(HOSTILE))


def test_three_tenths_that_pull_the_other_way_are_told_where_all_together_go_nowhere(heard, config):
    """Of 17 that speak six are hostile, and honest ones have little in common: the mean over all is about zero."""
    generator, standing = torch.Generator().manual_seed(3), Standing(MEMBERS, config)
    honest = 0.42 * torch.ones(200) + torch.randn(17, 200, generator=generator)
    honest[:HOSTILE] *= -1
    unit = honest / honest.norm(dim=1, keepdim=True)
    assert abs(float((unit.sum(0).square().sum() - 17) / (17 * 16))) < 0.02, "all together go nowhere"
    heard(honest, standing)
    assert bad(standing) == list(range(HOSTILE)), "of all 20, of whom some say nothing, six may be hostile"


def test_the_last_average_of_a_warm_start_does_not_outweigh_the_first(config):
    """Near the end a specialist pulls against the rest, for what only it has to tell apart."""
    standing, rows = Standing(MEMBERS, config), torch.ones(HONEST, 200) + 0.1 * updates(1)
    late = rows.clone()
    late[0] = -rows[0]
    for turn in range(10):
        standing.hear([Voices(standing, [*range(HONEST)], [*(rows if turn < 6 else late)])], turn=turn)
    assert not bad(standing)
    standing.hear([Voices(standing, [*range(HONEST)], [*late])])
    first = standing.evidence["client 0"]
    assert first < standing.evidence["client 1"], "a round fades what was before as ever"
    for _ in range(3):
        standing.hear([Voices(standing, [*range(HONEST)], [*late])])
    assert bad(standing) == [0]


def test_a_router_is_heard_by_the_outputs_that_clients_have_in_common(config):
    """Its first layer is most of it, and there clients go every which way."""
    router, generator = RouterLayout(64, 32, 3), torch.Generator().manual_seed(0)
    members = [SimpleNamespace(index=i, name=f"client {i}", assignment=[i % 3, (i + 1) % 3, -1]) for i in range(20)]
    rows = torch.randn(20, router.size, generator=generator)
    for member in members:
        own = torch.cat([router.outputs(m, m + 1) for m in member.assignment[:2]])
        rows[member.index, own] = 1.0 + 0.3 * rows[member.index, own]
    rows[:HOSTILE] *= -1
    whole, parts = Standing(members, config), Standing(members, config)

    def apart(standing):
        evidence = [standing.evidence[member.name] for member in members]
        return min(evidence[HOSTILE:]) - max(evidence[:HOSTILE])

    said = Voices(whole, [*range(20)], [*rows])
    whole.hear([said])
    parts.hear(by_output(said, router, members))
    assert [i for i in range(20) if i not in parts] == list(range(HOSTILE))
    assert apart(parts) > 5 * apart(whole)
    sizes = [len(part.rows[0]) for part in by_output(said, router, members)]
    assert sizes == [router.first_layer, 33, 33, 33] and sum(sizes) == router.size
    assert [len(part.clients) for part in by_output(said, router, members)] == [20, 13, 14, 13]
    assert by_output(None, router, members) == [] and by_output(Voices(None, [], []), router, members) == []


def test_an_answer_that_the_door_refuses_speaks_against_its_sender():
    assert refused_too({"a": 0.3, "b": -0.5, "c": 0.1}, ["c", "d"]) == {"a": 0.3, "b": -0.5, "c": -0.5, "d": -0.5}
    assert refused_too({}, ["a"]) == {}, "where nobody is weighed"


def test_no_more_are_left_out_than_may_be_hostile(heard, config):
    standing, split = Standing(MEMBERS, config), torch.ones(HONEST + HOSTILE, 200)
    split[:9] = -1
    heard(split, standing)
    assert len(bad(standing)) <= 6


def test_who_is_alone_or_unknown_is_believed(heard, config):
    standing = Standing(MEMBERS, config)
    alone = torch.ones(1, 200)
    torch.testing.assert_close(heard(alone, standing, [3]).step(), alone[0])
    assert not standing.evidence and not bad(standing)


def test_a_clipped_update_is_no_longer_than_the_median_one():
    rows = torch.cat([updates(), torch.full((1, 200), 1e20)])
    shares = torch.full((len(rows),), 1 / len(rows))
    found = RULES["clip"](rows, shares, 0.0)
    bound = rows.norm(dim=1).median() / len(rows)
    assert (found - shares[0] * rows[:-1].clamp(max=10).sum(0)).norm() < 3 * bound
    alike = torch.ones(5, 200)
    torch.testing.assert_close(RULES["clip"](alike, torch.full((5,), 0.2), 0.0), alike[0])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("count", [1, 2, 3, 20])
def test_those_who_agree_are_their_own_average(rule, count):
    """Whatever the rule, and however few: nothing is lost where nobody attacks and all say the same."""
    rows = torch.arange(1.0, 8.0).repeat(count, 1)
    torch.testing.assert_close(RULES[rule](rows, torch.full((count,), 1 / count), 0.3), rows[0])


@pytest.mark.parametrize("rule", ["clip", "median", "trimmed", "krum", "agreement"])
def test_who_has_an_expert_nearly_alone_speaks_no_louder_in_it_than_others_in_theirs(rule, config):
    layout = AdapterLayout(("layer",), (8,), (8,), rank=2, experts=2)
    average = expert_average(layout, torch.device("cpu"), changed(config, federation={"rule": rule}))
    step = torch.randn(layout.size, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        average.add(step, torch.tensor([5.0, 0.0]))
    average.add(1000 * step, torch.tensor([0.0, 5.0]))
    own = (layout.expert_of_column == 1).nonzero()[:, 0]
    assert average.step()[own].norm() <= 1.001 * step[layout.expert_of_column == 0].norm()


def test_krum_keeps_the_shares_of_those_it_keeps():
    rows = torch.tensor([[0.0], [0.1], [0.2], [50.0]])
    found = RULES["krum"](rows, torch.tensor([0.5, 0.25, 0.125, 0.125]), 0.25)
    assert found.item() == pytest.approx((0.0 * 0.5 + 0.1 * 0.25 + 0.2 * 0.125) / 0.875)


@pytest.mark.parametrize(
    ("weights", "most", "expected"),
    [
        ([98, 1, 1], 0.5, [0.5, 0.25, 0.25]),
        ([6, 3, 1], 1.0, [0.6, 0.3, 0.1]),
        ([90, 9, 1], 0.4, [0.4, 0.4, 0.2]),  # the surplus of one lifts the next above the ceiling
        ([90, 10], 0.3, [0.5, 0.5]),  # two cannot both stay below a third
        ([7], 0.2, [1.0]),
    ],
)
def test_no_share_above_the_ceiling(weights, most, expected):
    assert capped(weights, most).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("rule", [name for name in RULES if name != "mean"])
def test_where_nobody_speaks_nothing_moves(rule, config):
    """A cluster whose clients are all away, or a round without a usable answer: no rule may fall over it."""
    config = changed(config, federation={"rule": rule})
    layout = AdapterLayout(("w",), (1,), (1,), rank=1, experts=2)
    here = torch.device("cpu")
    assert client_average(3, here, config).step().tolist() == [0.0, 0.0, 0.0]
    experts = expert_average(layout, here, config)
    assert not experts.step().any()
    experts.add(torch.ones(layout.size), torch.tensor([2.0, 0.0]), 2)
    assert experts.step().tolist() == [1.0, 0.0, 1.0, 0.0], "expert 1 keeps its value"


@pytest.mark.parametrize(
    ("source", "secure", "asked", "expected"),
    [
        ("sample", False, {}, ("mean", 1.0)),
        ("sites", False, {}, ("agreement", 0.2)),
        ("sites", True, {}, ("mean", 1.0)),  # of sums nobody counts more than another
        ("sites", False, {"rule": "krum", "max_share": 0.5}, ("krum", 0.5)),
    ],
)
def test_strangers_are_believed_less(source, secure, asked, expected, config):
    asked = {"secure_aggregation": secure, "sites": 5, **asked}
    config = changed(config, data={"source": source}, federation=asked)
    assert (chosen_rule(config), chosen_share(config)) == expected


class Hostile:
    """A client that claims what it likes and sends the opposite of what it learned, ``factor`` times."""

    def __init__(self, engine, factor: float):
        self.answers, self.factor = engine.answers, factor
        engine.answers = self

    def __call__(self, step, members, question):
        for client, message in self.answers(step, members, question):
            if step.name == "train" and client.index == 0:
                for name in message.tensors:
                    message.tensors[name] = message.tensors[name] * self.factor
            yield client, message


def movement(config, backbone, factor: float = 1.0) -> torch.Tensor:
    engine = make_engine(config, backbone)
    if factor != 1.0:
        Hostile(engine, factor)
    start, final = run(config, engine)
    return final.theta - start.theta


def test_a_federation_keeps_its_course_against_one_hostile_client(config, backbone):
    plain = changed(config, method="fedit", training={"rounds": 1, "local_steps": 2}, data={"clients": 5})
    robust = changed(plain, federation={"rule": "agreement", "max_share": 0.3})
    honest = movement(plain, backbone)
    turned, kept = (torch.cosine_similarity(movement(c, backbone, -9.0), honest, dim=0) for c in (plain, robust))
    assert turned < 0 < 0.5 < kept


def test_the_mean_of_all_updates_at_once_is_the_stream(config, backbone):
    """A ceiling that binds nobody: the same average, from kept updates instead of a running sum."""
    plain = changed(config, training={"rounds": 1, "local_steps": 2})
    kept = changed(plain, federation={"rule": "mean", "max_share": 0.999})
    torch.testing.assert_close(movement(plain, backbone), movement(kept, backbone), atol=1e-5, rtol=1e-3)


def test_a_client_that_pulls_against_the_others_is_told_of_and_left_out(config, backbone):
    wary = changed(
        config, method="fedit", training={"rounds": 4, "local_steps": 2}, data={"clients": 5},
        federation={"rule": "clip", "quarantine": 2},
    )  # fmt: skip
    engine, method, said, asked = make_engine(wary, backbone), build_method(wary), [], []
    engine.console.warn = said.append
    Hostile(engine, -1.0)
    state = method.prepare(engine)
    federate(
        method, engine, state, range(4), lambda s, report: asked.append([m.index for m in report.participants])
    )
    engine.detach()
    assert [0 in members for members in asked] == [True, True, False, False]
    told = [line for line in said if "pulled against the others in 2 rounds in a row" in line]
    assert told == ["quarantine: client_0 pulled against the others in 2 rounds in a row, and is not asked again."]
    held = [m.index for m, _ in engine.ask(method.evaluate, engine.members, broadcast(state, 4))]
    assert held == [1, 2, 3, 4], "nor does it say which round was best, nor bring kinds of its own"


def test_a_bucket_that_pulls_against_the_others_counts_in_its_expert_no_more(config, backbone):
    """Of one client an expert's update is turned; the rest of it is honest work."""
    wary = changed(
        config, training={"rounds": 3, "local_steps": 4, "lr": 1e-2}, data={"clients": 5, "train": 40},
        federation={"rule": "clip", "quarantine": 2},
    )  # fmt: skip
    engine, method, said, reports = make_engine(wary, backbone), build_method(wary), [], []
    engine.console.warn = said.append
    state = method.prepare(engine)
    for member in engine.members:  # everybody has both kinds
        member.buckets = list(np.array_split(np.arange(len(member.data)), 2))
        member.assignment = [0, 1]
    target, real = 1, engine.answers

    def turned(step, members, question):
        common = torch.randn(10**6, generator=torch.Generator().manual_seed(1))  # what all others do to an expert
        for client, message in real(step, members, question):
            for name in [n for n in message.tensors if step.name == "train" and n.startswith("expert.")]:
                bad = client.index == 0 and name == f"expert.{target}"
                own, part = message.tensors[name], common[: message.tensors[name].numel()]
                message.tensors[name] = (-1 if bad else 1) * part * own.norm() / part.norm()
            yield client, message

    engine.answers = turned
    federate(method, engine, state, range(3), lambda s, report: reports.append((s, report)))
    engine.detach()
    assert said == [
        f"quarantine: client_0's buckets of expert {target} pulled against the others in 2 rounds in a row, and "
        "count there no more."
    ]
    assert reports[1][1].quarantined and 0 in reports[2][1].receipts.accepted, "it is asked all the same"
    assert [report.agreement.against()[0][target] for _, report in reports] == [True, True, None]
    assert reports[2][0].bucket_doubts["client_0"][target] == 2, "and it stays so"
