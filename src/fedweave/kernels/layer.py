"""What lies between the products of a decoder layer, in one pass each.

add_norm      s = x + delta,  h = w · s / rms(s)
gated_unit    m = act(g) · u, where the gate g and u lie side by side in one product's output

An activation is g σ(a(g)): silu with a = g, and gelu, in the form with tanh, with a = 2 √(2/π) (g + 0.044715 g³).
A norm's weight may be float32 where all else is half precision: then the product is rounded once, behind it.

and ``kernels/rotary.py``, between the product with [Wq Wk Wv] and attention.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fedweave.kernels import Context, fused, power_of_two, tl, triton

_COLUMNS = 1024  # of a gated unit's block
_GELU, _CUBIC = 2 * math.sqrt(2 / math.pi), 0.044715


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, delta [T, d] to s, h [T, d]; without a delta s is x."""
    if delta is None and not x.requires_grad:
        return x, norm(x, weight, eps)
    return _AddNorm.apply(x, delta, weight, eps)


def computed_again(value: Tensor, compute: Callable[[], Tensor]) -> AbstractContextManager[object]:
    """In here a gradient that will need ``value`` keeps nothing: it is soon computed again, from what is kept
    anyway."""
    if not torch.is_grad_enabled():
        return nullcontext()
    place = (value.data_ptr(), value.shape)

    def pack(kept: Tensor) -> Tensor | None:
        return None if (kept.data_ptr(), kept.shape) == place else kept

    def unpack(kept: Tensor | None) -> Tensor:
        return compute() if kept is None else kept

    return saved_tensors_hooks(pack, unpack)


@torch.no_grad()
def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """w · x / rms(x) alone, without a gradient."""
    if fused(x):
        return _forward(x.contiguous(), None, weight, eps)[1]
    wide = x.float()
    unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * unit.to(weight.dtype)).to(x.dtype)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        if fused(x):
            s, h, inverse = _forward(x.contiguous(), None if delta is None else delta.contiguous(), weight, eps)
        else:
            s = x if delta is None else x + delta
            wide = s.float()
            inverse = torch.rsqrt(wide.square().mean(-1) + eps)  # [T] 1 / rms
            h = (weight * (wide * inverse[:, None]).to(weight.dtype)).to(s.dtype)
        ctx.save_for_backward(s, weight, inverse)
        return s, h

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ds, dh = grads
        s, weight, inverse = ctx.saved_tensors
        if dh is None:
            return ds, ds if ctx.needs_input_grad[1] else None, None, None
        if fused(s):
            dh, dx, (grid, options) = dh.contiguous(), torch.empty_like(s), _grid(s)
            residual = dh if ds is None else ds.contiguous()
            _norm_back_kernel[grid](
                s, weight, inverse, residual, dh, dx, *s.shape, RESIDUAL=ds is not None, **options
            )
        else:
            unit = s.float() * inverse[:, None]
            g = dh.float() * weight.float()
            wide = inverse[:, None] * (g - unit * (g * unit).mean(-1, keepdim=True))
            dx = (wide if ds is None else wide + ds.float()).to(s.dtype)
        return dx, dx if ctx.needs_input_grad[1] else None, None, None


def _grid(x: Tensor) -> tuple[tuple[int], dict[str, int]]:
    width = power_of_two(x.shape[1])
    rows = max(1, 4096 // width)
    return (-(-x.shape[0] // rows),), {"ROWS": rows, "WIDTH": width, "num_warps": 8}


def _forward(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    s = x if delta is None else torch.empty_like(x)
    h, inverse = torch.empty_like(x), torch.empty(x.shape[0], device=x.device)
    grid, options = _grid(x)
    other = x if delta is None else delta
    _norm_kernel[grid](x, other, weight, s, h, inverse, *x.shape, eps, DELTA=delta is not None, **options)
    return s, h, inverse


def gated_unit(both: Tensor, gelu: bool = False) -> Tensor:
    """[T, 2·I] to [T, I]."""
    return _GatedUnit.apply(both, gelu)


@torch.no_grad()
def gated(both: Tensor, gelu: bool = False) -> Tensor:
    """The same alone, without a gradient."""
    width = both.shape[1] // 2
    if not fused(both):
        gate, up = both[:, :width], both[:, width:]
        return (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up
    out = both.new_empty(both.shape[0], width)
    _gated_kernel[(both.shape[0], -(-width // _COLUMNS))](both, out, width, GELU=gelu, BLOCK=_COLUMNS)
    return out


class _Gated(Context, Protocol):
    gelu: bool


class _GatedUnit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Gated, both: Tensor, gelu: bool) -> Tensor:
        ctx.gelu = gelu
        ctx.save_for_backward(both)
        return gated(both, gelu)

    @staticmethod
    def backward(ctx: _Gated, *grads: Tensor) -> tuple[Tensor, None]:
        (both,) = ctx.saved_tensors
        dm, width = grads[0].contiguous(), both.shape[1] // 2
        if fused(both):
            d = torch.empty_like(both)
            grid = (both.shape[0], -(-width // _COLUMNS))
            _gated_back_kernel[grid](both, dm, d, width, GELU=ctx.gelu, BLOCK=_COLUMNS)
            return d, None
        gate, up = both[:, :width], both[:, width:]
        inner, steep = (gate, torch.ones_like(gate))
        if ctx.gelu:
            inner, steep = _GELU * (gate + _CUBIC * gate**3), _GELU * (1 + 3 * _CUBIC * gate.square())
        squashed = inner.sigmoid()
        slope = squashed + gate * squashed * (1 - squashed) * steep  # act'(g)
        return torch.cat([dm * up * slope, dm * gate * squashed], 1), None


if triton is not None:

    @triton.jit
    def _norm_kernel(
        x, delta, weight, s, h, inverse, T, D, eps, DELTA: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
    ):
        t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        c = tl.arange(0, WIDTH)
        live = (t < T)[:, None] & (c < D)[None, :]
        at = t.to(tl.int64)[:, None] * D + c[None, :]
        wide = tl.load(x + at, live, 0.0).to(tl.float32)
        if DELTA:
            total = (wide + tl.load(delta + at, live, 0.0).to(tl.float32)).to(s.dtype.element_ty)
            tl.store(s + at, total, live)
            wide = total.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)
        tl.store(inverse + t, scale, t < T)
        w = tl.load(weight + c, c < D, 0.0)
        unit = (wide * scale[:, None]).to(weight.dtype.element_ty)
        tl.store(h + at, (w[None, :] * unit).to(h.dtype.element_ty), live)

    @triton.jit
    def _norm_back_kernel(
        s, weight, inverse, ds, dh, dx, T, D, RESIDUAL: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
    ):
        t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        c = tl.arange(0, WIDTH)
        live = (t < T)[:, None] & (c < D)[None, :]
        at = t.to(tl.int64)[:, None] * D + c[None, :]
        scale = tl.load(inverse + t, t < T, 0.0)[:, None]
        unit = tl.load(s + at, live, 0.0).to(tl.float32) * scale
        g = tl.load(dh + at, live, 0.0).to(tl.float32) * tl.load(weight + c, c < D, 0.0).to(tl.float32)[None, :]
        out = scale * (g - unit * (tl.sum(g * unit, 1) / D)[:, None])
        if RESIDUAL:
            out += tl.load(ds + at, live, 0.0).to(tl.float32)
        tl.store(dx + at, out.to(dx.dtype.element_ty), live)

    @triton.jit
    def _squashed(gate, GELU: tl.constexpr):
        """σ(a(g)) and a'(g)."""
        if GELU:
            inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
            return tl.sigmoid(inner), 1.5957691216057308 * (1 + 0.134145 * gate * gate)
        else:
            return tl.sigmoid(gate), tl.full(gate.shape, 1.0, tl.float32)

    @triton.jit
    def _gated_kernel(both, out, WIDTH, GELU: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        live = c < WIDTH
        gate = tl.load(both + row * 2 * WIDTH + c, live, 0.0).to(tl.float32)
        up = tl.load(both + row * 2 * WIDTH + WIDTH + c, live, 0.0)
        squashed, _ = _squashed(gate, GELU)
        tl.store(out + row * WIDTH + c, (gate * squashed).to(up.dtype) * up, live)

    @triton.jit
    def _gated_back_kernel(both, dm, d, WIDTH, GELU: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        live = c < WIDTH
        gate = tl.load(both + row * 2 * WIDTH + c, live, 0.0).to(tl.float32)
        up = tl.load(both + row * 2 * WIDTH + WIDTH + c, live, 0.0).to(tl.float32)
        g = tl.load(dm + row * WIDTH + c, live, 0.0).to(tl.float32)
        squashed, steep = _squashed(gate, GELU)
        slope = squashed + gate * squashed * (1 - squashed) * steep
        tl.store(d + row * 2 * WIDTH + c, (g * up * slope).to(d.dtype.element_ty), live)
        tl.store(d + row * 2 * WIDTH + WIDTH + c, (g * gate * squashed).to(d.dtype.element_ty), live)
