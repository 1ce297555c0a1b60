"""Weights of 4 to 8 bits, and what they are worth.

A row of a matrix [m, n] is cut into groups of 16 to 64 numbers. A number is a code of a few bits; its group says
what a code is worth:

    value = scale · (code - zero) + minimum        GGUF's formats; a group has a minimum where its format has
    value = scale · table[code]                    NF4

A scale (and a minimum) is one number of a group, or a small integer of the group times a number of many groups.
Codes lie in planes of 8, 4, 2 or 1 bits: of 4 bits a row's byte j holds columns j and j + n/2, of 2 bits columns j,
j + n/4, … So whole runs of columns are unpacked alike, whatever a group is. With a table it holds columns 2j and
2j + 1, and one look at a table of pairs gives both.

On a CPU a group's codes, scale and minimum lie side by side where a format is simple enough for it, as they do in
torch's embeddings of 4 and 8 bits: torch unpacks those in one pass, in a third of the time.

Every product is exact in float32 wherever something is added to it: torch and Triton agree to the last bit, and
with whoever else computes in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fedweave.kernels import fused, tl, triton

# Of formats whose groups may lie side by side: what scale and minimum are, and what unpacks [groups, bytes]
_BESIDE = {4: torch.float16, 8: torch.float32}
GROUP_BYTES = {4: 16 + 2 * 2, 8: 32 + 2 * 4}
_UNPACK = {
    bits: getattr(torch.ops.quantized, name, None)  # torch speaks of moving these elsewhere one day
    for bits, name in ((4, "embedding_bag_4bit_unpack"), (8, "embedding_bag_byte_unpack"))
}

_IN_CACHE = 1 << 21  # numbers that a CPU unpacks at once
_TILE = 4096  # numbers of a Triton block

# The 16 values of NF4: equally likely ones of a normal distribution, scaled to ±1, with an exact zero (QLoRA).
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
    0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def unpacks_groups() -> bool:
    """Whether this torch unpacks groups that lie side by side."""
    return all(_UNPACK.values())


@dataclass(frozen=True)
class Format:
    """What the codes of a quantised matrix mean."""

    name: str
    bits: int
    group: int
    zero: int = 0
    table: tuple[float, ...] | None = None

    @property
    def planes(self) -> tuple[int, ...]:
        """Bits of each plane, the lowest first."""
        return {4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}[self.bits]


@dataclass(frozen=True)
class Quantised:
    """A matrix [m, n] of some format. Rows are independent: any of them are a matrix of the same kind."""

    format: Format
    columns: int  # n
    low: Tensor  # [m, n·4/8 or n] uint8; [m, n/group, 16 or 32] where they lie in ``groups``
    scale: Tensor  # [m, 1 … n/group] float
    high: Tensor | None = None  # [m, n·1/8 or n·2/8] uint8
    steps: Tensor | None = None  # [m, n/group] int8 or uint8: how many times its scale a group's scale is
    minimum: Tensor | None = None  # as ``scale``
    minimum_steps: Tensor | None = None  # as ``steps``
    groups: Tensor | None = None  # [m, n/group, 20 or 40] uint8: all of the above, each group for itself

    @classmethod
    def of(cls, format: Format, codes: Tensor, scale: Tensor, **more: Tensor | None) -> Quantised:
        """From codes [m, n] uint8, one in a byte."""
        first, *rest = format.planes
        pairs = codes.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1) if format.table else codes
        low = _pack(pairs & 15 if first == 4 else codes, first)
        high = _pack(codes >> 4, rest[0]) if rest else None
        return cls(format, codes.shape[1], low, scale, high=high, **more)

    @classmethod
    def of_groups(cls, format: Format, groups: Tensor) -> Quantised:
        """From groups that end with scale and minimum: two float16 behind 4 bits, two float32 behind 8."""
        size = format.group * format.bits // 8
        last = groups[..., size:].view(_BESIDE[format.bits])  # [m, groups, 2]
        columns = groups.shape[1] * format.group
        return cls(format, columns, groups[..., :size], last[..., 0], minimum=last[..., 1], groups=groups)

    def beside(self) -> Quantised:
        """The same numbers in groups, where torch unpacks such a format; else as they are."""
        spec = self.format
        if self.groups is not None or spec.bits not in _BESIDE or spec.table or self.steps is not None:
            return self
        # the format's zero in another way: exact, for a scale of 11 bits
        scale = self.scale.to(_BESIDE[spec.bits])
        minimum = -spec.zero * scale if self.minimum is None else self.minimum.to(scale.dtype)
        if not minimum.isfinite().all():
            return self
        codes = _unpack(self).unflatten(1, (-1, spec.group))  # [m, groups, group]
        if spec.bits == 4:
            codes = codes[..., ::2] | (codes[..., 1::2] << 4)
        last = torch.stack([scale, minimum], -1).view(torch.uint8)  # [m, groups, 4 or 8]
        return Quantised.of_groups(spec, torch.cat([codes, last], -1))

    @staticmethod
    def joined(parts: Sequence[Quantised]) -> Quantised | None:
        """Matrices below one another as one, if all of them lie in groups of one format."""
        groups = [part.groups for part in parts if part.groups is not None and part.format is parts[0].format]
        return Quantised.of_groups(parts[0].format, torch.cat(groups)) if len(groups) == len(parts) else None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.low), self.columns

    @property
    def device(self) -> torch.device:
        return self.low.device

    def arrays(self) -> Iterator[tuple[str, Tensor]]:
        """All that is kept, by name."""
        for field in fields(self):
            if field.name != "groups" and isinstance(array := getattr(self, field.name), Tensor):
                yield field.name, array

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for _, array in self.arrays())

    def rows(self, which: slice | Tensor) -> Quantised:
        """Some rows; of a slice no copy is made."""
        return self._each(lambda array: array[which])

    def to(self, device: torch.device) -> Quantised:
        return self._each(lambda array: array.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Quantised:
        if self.groups is not None:
            return Quantised.of_groups(self.format, change(self.groups))
        changed: dict[str, Any] = {name: change(array) for name, array in self.arrays()}
        return replace(self, **changed)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """All of it as numbers, in memory of their own."""
        if (
            self.groups is not None and self.format.zero
        ):  # a zero has its scale's sign, as whoever subtracts gives it
            whole = self.unpacked(torch.float32).unflatten(1, (-1, self.format.group))  # [m, groups, group]
            return torch.where(whole == 0, 0 * self.scale.float()[:, :, None], whole).flatten(1).to(dtype)
        if self.groups is not None:
            return self.unpacked(dtype)
        return self.write(torch.empty(self.shape, dtype=dtype, device=self.device))

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """Of groups what :meth:`dense` gives, but for signs of zeros; in one pass."""
        assert self.groups is not None
        unpack = _UNPACK[self.format.bits]
        assert unpack is not None
        return unpack(self.groups.flatten(0, 1)).view(self.shape).to(dtype)

    def write(self, out: Tensor) -> Tensor:
        """The numbers, computed in float32, into contiguous ``out`` [m, n]."""
        if self.groups is not None:
            return out.copy_(self.dense(out.dtype))
        if fused(out):
            _launch(self, out)
            return out
        at_once = max(1, _IN_CACHE // self.columns)
        if len(out) <= at_once:
            _write(self, out)
            return out
        for start in range(0, len(out), at_once):
            some = slice(start, start + at_once)
            _write(self.rows(some), out[some])
        return out

    def scales(self, base: Tensor, steps: Tensor | None) -> Tensor:
        """[m, groups, 1] float32."""
        wide = base.float()
        if steps is not None:
            wide = (wide[:, :, None] * steps.unflatten(1, (wide.shape[1], -1))).flatten(1)
        return wide[:, :, None]


def _pack(codes: Tensor, width: int) -> Tensor:
    """Codes of ``width`` bits [m, n] uint8, one in a byte, to a plane [m, n·width/8]."""
    parts = codes.unflatten(1, (8 // width, -1))
    plane = parts[:, 0].clone()
    for k in range(1, 8 // width):
        plane |= parts[:, k] << (k * width)
    return plane


def _unpack(q: Quantised) -> Tensor:
    """Codes [m, n] uint8, one in a byte."""
    if q.format.planes[0] == 8:
        return q.low.clone()
    codes, half = torch.empty(q.shape, dtype=torch.uint8, device=q.device), q.columns // 2
    torch.bitwise_and(q.low, 15, out=codes[:, :half])
    torch.bitwise_right_shift(q.low, 4, out=codes[:, half:])
    if q.high is not None:
        width, count = q.format.planes[1], q.high.shape[1]
        for k in range(8 // width):
            codes[:, k * count : (k + 1) * count] |= ((q.high >> (k * width)) & ((1 << width) - 1)) << 4
    return codes


def _write(q: Quantised, out: Tensor) -> None:
    wide = out if out.dtype == torch.float32 else torch.empty(q.shape, device=out.device)
    if q.format.table is None:
        codes = _unpack(q)
        wide.copy_(codes.sub_(q.format.zero).view(torch.int8) if q.format.zero else codes)  # a byte wraps
    else:
        pairs = _pairs(q.format.table, out.device)
        torch.index_select(pairs, 0, q.low.flatten().int(), out=wide.view(torch.float64).flatten())
    groups = wide.unflatten(1, (-1, q.format.group))  # [m, groups, group]
    groups.mul_(q.scales(q.scale, q.steps))
    if q.minimum is not None:
        groups.add_(q.scales(q.minimum, q.minimum_steps))
    if wide is not out:
        out.copy_(wide)


@cache
def _pairs(table: tuple[float, ...], device: torch.device) -> Tensor:
    """[256] of two float32 each, in one float64: what the low and the high half of a byte stand for."""
    values = torch.tensor(table)
    byte = torch.arange(256)
    return torch.stack([values[byte & 15], values[byte >> 4]], 1).view(torch.float64).flatten().to(device)


@cache
def _values(table: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(table, device=device)


# -------------------------------------------------------------------------------------- CUDA


def _launch(q: Quantised, out: Tensor) -> None:
    spec, columns = q.format, q.columns
    groups = len(out) * (columns // spec.group)
    tile = _TILE // spec.group
    none = q.low  # stands for what there is not
    _kernel[(-(-groups // tile),)](
        out, q.low, none if q.high is None else q.high, q.scale, none if q.steps is None else q.steps,
        none if q.minimum is None else q.minimum, none if q.minimum_steps is None else q.minimum_steps,
        none if spec.table is None else _values(spec.table, out.device), groups,
        N=columns, LOW=spec.planes[0], HIGH=spec.planes[1] if q.high is not None else 0, ZERO=spec.zero,
        GROUP=spec.group, SHARE=columns // spec.group // q.scale.shape[1], STEPS=q.steps is not None,
        MINIMUM=q.minimum is not None, TABLE=spec.table is not None, TILE=tile, num_warps=4,
    )  # fmt: skip


if triton is not None:

    @triton.jit
    def _kernel(
        out, low, high, scale, steps, minimum, minimum_steps, table, groups,
        N: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr,
        SHARE: tl.constexpr, STEPS: tl.constexpr, MINIMUM: tl.constexpr, TABLE: tl.constexpr, TILE: tl.constexpr,
    ):  # fmt: skip
        g = tl.program_id(0) * TILE + tl.arange(0, TILE)  # groups, over all rows; SHARE of them have one scale
        live = g < groups
        row = (g // (N // GROUP)).to(tl.int64)[:, None]
        c = (g % (N // GROUP) * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]  # [TILE, GROUP] columns
        width: tl.constexpr = N * LOW // 8  # bytes of a row
        place = c // 2 if TABLE else c % width
        code = tl.load(low + row * width + place, live[:, None], 0).to(tl.int32)
        if LOW == 4:
            code = (code >> ((c % 2 if TABLE else c // width) * 4)) & 15
        if HIGH > 0:
            upper: tl.constexpr = N * HIGH // 8
            bits = tl.load(high + row * upper + c % upper, live[:, None], 0).to(tl.int32)
            code |= ((bits >> (c // upper * HIGH)) & ((1 << HIGH) - 1)) << 4
        factor = tl.load(scale + g // SHARE, live, 0.0).to(tl.float32)
        if STEPS:
            factor *= tl.load(steps + g, live, 0).to(tl.float32)
        value = tl.load(table + code) if TABLE else (code - ZERO).to(tl.float32)
        value *= factor[:, None]
        if MINIMUM:
            least = tl.load(minimum + g // SHARE, live, 0.0).to(tl.float32)
            if STEPS:
                least *= tl.load(minimum_steps + g, live, 0).to(tl.float32)
            value += least[:, None]
        tl.store(out + row * N + c, value.to(out.dtype.element_ty), live[:, None])
