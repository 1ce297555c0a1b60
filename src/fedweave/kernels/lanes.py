"""Which rows of a packed batch are whose, and what all products over them share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from fedweave.kernels import Context, to_device
from fedweave.kernels.dropout import DropoutKeys

TILE = 64  # tokens of one block


@dataclass
class Lanes:
    """Which rows of a packed batch belong to which lane; rows after the last lane's end belong to nobody."""

    lengths: list[int]
    spans: torch.Tensor  # [K, 2] int32, first row and end of every lane
    tiles: torch.Tensor  # [n, 3] int32, first row, end and lane of every block of at most TILE rows

    @classmethod
    def of(cls, lengths: Sequence[int], tokens: int, device: torch.device) -> Lanes:
        """Lanes end to end; as many tiles as any lanes of so many tokens may need, the spare ones empty."""
        ends = np.cumsum(lengths)
        spans = np.stack([ends - lengths, ends], 1)
        tiles = [
            (start, min(start + TILE, end), lane)
            for lane, (first, end) in enumerate(spans.tolist())
            for start in range(first, end, TILE)
        ]
        spare = tokens // TILE + len(lengths) - len(tiles)
        table = np.array(tiles + [(0, 0, 0)] * spare)
        return cls(list(lengths), to_device(spans, device, torch.int32), to_device(table, device, torch.int32))


@dataclass
class Rows:
    """Some rows of a packed batch, lane by lane; those after the last lane's are read for nobody."""

    index: torch.Tensor  # [n] which
    lanes: Lanes  # whose

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """These rows of x [T, …]. Where one stands twice, for nobody, its second gradient is zero: so sums have no
        order."""
        return x.index_select(0, self.index)


@lru_cache(maxsize=32)
def one_lane(tokens: int, device: torch.device) -> Lanes:
    """All rows belong to one lane, as in evaluation and generation."""
    return Lanes.of([tokens], tokens, device)


@dataclass
class Target:
    """One adapted layer's part of a product's output columns."""

    index: int  # its place among the adapted layers: dropout differs between layers
    start: int
    width: int


@dataclass
class Setting:
    """What all products of a step share."""

    lanes: Lanes
    dropout: DropoutKeys | None
    scale: float
    rank: int  # r


# From sequences to their tokens and back, in a fixed order: sums by index add as threads happen to arrive.


def sum_segments(values: torch.Tensor, boundaries: torch.Tensor) -> torch.Tensor:
    """values [T, …] summed within every sequence, [S, …]; boundaries [S + 1], cumulative lengths."""
    # unsafe: nobody checks the boundaries, which would make the host wait
    return torch.segment_reduce(values, "sum", offsets=boundaries.long(), axis=0, unsafe=True, initial=0)


def spread(values: torch.Tensor, sequence: torch.Tensor, boundaries: torch.Tensor) -> torch.Tensor:
    """values [S, …] of sequences to their tokens, [T, …]; sequence [T] is whose each token is."""
    return _Spread.apply(values, sequence, boundaries)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, values: torch.Tensor, sequence: torch.Tensor, boundaries: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(boundaries)
        return values.index_select(0, sequence)

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return sum_segments(grads[0].contiguous(), ctx.saved_tensors[0]), None, None
