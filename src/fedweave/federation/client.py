"""A client: its data, its buckets and the experts that they are aligned to. It never holds a task label."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from fedweave.federation.compression import Residuals
from fedweave.training.batch import ClientData


@dataclass
class Client:
    """Client i. ``buckets`` come from discovery, ``assignment`` a(i,·) from alignment."""

    index: int
    data: ClientData
    buckets: list[np.ndarray] = field(default_factory=list)
    assignment: list[int] = field(default_factory=list)
    note: str = ""
    residuals: Residuals = field(default_factory=Residuals)  # what rounding took from its updates so far

    @property
    def name(self) -> str:
        return self.data.name

    def __len__(self) -> int:
        return len(self.data)

    def counts(self, experts: int, budget: list[int] | None = None) -> torch.Tensor:
        """n(i,m): how many examples stand behind each expert, [M]; a bucket without steps does not count."""
        counts = torch.zeros(experts)
        for c, (bucket, m) in enumerate(zip(self.buckets, self.assignment, strict=True)):
            if budget is None or budget[c] > 0:
                counts[m] += len(bucket)
        return counts

    def example_experts(self) -> torch.Tensor:
        """a(i,c) of every example's bucket, [n]."""
        labels = torch.zeros(len(self), dtype=torch.long)
        for bucket, m in zip(self.buckets, self.assignment, strict=True):
            labels[bucket] = m
        return labels


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
