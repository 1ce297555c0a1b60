"""Algorithm 1 of the paper, on one page.

Lines 1 to 6 (discovery, alignment, initialisation) are a method's ``prepare``; this is the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import numpy as np

from fedweave.aggregation.standing import left_out, refused_too
from fedweave.config import Config
from fedweave.errors import UserError
from fedweave.federation.admission import Receipts, refusal
from fedweave.federation.agreement import AGAINST, Agreement
from fedweave.federation.checkpoint import RESUME
from fedweave.federation.client import Member
from fedweave.federation.engines.base import Engine
from fedweave.federation.method import Method
from fedweave.federation.news import Change
from fedweave.federation.state import ServerState, broadcast
from fedweave.federation.train import EXPERTS, ROUTER, TOGETHER, Update
from fedweave.streams import stream_key

M = TypeVar("M", bound=Member)


def federate(
    method: Method,
    engine: Engine,
    state: ServerState,
    rounds: Iterable[int],
    after_round: Callable[[ServerState, RoundReport], ServerState | None],
) -> ServerState:
    """Lines 7 to 15. ``after_round`` validates and saves, and may name another state to go on from; a run that
    resumes starts at a later round."""
    for t in rounds:
        engine.quarantined = Quarantine.of(method.config, state).clients
        for newcomer in engine.newcomers():
            if line := method.admit(engine, state, newcomer):
                engine.welcome(newcomer)
                engine.console.say(f"site {newcomer.name} joins with {len(newcomer.sizes)} buckets: {line}")
        state, change = method.live(engine, state, t)
        if not (present := engine.present()):
            raise UserError(
                f"nobody has rows to train on in round {t + 1}: they are gone, wait for more (living.least) or for "
                "the operator (living.notice=ask, living.alone, federation.quarantine). The last checkpoint is "
                f"intact: continue with {RESUME}."
            )
        participants = sample_clients(present, method.config, t)  # line 8: S_t
        state, report = one_round(method, engine, state, participants, t)
        report.change = change
        state = after_round(state, report) or state
    return state


class Quarantine(NamedTuple):
    """Who has pulled against the others in ``federation.quarantine`` rounds in a row."""

    clients: frozenset[str]  # they are not asked anything again
    buckets: dict[str, list[int]]  # client -> experts in which it counts nothing: its buckets of them did

    @classmethod
    def of(cls, config: Config, state: ServerState) -> Quarantine:
        most = config.federation.quarantine or math.inf
        clients = frozenset(name for name, rounds in state.doubts.items() if rounds >= most)
        buckets = {
            name: [m for m, rounds in enumerate(own) if rounds >= most]
            for name, own in state.bucket_doubts.items()
            if name not in clients
        }
        return cls(clients, buckets)

    def since(self, before: Quarantine) -> list[str]:
        """Who is in it and was not before, for people."""
        new = [
            (name, m) for name, own in self.buckets.items() for m in own if m not in before.buckets.get(name, [])
        ]
        return [
            *sorted(self.clients - before.clients),
            *(f"{name}'s buckets of expert {m}" for name, m in sorted(new)),
        ]


def one_round(
    method: Method, engine: Engine, state: ServerState, participants: Sequence[Member], t: int
) -> tuple[ServerState, RoundReport]:
    """Lines 9 to 14. A round in which too few answers can be used is repeated from the same state."""
    settings, before = method.config.federation, Quarantine.of(method.config, state)
    for attempt in range(1 + settings.repeats):
        question = broadcast(state, t)  # line 9
        receipts = Receipts(recent=state.norms)
        report = RoundReport(t, participants, Agreement(state.layout), receipts, muted=before.buckets)
        needed = method.train.broadcast_size(state.layout, state.router, t)
        report.bytes_down = question.size if engine.travels else needed
        replies = engine.ask(method.train, participants, question, report.receipts)  # lines 10-13
        moved = method.aggregate(engine, state, report.listen(replies))  # line 14
        if len(report.receipts.accepted) >= settings.min_answers:
            doubts, bucket_doubts = report.doubts(state.doubts), report.bucket_doubts(state.bucket_doubts)
            standing = refused_too(moved.standing, (name for name, _ in report.receipts.refused))
            moved = replace(
                moved, norms=report.receipts.remembered(), doubts=doubts, bucket_doubts=bucket_doubts,
                standing=standing,
            )  # fmt: skip
            after = Quarantine.of(method.config, moved)
            engine.quarantined, report.quarantined = after.clients, after.since(before)
            for who in report.quarantined:
                engine.console.warn(
                    f"quarantine: {who} pulled against the others in {settings.quarantine} rounds in a row, and "
                    f"{'is not asked again' if who in after.clients else 'count there no more'}."
                )
            report.left_out = left_out(moved.standing, settings.hostile)
            known = left_out(state.standing, settings.hostile) if t > 0 else []  # before round 1 nobody was told
            for who in sorted({*report.left_out} - {*known}):
                engine.console.warn(
                    f"round {t + 1}: {who} has pulled against the others so far, and counts nothing until it pulls "
                    "with them."
                )
            return moved, report
        got = len(report.receipts.accepted)
        short = f"round {t + 1} got {got} of the {settings.min_answers} usable answers that it needs"
        if attempt < settings.repeats:
            engine.console.warn(f"{short}; it is repeated.")
    refused = report.receipts.refused
    why = f" ({refusal(refused[-1][0], method.train.said(t), refused[-1][1])})" if refused else ""
    raise UserError(
        f"{short}{why}; mend the clients or lower federation.min_answers. The last checkpoint is intact: continue "
        f"with {RESUME}."
    )


def sample_clients(clients: Sequence[M], config: Config, t: int) -> list[M]:
    """S_t: all clients, or a fraction or a count of them, drawn anew each round."""
    asked = config.training.participation
    count = round(asked * len(clients)) if asked <= 1 else int(asked)
    count = min(max(1, count), len(clients))
    rng = np.random.default_rng(stream_key("participants", config.seed, t))
    chosen = sorted(rng.permutation(len(clients))[:count])
    return [clients[i] for i in chosen]


@dataclass
class RoundReport:
    """What a finished round leaves behind: figures, not vectors, so that memory does not grow with the clients."""

    t: int
    participants: Sequence[Member]
    agreement: Agreement  # who pulls with the others
    receipts: Receipts
    losses: dict[str, float] = field(default_factory=dict)  # mean step loss of each accepted answer
    tokens: int = 0
    bytes_down: int = 0  # what each participant received
    change: Change | None = None  # what happened before it
    muted: Mapping[str, Sequence[int]] = field(default_factory=dict)  # client -> experts in which it counts nothing
    left_out: Sequence[str] = ()  # who counted nothing in it, by the rule
    quarantined: Sequence[str] = ()  # who came into quarantine by it

    def __post_init__(self) -> None:
        self.receipts.norms = {EXPERTS: [], ROUTER: []}  # remembered even where a method has no router

    def listen(self, replies: Iterator[tuple[Member, Update]]) -> Iterator[Update]:
        """Hand updates on, one by one, and take down what the report says of them."""
        for member, update in replies:
            if update.losses:  # under differential privacy nobody tells
                self.losses[member.name] = float(np.mean(update.losses))
            self.tokens += update.tokens
            update.counts[list(self.muted.get(member.name, []))] = 0
            if update.client != TOGETHER:
                self.agreement.add(update)
            yield update

    def doubts(self, before: dict[str, int]) -> dict[str, int]:
        """Rounds in a row, up to this one, in which a client pulled against the others."""
        names = {member.index: member.name for member in self.participants}
        after = dict(before)
        for index, cosine in self.agreement.cosines().items():
            name = names[index]
            after[name] = after.get(name, 0) + 1 if cosine is not None and cosine < AGAINST else 0
        return {name: count for name, count in after.items() if count}

    def bucket_doubts(self, before: Mapping[str, list[int]]) -> dict[str, list[int]]:
        """The same of a client's buckets of every expert, [M]; rounds in which it cannot be told change nothing."""
        names, after = {member.index: member.name for member in self.participants}, dict(before)
        for index, against in self.agreement.against().items():
            had = [*before.get(names[index], []), *[0] * len(against)]
            after[names[index]] = [
                n if told is None else told * (n + 1) for n, told in zip(had, against, strict=False)
            ]
        return {name: rounds for name, rounds in after.items() if any(rounds)}

    @property
    def train_loss(self) -> float | None:
        return float(np.mean(list(self.losses.values()))) if self.losses else None
