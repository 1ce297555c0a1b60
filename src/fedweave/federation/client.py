"""A client: its data, its buckets and the experts that they are aligned to. It never holds a task label.

The client itself may be anywhere; a ``Member`` is what the server knows of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from fedweave.federation.compression import Residuals
from fedweave.training.batch import ClientData


class Member(Protocol):
    """What the server knows of client i, wherever it runs."""

    index: int
    assignment: list[int]  # a(i,·): the expert of every bucket
    note: str  # why it has only one bucket, when that was forced

    @property
    def name(self) -> str: ...

    @property
    def sizes(self) -> list[int]:
        """Examples in every bucket."""

    def __len__(self) -> int:
        """|D_i|"""

    def record(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""


@dataclass
class Client:
    """Client i. ``buckets`` come from discovery, ``assignment`` a(i,·) from alignment."""

    index: int
    data: ClientData
    buckets: list[np.ndarray] = field(default_factory=list)
    assignment: list[int] = field(default_factory=list)
    note: str = ""
    residuals: Residuals = field(default_factory=Residuals)  # what rounding took from its updates so far
    own: torch.Tensor | None = None  # [P] parameters that stay at a site; a simulation keeps them for its clients
    held: ClientData | None = None  # what a site validates on

    @property
    def name(self) -> str:
        return self.data.name

    @property
    def sizes(self) -> list[int]:
        return [len(bucket) for bucket in self.buckets]

    def __len__(self) -> int:
        return sum(self.sizes) or len(self.data)  # a bucket that no expert serves takes no part

    def record(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {
            "name": self.name,
            "buckets": [bucket.tolist() for bucket in self.buckets],
            "assignment": self.assignment,
            "note": self.note,
        }

    def restore(self, record: dict[str, Any]) -> None:
        self.buckets = [np.array(bucket, dtype=int) for bucket in record["buckets"]]
        self.assignment, self.note = record["assignment"], record["note"]

    def counts(self, experts: int, budget: list[int] | None = None) -> torch.Tensor:
        """n(i,m): how many examples stand behind each expert, [M]; a bucket without steps does not count."""
        counts = torch.zeros(experts)
        for c, (bucket, m) in enumerate(zip(self.buckets, self.assignment, strict=True)):
            if budget is None or budget[c] > 0:
                counts[m] += len(bucket)
        return counts

    def example_experts(self) -> torch.Tensor:
        """a(i,c) of every example's bucket, [n]."""
        labels = torch.zeros(len(self.data), dtype=torch.long)
        for bucket, m in zip(self.buckets, self.assignment, strict=True):
            labels[bucket] = m
        return labels


@dataclass
class Prototypes:
    """What a client tells after lines 1 to 4: how many buckets, how large, and their signatures."""

    sizes: list[int]
    signatures: torch.Tensor  # [buckets, D] s(i,c); no rows where a method has none
    note: str = ""
    silhouettes: dict[int, float] = field(default_factory=dict)  # of every candidate count
    assignment: list[int] = field(default_factory=list)  # where alignment has nothing to decide


@dataclass
class Update:
    """What a client sends after a round."""

    client: int
    delta_theta: torch.Tensor  # [P]
    counts: torch.Tensor  # [M] n(i,m); zero means: that expert's part is not uploaded
    delta_phi: torch.Tensor | None  # [Q]
    samples: int  # |D_i|
    losses: list[float]
    tokens: int
    kept: torch.Tensor | None = None  # [P] what the client adds to its own parameters and never sends
