"""The gated unit  m = act(g) · u  in one pass, where the gate g and u lie side by side in one product's output.

An activation is g σ(a(g)): silu with a = g, and gelu, in the form with tanh, with a = 2 √(2/π) (g + 0.044715 g³).
Where the next product is in 8 bits (``kernels/fp8.py``) m is written so as well, or only so, into a ``twin``.
"""

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fedweave.kernels import Context, fused, power_of_two, tl, triton
from fedweave.kernels.fp8 import EightBit, e4m3_scale, room_for
from fedweave.kernels.frozen import Rounded

_COLUMNS = 1024  # of a block
_GELU, _CUBIC = 2 * math.sqrt(2 / math.pi), 0.044715


def gated_unit(both: Tensor, gelu: bool = False, twin: Rounded | None = None, plain: bool = True) -> Tensor:
    """[T, 2·I] to [T, I]; ``plain``: whether m itself is wanted beside its twin."""
    return _GatedUnit.apply(both, gelu, twin, plain)


@torch.no_grad()
def gated(both: Tensor, gelu: bool = False, twin: Rounded | None = None, plain: bool = True) -> Tensor:
    """The same alone, without a gradient."""
    width = both.shape[1] // 2
    if not fused(both):
        gate, up = both[:, :width], both[:, width:]
        return (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up
    out = both.new_empty(both.shape[0], width)
    if twin is None:
        _gated_kernel[(both.shape[0], -(-width // _COLUMNS))](both, out, width, GELU=gelu, BLOCK=_COLUMNS)
    else:
        _gated_round_kernel[(both.shape[0],)](both, out, *twin, width, GELU=gelu, PLAIN=plain, **_whole(width))
    return out


def _slopes(both: Tensor, dm: Tensor, gelu: bool) -> Tensor:
    """[g u]'s gradient, [T, 2·I]."""
    width = both.shape[1] // 2
    if fused(both):
        d = torch.empty_like(both)
        grid = (both.shape[0], -(-width // _COLUMNS))
        _gated_back_kernel[grid](both, dm.contiguous(), d, width, GELU=gelu, BLOCK=_COLUMNS)
        return d
    gate, up = both[:, :width], both[:, width:]
    inner, steep = (gate, torch.ones_like(gate))
    if gelu:
        inner, steep = _GELU * (gate + _CUBIC * gate**3), _GELU * (1 + 3 * _CUBIC * gate.square())
    squashed = inner.sigmoid()
    slope = squashed + gate * squashed * (1 - squashed) * steep  # act'(g)
    return torch.cat([dm * up * slope, dm * gate * squashed], 1)


def _rounded_slopes(both: Tensor, dm: Tensor, gelu: bool) -> Rounded:
    """The same in 8 bits alone, by a kernel."""
    twin, width = room_for(both.shape, both.device), both.shape[1] // 2
    _gated_round_back_kernel[(len(both),)](both, dm.contiguous(), *twin, width, GELU=gelu, **_whole(width))
    return twin


def _whole(width: int) -> dict[str, int]:
    """A block that holds a row."""
    block = power_of_two(width)
    return {"BLOCK": block, "num_warps": min(16, max(4, block // 512))}


class _Gated(Context, Protocol):
    gelu: bool


class _GatedUnit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Gated, both: Tensor, gelu: bool, twin: Rounded | None, plain: bool) -> Tensor:
        ctx.gelu = gelu
        ctx.save_for_backward(both)
        return gated(both, gelu, twin, plain)

    @staticmethod
    def backward(ctx: _Gated, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (both,) = ctx.saved_tensors
        return _slopes(both, grads[0], ctx.gelu), None, None, None


def gated_product(
    x: Tensor,  # [T, d]
    weight: EightBit,  # [2·I, d]
    bias: Tensor | None,
    gelu: bool,
    read: Rounded | None,  # x, where it is written so
    twin: Rounded | None,  # where m goes
    plain: bool,
) -> tuple[Tensor, Tensor]:
    """[g u] = x Wᵀ + bias without a gradient of its own [T, 2·I], and m [T, I]: what lies between passes in 8 bits
    alone on the way back."""
    with torch.no_grad():
        both = weight.times(x, bias, read)
    return both, _GatedProduct.apply(x, both, weight, gelu, twin, plain)


class _Produced(Context, Protocol):
    gelu: bool
    weight: EightBit


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Produced, x: Tensor, both: Tensor, weight: EightBit, gelu: bool, twin: Rounded | None, plain: bool
    ) -> Tensor:
        ctx.gelu, ctx.weight = gelu, weight
        ctx.save_for_backward(both)
        return gated(both, gelu, twin, plain)

    @staticmethod
    def backward(ctx: _Produced, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (both,) = ctx.saved_tensors
        if ctx.weight.goes_back and fused(both):
            dx = ctx.weight.back_rounded(_rounded_slopes(both, grads[0], ctx.gelu))
        else:
            dx = ctx.weight.back(_slopes(both, grads[0], ctx.gelu))
        return dx, None, None, None, None, None


if triton is not None:

    @triton.jit
    def squashed_gate(gate, GELU: tl.constexpr):
        """σ(a(g)) and a'(g)."""
        if GELU:
            inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
            return tl.sigmoid(inner), 1.5957691216057308 * (1 + 0.134145 * gate * gate)
        else:
            return tl.sigmoid(gate), tl.full(gate.shape, 1.0, tl.float32)

    @triton.jit
    def _unit(both, row, c, live, WIDTH, GELU: tl.constexpr):
        """act(g) · u of a part of a row."""
        gate = tl.load(both + row * 2 * WIDTH + c, live, 0.0).to(tl.float32)
        up = tl.load(both + row * 2 * WIDTH + WIDTH + c, live, 0.0)
        squashed, _ = squashed_gate(gate, GELU)
        return (gate * squashed).to(up.dtype) * up

    @triton.jit
    def _unit_slopes(both, dm, row, c, live, WIDTH, GELU: tl.constexpr):
        """The gradients of g and u in a part of a row."""
        gate = tl.load(both + row * 2 * WIDTH + c, live, 0.0).to(tl.float32)
        up = tl.load(both + row * 2 * WIDTH + WIDTH + c, live, 0.0).to(tl.float32)
        g = tl.load(dm + row * WIDTH + c, live, 0.0).to(tl.float32)
        squashed, steep = squashed_gate(gate, GELU)
        slope = squashed + gate * squashed * (1 - squashed) * steep
        return (g * up * slope).to(both.dtype.element_ty), (g * gate * squashed).to(both.dtype.element_ty)

    @triton.jit
    def _gated_kernel(both, out, WIDTH, GELU: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + row * WIDTH + c, _unit(both, row, c, c < WIDTH, WIDTH, GELU), c < WIDTH)

    @triton.jit
    def _gated_back_kernel(both, dm, d, WIDTH, GELU: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        dgate, dup = _unit_slopes(both, dm, row, c, c < WIDTH, WIDTH, GELU)
        tl.store(d + row * 2 * WIDTH + c, dgate, c < WIDTH)
        tl.store(d + row * 2 * WIDTH + WIDTH + c, dup, c < WIDTH)

    @triton.jit
    def _gated_round_kernel(
        both, out, eight, scales, WIDTH, GELU: tl.constexpr, PLAIN: tl.constexpr, BLOCK: tl.constexpr
    ):
        row, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
        live = c < WIDTH
        m = _unit(both, row, c, live, WIDTH, GELU)
        if PLAIN:
            tl.store(out + row * WIDTH + c, m, live)
        wide = m.to(tl.float32)
        scale = e4m3_scale(tl.max(tl.abs(wide), 0))
        tl.store(eight + row * WIDTH + c, (wide / scale).to(tl.float8e4nv), live)
        tl.store(scales + row, scale)

    @triton.jit
    def _gated_round_back_kernel(both, dm, eight, scales, WIDTH, GELU: tl.constexpr, BLOCK: tl.constexpr):
        row, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
        live = c < WIDTH
        dgate, dup = _unit_slopes(both, dm, row, c, live, WIDTH, GELU)
        left, right = dgate.to(tl.float32), dup.to(tl.float32)
        scale = e4m3_scale(tl.maximum(tl.max(tl.abs(left), 0), tl.max(tl.abs(right), 0)))
        tl.store(eight + row * 2 * WIDTH + c, (left / scale).to(tl.float8e4nv), live)
        tl.store(eight + row * 2 * WIDTH + WIDTH + c, (right / scale).to(tl.float8e4nv), live)
        tl.store(scales + row, scale)

else:  # for those who import it
    squashed_gate = None
