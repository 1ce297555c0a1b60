"""Where every adapter parameter lives in one flat vector.

M experts of rank r on a linear layer W [out, in] are two stacked matrices, whatever M is:

          in                     M·r                          y = W x + scale · Σ_m g_m B_m A_m x
        ┌─────┐  expert 0 │      ┌────┬────┬────┐                = W x + scale · B (g ⊙ (A x))
        │ A_0 │  r rows          │ B_0│ B_1│ B_2│ out
    A = ├─────┤              B = │    │    │    │            g repeats each gate r times
        │ A_1 │                  └────┴────┴────┘
        ├─────┤                  stored transposed, so that an expert is r rows in both
        │ A_2 │
        └─────┘

All layers' blocks lie end to end in one vector θ of P numbers. A server state is [P], K clients in lockstep
are [K, P]; averaging, clipping and masking are then one or two operations on a whole vector, and a method
says what it trains or shares by naming columns: expert m's, or the A or B half.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Protocol

import torch


class Shaped(Protocol):
    """A linear layer, or just its shape."""

    in_features: int
    out_features: int


@dataclass(frozen=True)
class AdapterLayout:
    """Shapes and offsets of M stacked rank-r experts on a list of linear layers."""

    names: tuple[str, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    rank: int
    experts: int

    @staticmethod
    def of(layers: Mapping[str, Shaped], rank: int, experts: int) -> AdapterLayout:
        inputs = tuple(layer.in_features for layer in layers.values())
        outputs = tuple(layer.out_features for layer in layers.values())
        return _layout(tuple(layers), inputs, outputs, rank, experts)

    @property
    def size(self) -> int:
        """P: the number of adapter parameters."""
        return self.rank * self.experts * (sum(self.inputs) + sum(self.outputs))

    @property
    def signature_size(self) -> int:
        """d_B of one expert: the B entries that a bucket sends."""
        return self.rank * sum(self.outputs)

    def with_experts(self, experts: int) -> AdapterLayout:
        return replace(self, experts=experts)

    def blocks(self) -> Iterator[tuple[int, str, int, int]]:
        """(layer index, "A" or "B", offset, width) of every block, in storage order."""
        offset = 0
        for index, (wide_in, wide_out) in enumerate(zip(self.inputs, self.outputs, strict=True)):
            for factor, width in (("A", wide_in), ("B", wide_out)):
                yield index, factor, offset, width
                offset += self.rank * self.experts * width

    def views(self, theta: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        """Per layer {"A": [..., M·r, in], "B": [..., M·r, out]}, sharing theta's memory; theta [..., P]."""
        rows = self.rank * self.experts
        layers: list[dict[str, torch.Tensor]] = [{} for _ in self.names]
        for index, factor, offset, width in self.blocks():
            part = theta[..., offset : offset + rows * width]
            layers[index][factor] = part.unflatten(-1, (rows, width))
        return layers

    # ---------------------------------------------------------------------------------- columns

    @cached_property
    def expert_of_column(self) -> torch.Tensor:
        """[P] the expert that each column belongs to."""
        parts = [
            torch.arange(self.experts).repeat_interleave(self.rank * width) for _, _, _, width in self.blocks()
        ]
        return torch.cat(parts)

    @cached_property
    def is_b(self) -> torch.Tensor:
        """[P] True on the columns of B factors."""
        rows = self.rank * self.experts
        return torch.cat([torch.full((rows * width,), factor == "B") for _, factor, _, width in self.blocks()])

    # ---------------------------------------------------------------------------------- states

    def initial(self, seed: int) -> torch.Tensor:
        """The common initialisation: A Kaiming-uniform with a = √5, B zero. Every expert starts alike,
        because B signatures can be compared only over one and the same A."""
        generator = torch.Generator().manual_seed(seed)
        single = self.with_experts(1)
        theta = torch.zeros(single.size)
        for layer in single.views(theta):
            bound = 1 / math.sqrt(layer["A"].shape[-1])
            layer["A"].uniform_(-bound, bound, generator=generator)
        return self.stack([theta] * self.experts)

    def stack(self, singles: Sequence[torch.Tensor]) -> torch.Tensor:
        """M one-expert vectors to one vector of this layout."""
        single = self.with_experts(1)
        return torch.cat(
            [
                torch.cat([one[offset : offset + self.rank * width] for one in singles])
                for _, _, offset, width in single.blocks()
            ]
        )

    def unstack(self, theta: torch.Tensor) -> list[torch.Tensor]:
        """The inverse of :meth:`stack`."""
        owner = self.expert_of_column.to(theta.device)
        return [theta[owner == m] for m in range(self.experts)]

    def b_blocks(self, theta: torch.Tensor) -> list[torch.Tensor]:
        """The B factor of every layer, flattened: what a signature is made of; theta [..., P]."""
        return [layer["B"].flatten(-2) for layer in self.views(theta)]

    def named(self, theta: torch.Tensor, expert: int) -> dict[str, torch.Tensor]:
        """Expert ``expert`` in PEFT's names and shapes: lora_A [r, in], lora_B [out, r]."""
        rows = slice(expert * self.rank, (expert + 1) * self.rank)
        tensors = {}
        for name, layer in zip(self.names, self.views(theta), strict=True):
            prefix = f"base_model.model.{name}"
            tensors[f"{prefix}.lora_A.weight"] = layer["A"][rows].contiguous()
            tensors[f"{prefix}.lora_B.weight"] = layer["B"][rows].T.contiguous()
        return tensors


@lru_cache(maxsize=16)
def _layout(
    names: tuple[str, ...], inputs: tuple[int, ...], outputs: tuple[int, ...], rank: int, experts: int
) -> AdapterLayout:
    """One object per layout: whoever receives a model shares what was computed of its columns."""
    return AdapterLayout(names, inputs, outputs, rank, experts)
