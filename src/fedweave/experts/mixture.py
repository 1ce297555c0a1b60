"""The soft mixture of stacked experts, attached to a frozen model.

Hooks add  scale · B (g ⊙ (A dropout(x)))  to the output of every adapted layer; the model's own modules
stay untouched. The same code serves three callers:

- lockstep training: x [1, T, in] holds K clients' tokens side by side, each multiplied by its own A and B;
- evaluation: the same with K = 1;
- generation: x [batch, length, in], one state, one gate per row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from fedweave.experts.dropout import DropoutKeys, keyed_dropout
from fedweave.experts.layout import AdapterLayout

_grouped_mm = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


@dataclass
class Segments:
    """Which rows of a packed batch belong to which lane."""

    lengths: list[int]
    ends: torch.Tensor  # [K] int32 on the device


def segment_matmul(x: torch.Tensor, weights: torch.Tensor, segments: Segments | None) -> torch.Tensor:
    """Row t of x [T, n] times its own lane's matrix: weights [K, n, m] to [T, m]."""
    if segments is None or len(segments.lengths) == 1:
        return x @ weights[0]
    aligned = all(size * x.element_size() % 16 == 0 for size in weights.shape[1:])
    if x.is_cuda and x.dtype == torch.bfloat16 and aligned and _grouped_mm is not None:
        return _grouped_mm(x, weights, offs=segments.ends)
    return torch.cat([part @ w for part, w in zip(x.split(segments.lengths), weights, strict=True)])


class Mixture:
    """Experts on a model's layers. Off until :meth:`active` says which weights and gates are in force."""

    def __init__(self, layers: dict[str, torch.nn.Linear], layout: AdapterLayout, alpha: float):
        self.layout = layout
        self.scale = alpha / layout.rank
        self._state: _State | None = None
        self._handles = [
            layer.register_forward_hook(self._hook(index)) for index, layer in enumerate(layers.values())
        ]

    def detach(self) -> None:
        """Take the experts off; the model is exactly as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @contextmanager
    def active(
        self,
        weights: Sequence[dict[str, torch.Tensor]],  # per layer A [K, M·r, in], B [K, M·r, out]
        gates: torch.Tensor | None,  # broadcastable to x: [1, T, M] packed, [batch, 1, M] in generation
        segments: Segments | None = None,
        dropout: DropoutKeys | None = None,
    ) -> Iterator[None]:
        """Run the model with these experts; ``gates=None`` means one expert with weight 1."""
        if self._state is not None:
            raise RuntimeError("the mixture is already in use")
        self._state = _State(weights, gates, segments, dropout)
        try:
            yield
        finally:
            self._state = None

    def _hook(self, index: int) -> Any:
        def add_experts(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor | None:
            return None if self._state is None else output + self._delta(index, args[0], self._state)

        return add_experts

    def _delta(self, index: int, x: torch.Tensor, state: _State) -> torch.Tensor:
        a, b = state.weights[index]["A"], state.weights[index]["B"]
        lead = x.shape[:-1]  # [1, T] or [batch, length]
        rows = x.reshape(-1, x.shape[-1])
        if state.dropout is not None:
            rows = keyed_dropout(rows, state.dropout, index)
        u = segment_matmul(rows, a.transpose(-1, -2), state.segments)  # [rows, M·r]
        if state.gates is not None:
            shaped = u.view(*lead, self.layout.experts, self.layout.rank)
            u = (shaped * state.gates.to(u.dtype)[..., None]).view(len(rows), -1)
        return segment_matmul(u, b, state.segments).view(*lead, -1) * self.scale


@dataclass
class _State:
    weights: Sequence[dict[str, torch.Tensor]]
    gates: torch.Tensor | None
    segments: Segments | None
    dropout: DropoutKeys | None
