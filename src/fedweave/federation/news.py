"""The question between rounds: have your rows changed? A client answers with the sizes of its buckets.

Rows that came wait at the client until its method groups them (``Method.group``); what becomes of buckets that have
no expert yet is the server's affair (``Method.settle``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedweave.federation.admission import Receipts
from fedweave.federation.client import Client
from fedweave.federation.message import Facts, Message, Refused
from fedweave.federation.steps import Answer, Asked, Figure, Step

if TYPE_CHECKING:
    from fedweave.federation.compute import Compute
    from fedweave.federation.method import Method

_MOST_CHANGES = 10**9  # of a client's rows


@dataclass
class Told:
    """A client's buckets after its rows have changed."""

    sizes: list[int]
    experts: list[int]  # -1: none yet
    came: int  # rows since it was last asked
    went: int
    version: int  # of its rows: what it is asked next is about these buckets


@dataclass
class Placed:
    """A bucket of rows that arrived, and what was decided: its expert, or -1 where it is kept apart."""

    client: str
    rows: int
    expert: int
    nearest: int  # of the experts that were there
    distance: float  # of their signatures
    loss: float  # under the expert that the router picks
    usual: float  # loss of the client's other rows under theirs
    doubt: float  # of the router: 1 - its largest weight
    strange: float  # share of its prompts that are like none before
    waits: str = ""  # with which settings an expert would open for it, where it is kept apart and rows enough


@dataclass
class Change:
    """What has changed before round t."""

    t: int
    came: dict[str, int] = field(default_factory=dict)  # client -> rows
    went: dict[str, int] = field(default_factory=dict)
    placed: list[Placed] = field(default_factory=list)
    opened: list[int] = field(default_factory=list)  # experts
    merged: list[int] = field(default_factory=list)  # two experts that became one, by their old numbers
    retired: list[int] = field(default_factory=list)  # experts, by their old numbers
    unfed: list[int] = field(default_factory=list)  # experts that nobody who is here feeds any more
    fed_again: list[int] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)  # experts that lost a vote, by their old numbers
    restarted: bool = False  # the router has started over
    limit: float | None = None  # distance beyond which a bucket belongs to no expert
    up: dict[str, int] = field(default_factory=dict)  # client -> bytes
    down: dict[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether there are other rows or other experts than before, or a router that is nobody's any more."""
        other = self.came or self.went or self.placed or self.merged or self.retired or self.closed
        return bool(other) or self.restarted

    @property
    def told(self) -> bool:
        """Whether there is anything that people are told of."""
        return bool(self) or bool(self.unfed or self.fed_again)

    def opened_by(self, m: int) -> str:
        """The only client that an expert opened for; empty where there are several."""
        clients = {bucket.client for bucket in self.placed if bucket.expert == m}
        return clients.pop() if len(clients) == 1 else ""

    def nearest_of(self, m: int) -> int:
        """The old expert that most rows of an expert which opens lie nearest to."""
        rows: Counter[int] = Counter()
        for bucket in self.placed:
            rows[bucket.nearest] += bucket.rows if bucket.expert == m else 0
        return max(rows, key=lambda old: (rows[old], -old))

    def heard(self, receipts: Receipts, question: Message) -> None:
        """Count what a question and its answers took."""
        self.count(receipts, question.size)

    def count(self, receipts: Receipts, down: int) -> None:
        """Count answers, and so many bytes to each of those who gave them."""
        for name, sent in receipts.bytes_up.items():
            self.up[name] = self.up.get(name, 0) + sent
            self.down[name] = self.down.get(name, 0) + down


class News(Step[Told]):
    """What are your buckets in round t, and which experts do they have?"""

    name = "news"

    def __init__(self, method: Method):
        self.method, self.config = method, method.config

    def answer(self, compute: Compute, clients: Sequence[Client], question: Message) -> Iterator[Answer]:
        for client in clients:
            came, went = client.catch_up(question.facts["t"])
            if came or went:
                compute.adapters = None  # they are known by their buckets' numbers
            client.let_go()
            if len(client.waiting) and (came or went):  # of one version of its rows a client has one set of buckets
                self.method.group(compute, client)
            empty = [c for c, bucket in enumerate(client.buckets) if not len(bucket)]
            client.drop(empty if len(empty) < len(client.buckets) else empty[1:])  # an empty one says: nothing
            yield Answer(figures={
                "sizes": client.sizes, "experts": client.assignment, "came": came, "went": went,
                "version": client.version,
            })  # fmt: skip

    def figures(self, asked: Asked) -> dict[str, Figure]:
        rows, most = self.config.federation.max_samples, self.config.discovery.max_buckets
        more = asked.width if self.method.uses_labels else most  # where a bound is told kinds, each is a bucket
        most = (
            max(most, asked.question.facts["experts"] + 1) + more
        )  # known ones, at last one an expert, and new ones
        return {
            "sizes": Figure(int, 0, rows, (1, most)),
            "experts": Figure(int, -1, asked.question.facts["experts"] - 1, (1, most)),
            "came": Figure(int, 0, rows),
            "went": Figure(int, 0, rows),
            "version": Figure(int, 0, _MOST_CHANGES),
        }

    def parts(self, asked: Asked, figures: Facts) -> dict:
        if len(figures["sizes"]) != len(figures["experts"]):
            raise Refused("it does not name the expert of every bucket")
        if not (self.method.uses_labels or {-1, *asked.member.assignment} >= set(figures["experts"])):
            raise Refused("it names an expert that its buckets were not given")
        return {}

    def read(self, asked: Asked, parts: dict[str, torch.Tensor], figures: Facts) -> Told:
        sizes, experts = ([int(n) for n in figures[name]] for name in ("sizes", "experts"))
        return Told(sizes, experts, int(figures["came"]), int(figures["went"]), int(figures["version"]))


def into_the_nearest(client: Client) -> None:
    """Every row that waits joins the bucket whose mean feature is nearest."""
    features, filled = client.data.features, [c for c, bucket in enumerate(client.buckets) if len(bucket)] or [0]
    means = [features[client.buckets[c]].mean(0) if len(client.buckets[c]) else features.mean(0) for c in filled]
    nearest = torch.cdist(features[client.waiting], torch.stack(means)).argmin(1).numpy()
    for place, c in enumerate(filled):
        client.buckets[c] = np.concatenate([client.buckets[c], client.waiting[nearest == place]])
    client.waiting = client.waiting[:0]
