"""Thousands of mutated replies to every question: each is refused or harmless, and none ends a run.

Each case follows from the seed, so that a failure can be had again; FEDWEAVE_DAMAGES=10000 tries more of them.
"""

import os
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from fedweave.aggregation.robust import client_average, expert_average, usual_length
from fedweave.federation.admission import Door, Receipts
from fedweave.federation.message import Message
from fedweave.federation.rounds import one_round
from fedweave.federation.state import broadcast
from fedweave.federation.steps import Asked, Step
from fedweave.federation.train import Update
from fedweave.methods import build_method
from fedweave.methods.prototypes import first_adapter
from tests.federations import changed, make_engine

TRIES = int(os.environ.get("FEDWEAVE_DAMAGES", "2000"))
WORDS = ["", "x" * 10_000, "NaN", None, True, -1, 0, 1, 2**62, 2**63, -(2**70), 1e308, float("inf"), float("nan"),
         [], [[]], {}, [None], ["a"], [2**64] * 3, [float("nan")], b"bytes"]  # fmt: skip


@dataclass
class Reply:
    """An honest reply to a question, and what it answers."""

    step: Step
    asked: Asked
    message: Message


def collect(config, backbone):
    """(every client's reply to every question of a method, the engine that asked)"""
    engine, method, seen = make_engine(config, backbone), build_method(config), []
    real = engine.answers

    def spy(step, asked, question):
        for one, (client, message) in zip(asked, real(step, asked, question), strict=True):
            copy = Message({k: v.clone() for k, v in message.tensors.items()}, dict(message.facts))
            seen.append(Reply(step, one, copy))
            yield client, message

    engine.answers = spy
    state = method.prepare(engine)
    state, _ = one_round(method, engine, state, engine.members, 0)
    list(engine.ask(method.evaluate, engine.members, broadcast(state, 1)))
    engine.detach()
    return seen, engine


def mutated(honest: Message, rng: random.Random) -> object:
    """Another message, or something that is none."""
    tensors, facts = {k: v.clone() for k, v in honest.tensors.items()}, dict(honest.facts)
    for _ in range(rng.choice([1, 1, 2, 3])):
        kind = rng.randrange(12)
        name = rng.choice([k for k, v in tensors.items() if isinstance(v, torch.Tensor)] or [None])
        fact = rng.choice([*facts, "step"])
        if kind == 0:
            return rng.choice([None, b"", "text", 3, Message(), Message({}, None), Message(None, facts)])
        if kind == 1:
            facts.pop(fact, None)
        elif kind == 2:
            facts[fact] = rng.choice(WORDS)
        elif kind == 3 and isinstance(facts.get(fact), list) and facts[fact]:
            values = list(facts[fact])
            values[rng.randrange(len(values))] = rng.choice(WORDS)
            facts[fact] = values * rng.choice([1, 1, 2])
        elif kind == 4:
            facts[f"more{rng.random()}"] = rng.choice(WORDS)
        elif name is None:
            continue
        elif kind == 5:
            tensors.pop(name)
        elif kind == 6:
            tensors[rng.choice(["", "theta", "expert.99", "router", name + "."])] = tensors[name]
        elif kind == 7:
            tensors[name] = tensors[name].to(rng.choice([torch.int8, torch.float16, torch.float64, torch.bool]))
        elif kind == 8:
            tensors[name] = tensors[name].flatten()[: rng.choice([0, 1, 7])]
        elif kind == 9:
            place = tensors[name].flatten()
            if place.is_floating_point() and len(place):
                place[rng.randrange(len(place))] = rng.choice([float("nan"), float("inf"), 1e30, -1e38])
        elif kind == 10:
            tensors[name] = tensors[name] * rng.choice([-1, -10, 1e3, 1e9, 1e30])
        else:
            tensors[name] = rng.choice([None, [1.0], "tensor", torch.zeros(3, dtype=torch.complex64)])
    return Message(tensors, facts)


@pytest.mark.parametrize("method", ["fedweave", "fedlease"])
def test_a_mutated_reply_is_refused_or_harmless(method, config, backbone):
    asked = {"method": method, "data": {"clients": 6}, "federation": {"rule": "clip", "max_share": 0.3}}
    woven = {"experts": {"shared_rank": 8}, "router": {"familiar": 0.9, "gate": "sure"}}  # every question there is
    config = changed(config, **asked, **(woven if method == "fedweave" else {}))
    honest, engine = collect(config, backbone)
    averages = Averages(config, honest, engine)
    rng, outcomes = random.Random(0), {"refused": 0, "let in": 0}
    for number in range(TRIES):
        reply = rng.choice(honest)
        told, said = averages.admit(reply, mutated(reply.message, rng))
        outcomes["refused" if told is None else "let in"] += 1
        if told is None:
            assert len(said) == 1 and "\n" not in said[0], f"case {number}: a refusal is one sentence"
        elif (effect := averages.effect(reply, told)) > 2:
            raise AssertionError(f"case {number}, {reply.step.name}, moves the model by {effect:.1f}")
    assert min(outcomes.values()) > TRIES // 50, outcomes


class Averages:
    """What the server makes of honest replies to a question, in which one is swapped for another."""

    def __init__(self, config, replies: list[Reply], engine):
        self.config, self.engine = config, engine
        self.honest: dict[tuple[str, int], dict[int, object]] = {}  # question -> client -> what it told
        for reply in replies:
            if reply.step.name in ("train", "warm", "start"):
                told, _ = self.admit(reply, reply.message)
                self.honest.setdefault(self.question(reply), {})[reply.asked.member.index] = told
        self.most = {
            question: [max(moves) for moves in zip(*(self.moves(told, gone) for gone in told), strict=True)]
            for question, told in self.honest.items()
        }

    @staticmethod
    def question(reply: Reply) -> tuple[str, int]:
        return reply.step.name, reply.asked.question.facts["t"]

    def admit(self, reply: Reply, message: object) -> tuple[object, list[str]]:
        """(what the door makes of it, what the operator is told)"""
        said: list[str] = []
        door = Door(self.config, reply.step, [reply.asked], self.engine.identity, self.engine.device, Receipts())
        return door.admit(reply.asked.member, message, said.append), said

    def moves(self, told: dict[int, object], of: int) -> list[float]:
        """How far one client moves the experts and the router, or the starts."""
        others = {client: one for client, one in told.items() if client != of}
        return [float((a - b).norm()) for a, b in zip(self.average(told), self.average(others), strict=True)]

    def average(self, told: dict[int, object]) -> list[torch.Tensor]:
        """The server's moves; of starts their sum, which shows whoever moves one of them."""
        device, some = torch.device("cpu"), next(iter(told.values()))
        if isinstance(some, Update):
            layout = self.engine.layout(self.config.experts.rank, len(some.counts), self.config.experts.shared_rank)
            experts = expert_average(layout, device, self.config)
            router = client_average(len(some.delta_phi), device, self.config)
            for update in told.values():
                experts.add(update.delta_theta, update.counts, update.samples)
                router.add(update.delta_phi, update.samples)
            return [experts.step(), router.step()]
        if isinstance(some, tuple):
            warmed = client_average(len(some[0]), device, self.config)
            for delta, samples in told.values():
                warmed.add(delta, samples)
            return [warmed.step()]
        first = first_adapter(self.engine.layout(self.config.experts.rank, 1), self.config.seed)
        means = {}
        for start in told.values():
            for m, adapter, buckets in start:
                means.setdefault(m, client_average(len(first), device, self.config)).add(adapter - first, buckets)
        usual = usual_length(means.values())
        return [torch.stack([mean.step(usual) for mean in means.values()]).sum(0)]

    def effect(self, reply: Reply, told: object) -> float:
        """How far it moves the model, as a multiple of the farthest that an honest client does."""
        question, client = self.question(reply), reply.asked.member.index
        if question not in self.honest:
            return 0.0
        moves = self.moves({**self.honest[question], client: told}, client)
        return max(move / most for move, most in zip(moves, self.most[question], strict=True))


# ------------------------------------------------------------------------------------ a liar in a whole federation

Lie = Callable[[Message], Message]
LIAR, MANY = 1, 100_000


def play(config, backbone, lie: Lie | None = None):
    """(the state after a round, the members, what the operator was told) where one client's answers are lies"""
    engine, method, said = make_engine(config, backbone), build_method(config), []
    real, engine.console.warn = engine.answers, said.append
    engine.members[LIAR].boast = MANY if lie is many_examples else 1

    def spy(step, asked, question):
        for client, message in real(step, asked, question):
            yield client, lie(message) if lie and client.index == LIAR else message

    engine.answers = spy
    state = method.prepare(engine)
    state, report = one_round(method, engine, state, engine.members, 0)
    engine.detach()
    return state, report, engine.members, said


def many_examples(message: Message) -> Message:
    """It says from the start that it has a hundred thousand for each, and then that all are expert 0's, and as near
    to each other as can be."""
    facts, tensors = dict(message.facts), message.tensors
    if facts["step"] in ("relabel", "distances"):
        facts["counts"] = [MANY * sum(facts["counts"]), *[0 for _ in facts["counts"][1:]]]
    if facts["step"] == "moments":
        facts["samples"] *= MANY
        tensors = {name: MANY * x for name, x in tensors.items()}
    return Message(tensors, facts)


def one_number(message: Message) -> Message:
    """One number of every vector is as large as its type holds, beside the squares, which look as ever."""
    tensors = {name: x.clone() for name, x in message.tensors.items()}
    for x in tensors.values():
        if x.is_floating_point() and x.numel() > 1:
            x.view(-1)[1] = torch.finfo(x.dtype).max / 2
    return Message(tensors, message.facts)


def loss_of_a_step(message: Message) -> Message:
    return Message(
        message.tensors, message.facts | ({"losses": [1e308, 1e308]} if "losses" in message.facts else {})
    )


def far_out(message: Message) -> Message:
    """Its prompts lie as far out as can be counted, so that every prompt is familiar."""
    facts = dict(message.facts)
    if facts["step"] == "distances":
        facts["counts"] = [*[0 for _ in facts["counts"][1:]], sum(facts["counts"])]
    return Message(message.tensors, facts)


def no_features(message: Message) -> Message:
    """Its features are all zero: of no length that others could be held against."""
    hushed = message.facts["step"] == "moments"
    return Message({name: 0 * x if hushed else x for name, x in message.tensors.items()}, message.facts)


@pytest.mark.parametrize("lie", [no_features, many_examples, one_number, loss_of_a_step, far_out])
def test_a_liar_before_and_in_the_first_round_costs_itself_alone(lie, config, backbone):
    config = changed(
        config, data={"clients": 8, "train": 24}, federation={"rule": "clip", "max_share": 0.2},
        experts={"labels": "router", "min_share": 0.05, "shared_rank": 8}, training={"local_steps": 2},
        router={"familiar": 0.9, "gate": "sure"}, alignment={"min_share": 0.05},
    )  # fmt: skip
    honest, _, _, told = play(config, backbone)
    state, report, members, _ = play(config, backbone, lie)
    assert not told and all(torch.isfinite(x).all() for x in state.tensors().values())
    assert report.train_loss is not None and 0 < report.train_loss < 100
    assert state.layout.experts >= honest.layout.experts, "nobody's expert is dropped"
    features = torch.cat([member.data.features for member in members if member.index != LIAR])
    known, usual = (s.weights(features).any(1).float().mean() for s in (state, honest))
    assert abs(known - usual) < 0.25, "what is familiar to the others stays so"
    limits = [float(s.router.views(s.phi[0])["familiar.limit"]) for s in (state, honest)]
    assert limits[0] < 3 * limits[1], "and what is not does not become so"
