"""A client: its data, its buckets, the experts that they are aligned to, and its memory; never a task label.

The client itself may be anywhere; a ``Member`` is what the server knows of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from fedweave.federation.message import Message
from fedweave.privacy.masking import Open, Party
from fedweave.training.batch import ClientData

RESIDUAL = "residual."  # in a memory: what rounding has taken from a part of the updates so far
OWN = "own"  # in a memory: [P] parameters that never leave the client


@dataclass
class Distant:
    """A client elsewhere, as the server knows it."""

    index: int
    name: str
    sizes: list[int] = field(default_factory=list)  # examples in every bucket
    assignment: list[int] = field(default_factory=list)  # a(i,·): the expert of every bucket; -1: none
    note: str = ""  # why it has only one bucket, when that was forced
    version: int = 0  # of its rows, whose buckets these are

    def learn(self, sizes: list[int], note: str) -> None:
        """What the client has told of its buckets."""
        self.sizes, self.note = sizes, note

    def __len__(self) -> int:
        """|D_i|: the examples that take part; before alignment nobody knows which."""
        return sum(n for n, m in zip(self.sizes, self.assignment, strict=False) if m >= 0) or sum(self.sizes)

    @property
    def takes_part(self) -> bool:
        """Whether it has examples for an expert; before alignment everybody may."""
        return not self.assignment or any(n and m >= 0 for n, m in zip(self.sizes, self.assignment, strict=True))

    def regroup(self, sizes: list[int], experts: list[int], version: int) -> None:
        """Its rows have changed: the buckets that it has now, and their experts."""
        self.sizes, self.assignment, self.version = sizes, experts, version

    def record(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return asdict(self)

    def addressed(self, question: Message, step: str, settings: str, federation: str) -> Message:
        """A question as it is put to this client, with everything that it may have forgotten."""
        return Message(question.tensors, {
            **question.facts, "step": step, "config": settings, "federation": federation,
            "index": self.index, "sizes": self.sizes, "assignment": self.assignment, "version": self.version,
        })  # fmt: skip


class Memory:
    """What a client keeps from round to round and never sends. A round that is repeated starts from what it started
    from the first time."""

    def __init__(self) -> None:
        self.round = -1
        self.pace: float | None = None  # of that round, where it is known
        self.before: dict[str, torch.Tensor] = {}  # as the open round found it
        self.after: dict[str, torch.Tensor] = {}  # as it leaves it

    def begin(self, t: int, pace: float = 1.0, router: tuple[str, int] | None = None) -> None:
        """Round t opens. A server that goes back further than one round finds the oldest state that is left; what
        rounding took since then is forgotten, as it is where a lower pace tells that a run is back at its best, or
        the length of the router (its part's name, and how long it is) that there are other experts than before."""
        slower = self.pace is not None and pace < self.pace
        if t > self.round:
            self.before = self.after
        owed = self.before.get(RESIDUAL + router[0]) if router else None
        resized = router is not None and owed is not None and len(owed) != router[1]
        if t < self.round or slower or resized:
            self.before = {name: x for name, x in self.before.items() if not name.startswith(RESIDUAL)}
        self.round, self.pace, self.after = t, pace, dict(self.before)

    def get(self, name: str) -> torch.Tensor | None:
        return self.before.get(name)

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        self.after[name] = tensor

    def start(self, name: str, tensor: torch.Tensor) -> None:
        """Something that it has had from the beginning."""
        self.before[name] = self.after[name] = tensor

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Back to the end of a checkpoint's round, or of the best one."""
        self.round, self.pace, self.before, self.after = -1, None, {}, dict(tensors)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a site writes down after round :attr:`round`, which may yet be repeated."""
        return {f"before.{k}": v for k, v in self.before.items()} | {f"after.{k}": v for k, v in self.after.items()}

    def load(self, tensors: Mapping[str, torch.Tensor], t: int, pace: float | None) -> None:
        self.round, self.pace = t, pace
        self.before, self.after = (
            {name.removeprefix(when): x for name, x in tensors.items() if name.startswith(when)}
            for when in ("before.", "after.")
        )


class Feed(Protocol):
    """Where a client's rows come from when they change between rounds."""

    def version(self, t: int) -> int:
        """Which rows it has in round t; 0 are those of the beginning."""

    def data(self, version: int) -> ClientData: ...


@dataclass
class Client:
    """Client i itself. ``buckets`` come from discovery, ``assignment`` a(i,·) from alignment."""

    index: int
    data: ClientData
    buckets: list[np.ndarray] = field(default_factory=list)
    assignment: list[int] = field(default_factory=list)  # -1: a bucket that no expert serves takes no part
    note: str = ""
    memory: Memory = field(default_factory=Memory)
    held: ClientData | None = None  # what a site validates on
    boast: int = 1  # examples that it says it has for each one; more where a simulation's client is hostile
    party: Party | Open | None = None  # its part in a masked sum
    secret: int = 0  # of its noise, another for every question; a simulation has nobody to hide it from
    least: int = 1  # different rows that anything which leaves it rests on, at least: a site's own floor
    feed: Feed | None = None  # None: its rows never change
    version: int = 0  # of its rows
    waiting: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=int))  # rows that no bucket has yet

    @property
    def name(self) -> str:
        return self.data.name

    @property
    def sizes(self) -> list[int]:
        return [self.boast * len(bucket) for bucket in self.buckets]

    @property
    def served(self) -> list[np.ndarray]:
        """The buckets that have an expert; all of them before alignment."""
        return [b for b, m in zip(self.buckets, self.assignment or [0] * len(self.buckets), strict=True) if m >= 0]

    @property
    def rows(self) -> np.ndarray:
        """The rows that have an expert, ascending."""
        return np.sort(np.concatenate([self.waiting[:0], *self.served]))

    @property
    def takes_part(self) -> bool:
        return not self.assignment or any(len(bucket) for bucket in self.served)

    def learn(self, sizes: list[int], note: str) -> None:
        self.note = note  # its buckets are its own

    def regroup(self, sizes: list[int], experts: list[int], version: int) -> None:
        self.assignment = experts

    def __len__(self) -> int:
        return self.boast * (sum(map(len, self.served)) or len(self.data))

    def record(self) -> dict[str, Any]:
        buckets = [bucket.tolist() for bucket in self.buckets]
        record = {"name": self.name, "buckets": buckets, "assignment": self.assignment, "note": self.note}
        return record | ({"version": self.version, "waiting": self.waiting.tolist()} if self.version else {})

    def restore(self, record: Mapping[str, Any]) -> None:
        self.version = record.get("version", 0)
        if self.feed is not None:
            self.data = self.feed.data(self.version)
        self.buckets = [np.array(bucket, dtype=int) for bucket in record["buckets"]]
        self.assignment, self.note = record["assignment"], record["note"]
        self.waiting = np.array(record.get("waiting", []), dtype=int)

    def catch_up(self, t: int) -> tuple[int, int]:
        """Take the rows of round t: those that are gone leave their buckets, new ones wait. (Rows that came, rows
        that went.)"""
        if self.feed is None or (version := self.feed.version(t)) == self.version:
            return 0, 0
        before, self.version, self.data = self.data, version, self.feed.data(version)
        places: dict[tuple[bytes, int], list[int]] = {}
        for i, example in enumerate(self.data.examples):
            places.setdefault(example.key, []).append(i)
        moved = np.full(len(before), -1)  # old place -> new place
        for i, example in enumerate(before.examples):
            if left := places.get(example.key):
                moved[i] = left.pop(0)
        self.buckets = [_still_there(moved, bucket) for bucket in self.buckets]
        new = np.setdiff1d(np.arange(len(self.data)), moved)
        self.waiting = np.sort(np.concatenate([_still_there(moved, self.waiting), new]))
        return len(new), int((moved < 0).sum())

    def enough(self, rows: np.ndarray) -> bool:
        """Whether an answer may rest on these rows; what rests on copies of one row tells that row."""
        return self.data.distinct(rows) >= self.least

    def let_go(self) -> None:
        """The rows of buckets that have become too small wait again."""
        small = [not self.enough(bucket) for bucket in self.buckets]
        waiting = [bucket for bucket, gone in zip(self.buckets, small, strict=True) if gone]
        self.waiting = np.sort(np.concatenate([self.waiting, *waiting]))
        self.buckets = [bucket[:0] if gone else bucket for bucket, gone in zip(self.buckets, small, strict=True)]

    def drop(self, buckets: Sequence[int]) -> None:
        """Without these buckets; their rows are somebody else's affair."""
        kept = [c for c in range(len(self.buckets)) if c not in buckets]
        self.buckets, self.assignment = [self.buckets[c] for c in kept], [self.assignment[c] for c in kept]

    def join_buckets(self) -> None:
        """Buckets of one expert become one, so that years of new rows do not become a thousand buckets."""
        experts = list(dict.fromkeys(self.assignment))
        owner = np.array(self.assignment)
        self.buckets = [np.concatenate([self.buckets[c] for c in np.flatnonzero(owner == m)]) for m in experts]
        self.assignment = experts

    def example_experts(self) -> torch.Tensor:
        """a(i,c) of every example's bucket, [n]; 0 where it has none, since nothing is drawn from there."""
        labels = torch.zeros(len(self.data), dtype=torch.long)
        for bucket, m in zip(self.buckets, self.assignment, strict=True):
            labels[bucket] = max(m, 0)
        return labels


def _still_there(moved: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return moved[rows][moved[rows] >= 0]


Member = Client | Distant  # what the server knows of client i, wherever it runs


def examples_of(members: Sequence[Member], experts: int) -> list[int]:
    """[M] the examples of every expert."""
    fed = [0] * experts
    for member in members:
        for size, m in zip(member.sizes, member.assignment, strict=True):
            fed[m] += size if m >= 0 else 0
    return fed
