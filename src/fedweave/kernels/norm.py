"""Residual addition and RMS norm in one pass:  s = x + delta,  h = w · s / rms(s)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd.graph import saved_tensors_hooks

from fedweave.kernels import Context, fused, power_of_two, tl, triton


def add_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, delta [T, d] to s, h [T, d]; without a delta s is x."""
    if delta is None and not x.requires_grad:
        return x, _norm(x, weight, eps)
    return _AddNorm.apply(x, delta if delta is not None else torch.zeros_like(x), weight, eps)


def computed_again(
    h: torch.Tensor, s: torch.Tensor, weight: torch.Tensor, eps: float
) -> AbstractContextManager[object]:
    """In here a gradient that will need h keeps nothing: s is kept anyway, and h is soon computed again from it."""
    if not torch.is_grad_enabled():
        return nullcontext()
    place, stream = (h.data_ptr(), h.shape), s.detach()

    def pack(kept: torch.Tensor) -> torch.Tensor | None:
        return None if (kept.data_ptr(), kept.shape) == place else kept

    def unpack(kept: torch.Tensor | None) -> torch.Tensor:
        return _norm(stream, weight, eps) if kept is None else kept

    return saved_tensors_hooks(pack, unpack)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if fused(x):
        return _forward(x.contiguous(), None, weight, eps)[1]
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        if fused(x):
            s, h, inverse = _forward(x.contiguous(), delta.contiguous(), weight, eps)
        else:
            s = x + delta
            wide = s.float()
            inverse = torch.rsqrt(wide.square().mean(-1) + eps)  # [T] 1 / rms
            h = weight * (wide * inverse[:, None]).to(s.dtype)
        ctx.save_for_backward(s, weight, inverse)
        return s, h

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ds, dh = grads
        s, weight, inverse = ctx.saved_tensors
        if dh is None:
            return ds, ds, None, None
        if fused(s):
            dx = _backward(s, weight, inverse, ds, dh.contiguous())
        else:
            unit = s.float() * inverse[:, None]
            g = dh.float() * weight.float()
            wide = inverse[:, None] * (g - unit * (g * unit).mean(-1, keepdim=True))
            dx = (wide if ds is None else wide + ds.float()).to(s.dtype)
        return dx, dx, None, None


def _grid(x: torch.Tensor) -> tuple[tuple[int], dict[str, int]]:
    width = power_of_two(x.shape[1])
    rows = max(1, 4096 // width)
    return (-(-x.shape[0] // rows),), {"ROWS": rows, "WIDTH": width, "num_warps": 8}


def _forward(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    s = x if delta is None else torch.empty_like(x)
    h, inverse = torch.empty_like(x), torch.empty(x.shape[0], device=x.device)
    grid, options = _grid(x)
    other = x if delta is None else delta
    _norm_kernel[grid](x, other, weight, s, h, inverse, *x.shape, eps, DELTA=delta is not None, **options)
    return s, h, inverse


def _backward(
    s: torch.Tensor, weight: torch.Tensor, inverse: torch.Tensor, ds: torch.Tensor | None, dh: torch.Tensor
) -> torch.Tensor:
    dx = torch.empty_like(s)
    grid, options = _grid(s)
    residual = dh if ds is None else ds.contiguous()
    _norm_back_kernel[grid](s, weight, inverse, residual, dh, dx, *s.shape, RESIDUAL=ds is not None, **options)
    return dx


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
        unit = (wide * scale[:, None]).to(h.dtype.element_ty)
        tl.store(h + at, w[None, :] * unit, live)

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
