"""Residual and norm in one pass:  s = x + delta,  h = w · s / rms(s).

A norm's weight may be float32 where all else is half precision: then the product is rounded once, behind it. Where
the next product is in 8 bits (``kernels/fp8.py``) h is written so as well, or only so, into a ``twin``; on the way
back so is the gradient that the product before reads.
"""

from typing import Protocol

import torch
from torch import Tensor

from fedweave.kernels import Context, fused, power_of_two, tl, triton
from fedweave.kernels.fp8 import carry, e4m3, room_for
from fedweave.kernels.frozen import Rounded


def add_norm(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    twin: Rounded | None = None,
    plain: bool = True,  # whether h itself is wanted beside its twin
    slope: bool = False,  # whether delta's gradient goes into a product in 8 bits
) -> tuple[Tensor, Tensor, Tensor]:
    """x, delta [T, d] to s, h [T, d] and 1 / rms(s) [T]; without a delta s is x."""
    if delta is None and not x.requires_grad:
        with torch.no_grad():
            return _forward(x, None, weight, eps, twin, plain)
    return _AddNorm.apply(x, delta, weight, eps, twin, plain, slope)


class _Normed(Context, Protocol):
    slope: bool


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Normed,
        x: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        eps: float,
        twin: Rounded | None,
        plain: bool,
        slope: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.slope = slope
        s, h, inverse = _forward(x, delta, weight, eps, twin, plain)
        ctx.save_for_backward(s, weight, inverse)
        ctx.mark_non_differentiable(inverse)
        return s, h, inverse

    @staticmethod
    def backward(ctx: _Normed, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ds, dh, _ = grads
        s, weight, inverse = ctx.saved_tensors
        beside = ctx.needs_input_grad[1]
        if dh is None:
            return ds, ds if beside else None, None, None, None, None, None
        if fused(s):
            dh, dx, (grid, options) = dh.contiguous(), torch.empty_like(s), _grid(s)
            residual = dh if ds is None else ds.contiguous()
            twin = room_for(dx.shape, dx.device) if ctx.slope else None
            _norm_back_kernel[grid](
                s, weight, inverse, residual, dh, dx, *(twin or (dx, inverse)), *s.shape,
                RESIDUAL=ds is not None, ROUND=twin is not None, **options,
            )  # fmt: skip
            if twin is not None:
                carry(dx, twin)
        else:
            unit = s.float() * inverse[:, None]
            g = dh.float() * weight.float()
            wide = inverse[:, None] * (g - unit * (g * unit).mean(-1, keepdim=True))
            dx = (wide if ds is None else wide + ds.float()).to(s.dtype)
        return dx, dx if beside else None, None, None, None, None, None


def _grid(x: Tensor) -> tuple[tuple[int], dict[str, int]]:
    width = power_of_two(x.shape[1])
    rows = max(1, 4096 // width)
    return (-(-x.shape[0] // rows),), {"ROWS": rows, "WIDTH": width, "num_warps": 8}


def _forward(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, twin: Rounded | None, plain: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if not fused(x):
        s = x if delta is None else x + delta
        wide = s.float()
        inverse = torch.rsqrt(wide.square().mean(-1) + eps)
        return s, (weight * (wide * inverse[:, None]).to(weight.dtype)).to(s.dtype), inverse
    x = x.contiguous()
    s = x if delta is None else torch.empty_like(x)
    h, inverse = torch.empty_like(x), torch.empty(x.shape[0], device=x.device)
    grid, options = _grid(x)
    other = x if delta is None else delta.contiguous()
    _norm_kernel[grid](
        x, other, weight, s, h, *(twin or (h, inverse)), inverse, *x.shape, eps,
        DELTA=delta is not None, PLAIN=plain or twin is None, ROUND=twin is not None, **options,
    )  # fmt: skip
    return s, h, inverse


if triton is not None:

    @triton.jit
    def _norm_kernel(
        x, delta, weight, s, h, eight, scales, inverse, T, D, eps,
        DELTA: tl.constexpr, PLAIN: tl.constexpr, ROUND: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    ):  # fmt: skip
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
        out = (w[None, :] * unit).to(h.dtype.element_ty)
        if PLAIN:
            tl.store(h + at, out, live)
        if ROUND:
            numbers, own = e4m3(out.to(tl.float32))
            tl.store(eight + at, numbers, live)
            tl.store(scales + t, own, t < T)

    @triton.jit
    def _norm_back_kernel(
        s, weight, inverse, ds, dh, dx, eight, scales, T, D,
        RESIDUAL: tl.constexpr, ROUND: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    ):  # fmt: skip
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
        slope = out.to(dx.dtype.element_ty)
        tl.store(dx + at, slope, live)
        if ROUND:
            numbers, own = e4m3(slope.to(tl.float32))
            tl.store(eight + at, numbers, live)
            tl.store(scales + t, own, t < T)
