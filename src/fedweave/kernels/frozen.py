"""Products with a frozen weight W [m, n]:  x Wᵀ, and on the way back  dy W.

A weight is a tensor, or something that knows both products (:class:`Kept`): it stays quantised
(:class:`Resident`), then each product writes its numbers into scratch memory that all weights of a model take turns
in, uses them and forgets them, and the way back writes them once more; or it is multiplied in 8 bits
(``kernels/fp8.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fedweave.kernels import Context, host
from fedweave.kernels.dequantise import Quantised

# Most numbers of a weight that are written out at once; what is larger, like an output layer, goes by its rows.
AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 27}


class Rounded(NamedTuple):
    """A matrix [T, n] in 8 bits (``kernels/fp8.py``), where whoever computed it wrote it so as well, or only so."""

    numbers: Tensor  # [T, n] e4m3
    scale: Tensor  # [T, 1] float32, what each row was divided by


class Scratch:
    """Memory for one weight's numbers. It keeps its address once it is used, for recorded steps know it by that."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.device, self.dtype = device, dtype
        self._numbers = 0
        self._memory: Tensor | None = None

    def reserve(self, numbers: int) -> None:
        """Whoever will ask for memory says so first."""
        if numbers > self._numbers:
            self._numbers, self._memory = numbers, None

    def take(self, rows: int, columns: int) -> Tensor:
        """[rows, columns], until somebody else takes it."""
        if self._memory is None:
            self._memory = torch.empty(self._numbers, dtype=self.dtype, device=self.device)
        return self._memory[: rows * columns].view(rows, columns)


class Kept(ABC):
    """A frozen weight [m, n] that is no plain tensor."""

    shape: torch.Size
    dtype: torch.dtype

    def __len__(self) -> int:
        return self.shape[0]

    @abstractmethod
    def times(self, x: Tensor, bias: Tensor | None = None, twin: Rounded | None = None) -> Tensor:
        """x Wᵀ + bias; ``twin`` is x in 8 bits, for those who read it."""

    @abstractmethod
    def back(self, dy: Tensor) -> Tensor:
        """dy W."""


class Resident(Kept):
    """A weight [m, n] that stays as it is kept: quantised matrices, or plain ones among them, one below another."""

    def __init__(self, parts: Sequence[Quantised | Tensor], scratch: Scratch):
        self.parts, self.scratch, self.dtype = parts, scratch, scratch.dtype
        self.shape = torch.Size((sum(part.shape[0] for part in parts), parts[0].shape[1]))
        limit = AT_ONCE[scratch.device.type]
        self._whole = self.shape.numel() <= limit
        self._rows = len(self) if self._whole else max(1, limit // self.shape[1])
        scratch.reserve(self._rows * self.shape[1])

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """(rows, their numbers), one block after another in the same scratch memory; all of them where they fit."""
        if self._whole:
            yield slice(0, len(self)), self._write(self.parts)
            return
        start = 0
        for part in self.parts:
            for first in range(0, part.shape[0], self._rows):
                some = slice(first, min(first + self._rows, part.shape[0]))
                taken = part.rows(some) if isinstance(part, Quantised) else part[some]
                yield slice(start + first, start + some.stop), self._write([taken])
            start += part.shape[0]

    def _write(self, parts: Sequence[Quantised | Tensor]) -> Tensor:
        if len(parts) == 1 and isinstance(one := parts[0], Quantised) and one.groups is not None:
            return one.unpacked(self.dtype)  # torch unpacks those into memory of their own
        memory, start = self.scratch.take(sum(part.shape[0] for part in parts), self.shape[1]), 0
        for part in parts:
            place = memory[start : start + part.shape[0]]
            part.write(place) if isinstance(part, Quantised) else place.copy_(part)
            start += part.shape[0]
        return memory

    def times(self, x: Tensor, bias: Tensor | None = None, twin: Rounded | None = None) -> Tensor:
        # not a view of what is computed: experts are added to it in place, and autograd allows no view of ours
        y, rows = x.new_empty(*x.shape[:-1], len(self)), x.flatten(0, -2)
        for some, numbers in self._blocks():
            out = y.flatten(0, -2)[:, some]
            offset = None if bias is None else bias[some]
            if host.suits(rows, numbers):
                host.times(rows, numbers, offset, out)
            elif offset is None:
                torch.mm(rows, numbers.T, out=out)
            else:
                torch.addmm(offset, rows, numbers.T, out=out)
        return y

    def back(self, dy: Tensor) -> Tensor:
        dx, rows = dy.new_empty(*dy.shape[:-1], self.shape[1]), dy.flatten(0, -2)
        for some, numbers in self._blocks():
            out, slope = dx.flatten(0, -2), rows[:, some]
            if host.suits(slope, numbers.T):
                host.times(slope, numbers.T, None, out, add=some.start > 0)
            elif some.start == 0:
                torch.mm(slope, numbers, out=out)
            else:
                out.addmm_(slope, numbers)
        return dx


Weight = Tensor | Kept


def times(x: Tensor, weight: Weight) -> Tensor:
    """x Wᵀ without a gradient: [..., n] to [..., m]."""
    if not isinstance(weight, Tensor):
        return weight.times(x)
    return host.times(x, weight) if host.suits(x, weight) else x @ weight.T


def back(dy: Tensor, weight: Weight) -> Tensor:
    """dy W: [..., m] to [..., n]."""
    if not isinstance(weight, Tensor):
        return weight.back(dy)
    return host.times(dy, weight.T) if host.suits(dy, weight.T) else dy @ weight


def linear(x: Tensor, weight: Weight, bias: Tensor | None, twin: Rounded | None = None) -> Tensor:
    """x Wᵀ + bias, [..., n] to [..., m]."""
    if isinstance(weight, Tensor) and not host.suits(x, weight):
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias, twin)


class _Linked(Context, Protocol):
    weight: Weight


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Linked, x: Tensor, weight: Weight, bias: Tensor | None, twin: Rounded | None) -> Tensor:
        ctx.weight = weight
        return host.times(x, weight, bias) if isinstance(weight, Tensor) else weight.times(x, bias, twin)

    @staticmethod
    def backward(ctx: _Linked, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return back(grads[0], ctx.weight), None, None, None
