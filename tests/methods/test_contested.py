"""Experts that no prompt tells apart: the one of most clients stays."""

from dataclasses import replace

import pytest
import torch

from fedweave.alignment.align import Alignment
from fedweave.federation.admission import Receipts
from fedweave.federation.rounds import one_round
from fedweave.methods import build_method, contested, preparation
from fedweave.router.mlp import RouterLayout
from tests.federations import changed, make_engine

FEW = (3, 4)  # clients whose first bucket has another answer to the same prompts


@pytest.fixture
def wary(config):
    return changed(config, federation={"rule": "agreement"}, data={"clients": 5, "train": 40})


def sends_all_to(expert: int, router: RouterLayout, phi: torch.Tensor) -> torch.Tensor:
    phi = torch.zeros_like(phi)
    router.views(phi)["linear2.bias"][expert] = 9.0
    return phi


def prepared(config, backbone, monkeypatch, winner: int):
    """After alignment into expert 0 (first buckets of three clients), 1 (of two), 2 (all others), and a first
    warm start whose router sends every prompt to one of them."""
    engine, method = make_engine(config, backbone), build_method(config)
    asked, real = [], preparation.warm_up_router

    def warm(engine, step, router, phi, *others, **more):
        asked.append(router.experts)
        found = real(engine, step, router, phi, *others, **more)
        return sends_all_to(winner, router, phi) if len(asked) == 1 else found

    def align(distance, most, **options):
        labels = [
            2 if c else int(client.index in FEW) for client in engine.members for c in range(len(client.buckets))
        ]
        return Alignment(3, torch.tensor(labels).numpy(), {})

    monkeypatch.setattr(preparation, "warm_up_router", warm)
    method.align = align
    return engine, method, method.prepare(engine), asked


def test_an_expert_of_few_clients_takes_nobodys_prompts_away(wary, backbone, monkeypatch):
    engine, method, state, asked = prepared(wary, backbone, monkeypatch, winner=1)
    assert state.report["dropped_experts"] == [1] and asked == [3, 2], "the router starts anew without it"
    assert state.layout.experts == state.router.experts == 2
    for client in engine.members:
        first, *others = client.assignment
        assert first == (-1 if client.index in FEW else 0) and set(others) <= {1}
        old, new = replace(state.router, experts=3).trained.size, state.router.trained.size
        rounds = wary.router.warm_start.rounds
        down = 4 * (old * (rounds + 1) + new * rounds)  # two warm starts, and the question between them
        down += 4 * 2 * state.router.width * (state.router.axes + 2)  # what is familiar
        assert state.report["preparation_bytes"][client.name]["down"] == down
    moved, report = one_round(method, engine, state, engine.present(), 0)
    engine.detach()
    assert not report.receipts.refused and not torch.equal(moved.theta, state.theta)


def test_experts_that_clients_have_side_by_side_stay_whatever_a_spoilt_router_says(wary, backbone, monkeypatch):
    engine, _, state, asked = prepared(wary, backbone, monkeypatch, winner=2)
    engine.detach()
    assert "dropped_experts" not in state.report and asked == [3]


def test_nobody_votes_for_the_experts_of_others(wary, backbone, monkeypatch):
    """Who lies about where its prompts go can close its own expert at most."""
    engine, method, _, _ = prepared(wary, backbone, monkeypatch, winner=2)
    liars = [client for client in engine.members if client.index in FEW]
    router = RouterLayout(engine.width, 8, 2)
    for client in engine.members:
        client.assignment = [int(client in liars) for _ in client.buckets]
    honest = sends_all_to(0, router, router.initial(0))
    step = method.contest
    asked = step.answer

    def answer(compute, clients, question):
        for client, said in zip(clients, asked(compute, clients, question), strict=True):
            if client in liars:
                said.figures["experts"] = [1 for _ in said.figures["experts"]]
            yield said

    monkeypatch.setattr(step, "answer", answer)
    assert contested.contested(engine, step, router, honest, Receipts()) == []
    monkeypatch.setattr(step, "answer", asked)
    assert contested.contested(engine, step, router, honest, Receipts()) == [1]
    engine.detach()


@pytest.mark.parametrize(
    "other",
    [
        {"federation": {"contested": "keep"}},
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
