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

A shared part (rank R, a multiple of r) lies below the experts, R more rows in A and in B: every prompt uses it,
with the scale of its own rank. In the sum above its rows have the gate r / R, since α/r · r/R = α/R. So for whoever
multiplies it is R/r more experts with a fixed gate; :meth:`AdapterLayout.all_gates` is the one place that says so.

All layers' blocks lie end to end in one vector θ of P numbers. A server state is [P], K clients in lockstep
are [K, P]; averaging, clipping and masking are then one or two operations on a whole vector, and a method
says what it trains or shares by naming columns: expert m's, the shared part's, or the A or B half.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Protocol

import torch

from fedweave.streams import stream_key


class Shaped(Protocol):
    """A linear layer, or just its shape."""

    in_features: int
    out_features: int


@dataclass(frozen=True)
class AdapterLayout:
    """Shapes and offsets of M stacked rank-r experts, and what they share, on a list of linear layers."""

    names: tuple[str, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    rank: int
    experts: int
    shared: int = 0  # R: rank of the part that every prompt uses; 0: there is none

    @staticmethod
    def of(layers: Mapping[str, Shaped], rank: int, experts: int, shared: int = 0) -> AdapterLayout:
        inputs = tuple(layer.in_features for layer in layers.values())
        outputs = tuple(layer.out_features for layer in layers.values())
        return _layout(tuple(layers), inputs, outputs, rank, experts, shared)

    @property
    def rows(self) -> int:
        """M·r + R: rows of a stacked factor."""
        return self.rank * self.experts + self.shared

    @property
    def size(self) -> int:
        """P: the number of adapter parameters."""
        return self.rows * (sum(self.inputs) + sum(self.outputs))

    @property
    def signature_size(self) -> int:
        """d_B of one expert: the B entries that a bucket sends."""
        return self.rank * sum(self.outputs)

    def with_experts(self, experts: int) -> AdapterLayout:
        """So many of these experts, and nothing shared."""
        return replace(self, experts=experts, shared=0)

    def narrow(self, experts: int) -> AdapterLayout:
        """So many of these experts, with what they share."""
        return _layout(self.names, self.inputs, self.outputs, self.rank, experts, self.shared)

    @property
    def shared_part(self) -> AdapterLayout:
        """The shared part alone: one adapter of its rank."""
        return replace(self, rank=self.shared, experts=1, shared=0)

    def blocks(self) -> Iterator[tuple[int, str, int, int]]:
        """(layer index, "A" or "B", offset, width) of every block, in storage order."""
        offset = 0
        for index, (wide_in, wide_out) in enumerate(zip(self.inputs, self.outputs, strict=True)):
            for factor, width in (("A", wide_in), ("B", wide_out)):
                yield index, factor, offset, width
                offset += self.rows * width

    def views(self, theta: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        """Per layer {"A": [..., M·r + R, in], "B": [..., M·r + R, out]}, sharing theta's memory; theta [..., P]."""
        rows = self.rows
        layers: list[dict[str, torch.Tensor]] = [{} for _ in self.names]
        for index, factor, offset, width in self.blocks():
            part = theta[..., offset : offset + rows * width]
            layers[index][factor] = part.unflatten(-1, (rows, width))
        return layers

    # ---------------------------------------------------------------------------------- columns

    @cached_property
    def expert_of_column(self) -> torch.Tensor:
        """[P] the expert that each column belongs to; M: to all of them."""
        owners = torch.arange(self.experts + 1, dtype=torch.int32)
        rows = torch.tensor([self.rank] * self.experts + [self.shared])
        return torch.cat([owners.repeat_interleave(rows * width) for _, _, _, width in self.blocks()])

    @cached_property
    def _owners(self) -> dict[torch.device, torch.Tensor]:
        return {}

    def owner(self, device: torch.device) -> torch.Tensor:
        """:attr:`expert_of_column` on a device, sent there once."""
        if device not in self._owners:
            self._owners[device] = self.expert_of_column.to(device)
        return self._owners[device]

    @cached_property
    def is_b(self) -> torch.Tensor:
        """[P] True on the columns of B factors."""
        return torch.cat([torch.full((self.rows * width,), factor == "B") for _, factor, _, width in self.blocks()])

    # ---------------------------------------------------------------------------------- gates

    def all_gates(self, gates: torch.Tensor) -> torch.Tensor:
        """[..., M] to [..., M + R/r]: a gate for every r rows, the shared part's after the experts'. Gates that say
        so much themselves stay as they are: zeros everywhere are the bare backbone."""
        if gates.shape[-1] == self.experts + self.shared // self.rank:
            return gates
        fixed = gates.new_full((*gates.shape[:-1], self.shared // self.rank), self.rank / self.shared)
        return torch.cat([gates, fixed], -1)

    # ---------------------------------------------------------------------------------- states

    def initial(self, seed: int) -> torch.Tensor:
        """The common initialisation: A Kaiming-uniform with a = √5, B zero. Every expert starts alike,
        because B signatures can be compared only over one and the same A; the shared part has an A of its own."""
        generator = torch.Generator().manual_seed(seed)
        single = self.with_experts(1)
        theta = torch.zeros(single.size)
        for layer in single.views(theta):
            bound = 1 / math.sqrt(layer["A"].shape[-1])
            layer["A"].uniform_(-bound, bound, generator=generator)
        return self.stack([theta] * self.experts, self.initial_shared(seed))

    def initial_shared(self, seed: int) -> torch.Tensor:
        """The shared part's own start; nothing where there is none."""
        return self.shared_part.initial(stream_key("shared", seed)) if self.shared else torch.empty(0)

    def stack(self, singles: Sequence[torch.Tensor], shared: torch.Tensor | None = None) -> torch.Tensor:
        """M one-expert vectors, and the shared part's, to one vector of this layout."""
        parts = [(one, self.rank) for one in singles] + ([(shared, self.shared)] if shared is not None else [])
        offset, blocks = 0, []  # offset: of this block in a vector of rank 1
        for _, _, _, width in self.blocks():
            blocks += [part[offset * rank : (offset + width) * rank] for part, rank in parts]
            offset += width
        return torch.cat(blocks)

    def unstack(self, theta: torch.Tensor) -> list[torch.Tensor]:
        """The experts of :meth:`stack`."""
        owner = self.owner(theta.device)
        return [theta[owner == m] for m in range(self.experts)]

    def b_blocks(self, theta: torch.Tensor) -> list[torch.Tensor]:
        """The B factor of every layer, flattened: what a signature is made of; theta [..., P]."""
        return [layer["B"].flatten(-2) for layer in self.views(theta)]

    def named(self, theta: torch.Tensor, expert: int) -> dict[str, torch.Tensor]:
        """What a prompt of expert ``expert`` gets, as one adapter in PEFT's names and shapes: lora_A [r + R, in],
        lora_B [out, r + R], to be scaled as an expert is, α/r."""
        return self.mixed(theta, torch.eye(self.experts)[expert], range(expert, expert + 1))

    def mixed(
        self, theta: torch.Tensor, gates: torch.Tensor, experts: Sequence[int] | None = None
    ) -> dict[str, torch.Tensor]:
        """The same for a fixed mixture of ``experts`` (all) with gates [M], which go into B."""
        every = torch.arange(self.rows).split(self.rank)  # rows of expert 0, 1, …, then the shared part's
        chosen = [*(range(self.experts) if experts is None else experts), *range(self.experts, len(every))]
        rows = torch.cat([every[m] for m in chosen]).to(theta.device)
        weight = self.all_gates(gates).repeat_interleave(self.rank).to(theta)[rows]  # [rows]
        tensors = {}
        for name, layer in zip(self.names, self.views(theta), strict=True):
            prefix = f"base_model.model.{name}"
            tensors[f"{prefix}.lora_A.weight"] = layer["A"][rows].contiguous()
            tensors[f"{prefix}.lora_B.weight"] = (layer["B"][rows] * weight[:, None]).T.contiguous()
        return tensors


@lru_cache(maxsize=16)
def _layout(
    names: tuple[str, ...], inputs: tuple[int, ...], outputs: tuple[int, ...], rank: int, experts: int, shared: int
) -> AdapterLayout:
    """One object per layout: whoever receives a model shares what was computed of its columns."""
    return AdapterLayout(names, inputs, outputs, rank, experts, shared)
