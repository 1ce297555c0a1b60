"""Experts that no prompt tells apart: the one stays that answers better."""

from dataclasses import replace

import pytest
import torch

from fedweave.alignment.align import Alignment
from fedweave.federation.admission import Receipts
from fedweave.federation.message import Message
from fedweave.federation.news import Change
from fedweave.federation.state import router_facts
from fedweave.methods import build_method, preparation
from fedweave.router.mlp import RouterLayout
from tests.federations import changed, make_engine

PRIVATE = {"privacy": {"level": "client"}, "discovery": {"max_buckets": 1, "sketch": 4}}
FEW = (3, 4)  # clients whose first bucket has another answer to the same prompts


@pytest.fixture
def wary(config):
    return changed(config, federation={"rule": "agreement"}, data={"clients": 5, "train": 40})


def sends_all_to(expert: int, router: RouterLayout, phi: torch.Tensor) -> torch.Tensor:
    phi = torch.zeros_like(phi)
    router.views(phi)["linear2.bias"][expert] = 9.0
    return phi


def prepared(config, backbone, monkeypatch, winner: int, times: int = 1):
    """After alignment into expert 0 (first buckets of three clients), 1 (of two), 2 (all others), and a first
    warm start, or so many, whose router sends every prompt to one of them."""
    engine, method = make_engine(config, backbone), build_method(config)
    asked, real = [], preparation.warm_up_router

    def warm(engine, step, router, phi, *others, **more):
        asked.append(router.experts)
        found = real(engine, step, router, phi, *others, **more)
        return sends_all_to(winner, router, phi) if len(asked) <= times else found

    def align(distance, most, **options):
        labels = [
            2 if c else int(client.index in FEW) for client in engine.members for c in range(len(client.buckets))
        ]
        return Alignment(3, torch.tensor(labels).numpy(), {})

    monkeypatch.setattr(preparation, "warm_up_router", warm)
    method.align = align
    return engine, method, method.prepare(engine), asked


def test_experts_that_clients_have_side_by_side_stay_whatever_a_spoilt_router_says(wary, backbone, monkeypatch):
    engine, method, state, asked = prepared(wary, backbone, monkeypatch, winner=2, times=2)
    settled, change = method.live(engine, replace(state, standing={}), 1)
    engine.detach()
    assert not change.closed and not change.restarted and settled.layout.experts == 3 and asked == [3]


def test_nobody_votes_for_the_experts_of_others(wary, backbone, monkeypatch):
    """Who lies about where its prompts go can close its own expert at most."""
    engine, method, _, _ = prepared(wary, backbone, monkeypatch, winner=2)
    liars = [client for client in engine.members if client.index in FEW]
    router = RouterLayout(engine.width, 8, 2)
    for client in engine.members:
        client.assignment = [int(client in liars) for _ in client.buckets]
    honest = sends_all_to(0, router, router.initial(0))
    step = method.contest.where
    asked = step.answer

    def answer(compute, clients, question):
        for client, said in zip(clients, asked(compute, clients, question), strict=True):
            if client in liars:
                said.figures["experts"] = [1 for _ in said.figures["experts"]]
            yield said

    monkeypatch.setattr(step, "answer", answer)
    assert method.contest.pairs(engine, engine.members, router, honest, Receipts()) == []
    monkeypatch.setattr(step, "answer", asked)
    assert method.contest.pairs(engine, engine.members, router, honest, Receipts()) == [(1, 0)]
    engine.detach()


@pytest.mark.parametrize(
    "other",
    [
        {"federation": {"contested": "keep"}},
        PRIVATE,
        {"federation": {"rule": "mean"}},
        {"federation": {"rule": "clip"}},
        {"experts": {"labels": "router"}},
        {"living": {"notice": "open"}},
        {"router": {"warm_start": {"enabled": False}}},
    ],
)
def test_nobody_is_asked_where_experts_stay(config, wary, other):
    assert build_method(wary).contest is not None
    over_sites = changed(config, data={"source": "sites"})
    assert build_method(over_sites).contest is not None and build_method(config).contest is None
    assert build_method(changed(wary, **other)).contest is None


def test_who_has_a_bucket_without_an_expert_has_a_vote(wary, backbone, monkeypatch):
    """As a late site may have, or one whose expert has closed."""
    engine, method, _, _ = prepared(wary, backbone, monkeypatch, winner=1)
    some = [client for client in engine.members if len(client.assignment) > 1]
    for client in some:
        client.assignment[0] = -1
    router, heard = RouterLayout(engine.width, 8, 2), Receipts()
    phi = router.initial(0)
    answers = list(engine.ask(method.contest.where, some, Message({"phi": phi}, router_facts(router)), heard))
    engine.detach()
    assert len(answers) == len(some) > 0 and not heard.refused
    for client, (counts, picks) in answers:
        assert len(picks) == len(client.assignment) and counts.sum() == len(client.rows) < len(client.data)


def spoilt(state, expert: int):
    """The state with an expert that answers nothing, and everybody in good standing."""
    experts = state.layout.unstack(state.theta)
    experts[expert] = experts[expert] + 3.0 * torch.randn(experts[expert].shape)
    theta = state.layout.stack(experts, state.theta[state.layout.expert_of_column == 3])
    return replace(state, theta=theta, standing={})


@pytest.mark.parametrize("worse", [0, 1])
def test_the_expert_closes_that_answers_its_prompts_worse(wary, backbone, monkeypatch, worse):
    """Also where more clients have it, and whichever the router prefers."""
    engine, method, state, asked = prepared(wary, backbone, monkeypatch, winner=1, times=2)
    assert "dropped_experts" not in state.report and asked == [3], "nothing closes before anybody is known"
    untouched, change = method.live(engine, state, 2)
    assert untouched is state and not change.up, "it is asked once"
    router, before = state.router.trained, spoilt(state, worse)
    settled, change = method.live(engine, before, 1)
    engine.detach()
    assert change.closed == [worse] and change.restarted and change.told and asked == [3, 3, 2]
    assert set(change.up) == {client.name for client in engine.members}
    assert settled.layout.experts == settled.router.experts == 2
    kept = [expert for m, expert in enumerate(before.layout.unstack(before.theta)) if m != worse]
    assert all(map(torch.equal, settled.layout.unstack(settled.theta), kept)), "the others stay to the bit"
    for client in engine.members:
        assert (client.assignment[0] == -1) == ((client.index in FEW) == (worse == 1))
        assert 4 * (router.size + before.theta.numel()) < change.down[client.name], "all that was asked is counted"


def test_a_second_look_with_another_router_clears_experts(wary, backbone, monkeypatch):
    engine, method, state, _ = prepared(wary, backbone, monkeypatch, winner=1)
    looks = []

    def pairs(*_):
        looks.append(1)
        return [(0, 1)] if len(looks) == 1 else []

    monkeypatch.setattr(method.contest, "pairs", pairs)
    settled, change = method.live(engine, spoilt(state, 0), 1)
    engine.detach()
    assert settled.layout.experts == 3 and not change.closed and change.restarted
    assert "compare" not in engine.answered[engine.members[0].name]
    assert not torch.equal(settled.phi, state.phi), "the router that tells them apart stays"


def test_who_has_pulled_against_the_others_has_no_vote(wary, backbone, monkeypatch):
    engine, method, state, _ = prepared(wary, backbone, monkeypatch, winner=1, times=9)
    liar = engine.members[FEW[0]].name
    state = replace(spoilt(state, 0), standing={client.name: -1.0 if client.name == liar else 1.0
                                               for client in engine.members})  # fmt: skip
    _, change = method.live(engine, state, 1)
    engine.detach()
    assert change.closed == [0] and liar not in change.up
    assert not {"relabel", "compare", "rewarm"} & {*engine.answered[liar]}


def test_a_tie_closes_none_and_who_has_few_of_the_prompts_does_not_vote(wary, backbone, monkeypatch):
    engine, method, state, _ = prepared(wary, backbone, monkeypatch, winner=1)
    contest, said = method.contest, iter([0, 0, 1, 1, -1])
    monkeypatch.setattr(contest.compare, "read", lambda *_: [next(said)])
    assert contest.voted(engine, engine.members, state, [(0, 1)], Change(1)) == []
    elsewhere = sends_all_to(2, state.router.trained, state.phi[0, : state.router.trained.size])
    state = replace(state, router=state.router.trained, phi=elsewhere[None])
    monkeypatch.undo()
    question, heard = Change(1), []
    answer = contest.compare.answer
    monkeypatch.setattr(
        contest.compare, "answer", lambda *asked: (heard.append(one) or one for one in answer(*asked))
    )
    assert contest.voted(engine, engine.members, state, [(0, 1)], question) == []
    engine.detach()
    assert [one.figures for one in heard] == [{"rows": [0], "losses": [0.0, 0.0]}] * len(engine.members)
