"""Contested prompts (ours, not the paper's): of experts that no prompt tells apart, one stays.

Signatures see answers, the router sees prompts alone. Clients that give other answers to the same prompts form an
expert of their own, on which they agree with each other, and to which of the two the router sends these prompts is
chance: hostile ones would answer for everybody. Where the rule leaves hostile clients out (``agreement``), one
question tells where the router sends every bucket. If it sends most clients' buckets of an expert to another, only
one of the two will be asked.

So before round 2, when round 1 has shown who is hostile, those in good standing are asked, and a second time with a
router that was averaged more often; where that one tells the two apart nothing closes. Otherwise every client votes
with its losses for the expert that answers its own prompts better, and the one that fewer want closes. Each client
has one vote, whatever it says it has.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from fedweave.aggregation.robust import chosen_rule
from fedweave.aggregation.standing import Standing
from fedweave.config import Config
from fedweave.federation.admission import Receipts
from fedweave.federation.client import Client
from fedweave.federation.compute import Compute
from fedweave.federation.engines.base import Engine
from fedweave.federation.message import Facts, Message
from fedweave.federation.news import Change
from fedweave.federation.state import Broadcast, ServerState, broadcast, received, router_facts
from fedweave.federation.steps import MOST_LOSS, Answer, Asked, Figure, Step
from fedweave.methods.closing import without_experts
from fedweave.methods.relabel import Relabel
from fedweave.methods.warm_start import WarmRouter
from fedweave.router.mlp import RouterLayout
from fedweave.streams import stream_key

Pair = tuple[int, int]  # an expert, and the one to which the router sends its prompts
StartOver = Callable[[Engine, ServerState, WarmRouter | None, Change], ServerState]  # by this step, or as ever
_LOOKED_AT = 32  # prompts that a client measures losses on
_LEAST = 4  # of fewer nobody can tell which expert answers them better


class Contest:
    """The questions, and who of two experts closes."""

    def __init__(self, config: Config):
        self.config = config
        self.where, self.again, self.compare = Relabel(config), ShorterTurns(config), CompareExperts(config)

    @classmethod
    def of(cls, config: Config) -> "Contest | None":
        """None where nothing is asked. With labels by the router both feed one expert; with privacy no client tells
        where its prompts go; where kinds are noticed in mid-run, closed buckets would open their expert again."""
        asked = config.federation.contested != "keep" and chosen_rule(config) == "agreement"
        plain = (
            config.experts.labels == "buckets" and config.privacy.level == "none" and config.living.notice == "off"
        )
        return cls(config) if asked and plain and config.router.warm_start.enabled else None

    def steps(self) -> list[Step]:
        return [self.where, self.again, self.compare]

    def settle(self, engine: Engine, state: ServerState, change: Change, start_over: StartOver) -> ServerState:
        """Before round 2: the state without the experts that have lost a vote."""
        standing = Standing(engine.members, self.config, state.standing)
        voters = [member for member in engine.present() if member.index in standing]
        if not (pairs := self.contested(engine, voters, state, change)):
            return state
        engine.console.say(
            "the router starts over, in shorter turns: it may not have learned to tell experts apart"
        )
        state = start_over(engine, state, self.again, change)
        still = set(self.contested(engine, voters, state, change))
        pairs = [pair for pair in pairs if pair in still or pair[::-1] in still]
        closed = self.voted(engine, voters, state, pairs, change)
        if not closed:
            return state
        for m in closed:
            tell(engine, m)
        change.closed = closed
        state = without_experts(engine, state, closed)
        return start_over(engine, state, None, change)  # without what they taught it

    def contested(self, engine: Engine, voters: Sequence[Any], state: ServerState, change: Change) -> list[Pair]:
        """The pairs, and what it took to ask."""
        assert state.router is not None and state.phi is not None
        router, heard = state.router.trained, Receipts()
        phi = state.phi[0, : router.size]
        found = self.pairs(engine, voters, router, phi, heard)
        change.heard(heard, _question(router, phi))
        return found

    def voted(
        self, engine: Engine, voters: Sequence[Any], state: ServerState, pairs: Sequence[Pair], change: Change
    ) -> list[int]:
        """The expert of every pair that fewer of those want who have prompts of it; a tie closes none."""
        if not pairs:
            return []
        question, heard = broadcast(state, change.t), Receipts()
        question.facts.update(pairs=[m for pair in pairs for m in pair])
        preferred: list[Counter[int]] = [Counter() for _ in pairs]
        for _, wanted in engine.ask(self.compare, voters, question, heard):
            for count, m in zip(preferred, wanted, strict=True):
                count.update([m] if m >= 0 else [])
        change.heard(heard, question)
        closed: set[int] = set()
        for (m, rival), count in zip(pairs, preferred, strict=True):
            if count[m] != count[rival] and not {m, rival} & closed:
                closed.add(m if count[m] < count[rival] else rival)
        return sorted(closed)

    def pairs(
        self, engine: Engine, voters: Sequence[Any], router: RouterLayout, phi: torch.Tensor, receipts: Receipts
    ) -> list[Pair]:
        """Experts whose clients' prompts go to another one. A client with buckets of both has told them apart by
        prompts: with many such it is the router that is spoilt, and no pair. Who does not answer has no vote."""
        votes: defaultdict[int, Counter[int]] = defaultdict(Counter)  # expert -> where its clients' prompts go
        question, heard = _question(router, phi), Receipts(bytes_up=receipts.bytes_up)
        for member, (_, picks) in engine.ask(self.where, voters, question, heard):
            sent: defaultdict[int, Counter[int]] = defaultdict(Counter)
            for m, pick, size in zip(member.assignment, picks, member.sizes, strict=True):
                sent[m][pick] += size
            for m, goes in sent.items():
                votes[m][goes.most_common(1)[0][0]] += 1
        owned = [set(member.assignment) for member in voters]
        clients, found = Counter(m for own in owned for m in own), []
        for m, said in votes.items():
            pick, agreed = said.most_common(1)[0]
            both = sum({m, pick} <= own for own in owned)
            if pick != m >= 0 and 2 * agreed > said.total() and 2 * both < min(clients[m], clients[pick]):
                found.append((m, pick))
        return sorted(found)


def _question(router: RouterLayout, phi: torch.Tensor) -> Message:
    return Message({"phi": phi}, router_facts(router))


def tell(engine: Engine, m: int) -> None:
    """The operator is told whose buckets an expert closes with."""
    names = ", ".join(member.name for member in engine.members if m in member.assignment)
    engine.console.warn(
        f"expert {m} of {names} closes: those who have its prompts are answered better by another expert. These "
        "buckets take no part."
    )


class ShorterTurns(WarmRouter):
    """A round of a warm start with as many steps in all, averaged four times as often. Between two averages clients
    that know other experts part less, so that it also works where each knows but a few."""

    name = "rewarm"

    def __init__(self, config: Config):
        super().__init__(config)
        self.settings = config.router.warm_start.in_shorter_turns


class CompareExperts(Step[list[int]]):
    """Which of these two experts answers your prompts better, of those that the router sends to either?"""

    name = "compare"

    def __init__(self, config: Config):
        self.config = config

    def answer(self, compute: Compute, clients: Sequence[Client], question: Message) -> Iterator[Answer]:
        state, pairs = received(question, compute.layers, compute.device), _pairs(question)
        for client in clients:
            picks = state.gates(state.weights(client.data.features), "sparse").argmax(1).cpu()
            told = [self._losses(compute, state, client, picks, pair) for pair in pairs]
            rows = [n for n, _ in told]
            yield Answer(figures={"rows": rows, "losses": [loss for _, both in told for loss in both]})

    def _losses(
        self, compute: Compute, state: Broadcast, client: Client, picks: torch.Tensor, pair: Pair
    ) -> tuple[int, tuple[float, float]]:
        """How many prompts were looked at, and their mean loss under either expert."""
        trained = client.rows
        theirs = trained[np.isin(picks.numpy()[trained], pair)]
        rng = np.random.default_rng(stream_key("compare", self.config.seed, client.index, *pair))
        chosen = np.sort(rng.permutation(theirs)[:_LOOKED_AT])
        if len(chosen) < _LEAST or not client.enough(chosen):
            return 0, (0.0, 0.0)
        examples, experts = [client.data.examples[i] for i in chosen], state.layout.experts
        first, second = (
            float(compute.losses(state.layout, state.theta, examples, gates.expand(len(examples), -1)).mean())
            for gates in F.one_hot(torch.tensor(pair), experts).float()[:, None]
        )
        return len(chosen), (first, second)

    def figures(self, asked: Asked) -> dict[str, Figure]:
        n = len(_pairs(asked.question))
        return {
            "rows": Figure(int, 0, min(_LOOKED_AT, len(asked.member)), (n, n)),
            "losses": Figure(float, 0, MOST_LOSS, (2 * n, 2 * n)),
        }

    def read(self, asked: Asked, parts: dict[str, torch.Tensor], figures: Facts) -> list[int]:
        """The expert of every pair that it would have, -1 where it has no prompts of them, or cannot tell."""
        losses = np.array(figures["losses"]).reshape(-1, 2)
        return [
            -1 if not rows or first == second else pair[int(second < first)]
            for pair, rows, (first, second) in zip(_pairs(asked.question), figures["rows"], losses, strict=True)
        ]


def _pairs(question: Message) -> list[Pair]:
    flat = question.facts["pairs"]
    return list(zip(flat[::2], flat[1::2], strict=True))
