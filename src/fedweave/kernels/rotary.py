"""Between the product with [Wq Wk Wv] and attention, in one pass: norms of single heads, rotary positions.

    qkv [T, (H + 2·H_kv)·D]  →  q [T, H, D],  k [T, H_kv, D],  v [T, H_kv, D]

Of every head of q and k the first R columns rotate, in pairs (c, c + R/2); R is D where a model does not say
otherwise. Where a model has norms of heads, each is first divided by its root mean square.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedweave.kernels import Context, fused, power_of_two, tl, triton

_NUMBERS = 64 * 64  # of a block, in either half of a head


@dataclass(frozen=True)
class HeadNorms:
    """RMS norms of the heads of q and k."""

    weight: Tensor  # [2, D] q's and k's
    eps: float


def rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, norms: HeadNorms | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Split, normalise and rotate; cos and sin [T, R], both halves of R alike."""
    return _Rotate.apply(qkv, cos, sin, heads, kv_heads, norms)


class _Rotated(Context, Protocol):
    norms: HeadNorms | None


class _Rotate(torch.autograd.Function):
    """A rotation's gradient is the rotation back, so forward and backward are one kernel with the sign of the sine
    changed and the direction of the copy reversed."""

    @staticmethod
    def forward(
        ctx: _Rotated, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, norms: HeadNorms | None
    ) -> tuple[Tensor, ...]:
        ctx.norms = norms
        ctx.save_for_backward(cos, sin, *([qkv] if norms is not None else []))
        tokens, width = len(qkv), qkv.shape[1] // (heads + 2 * kv_heads)
        if fused(qkv):
            parts = tuple(qkv.new_empty(tokens, n, width) for n in (heads, kv_heads, kv_heads))
            _launch(qkv, parts, cos, sin, norms, qkv, back=False)
            return parts
        q, k, v = qkv.view(tokens, -1, width).split([heads, kv_heads, kv_heads], 1)
        if norms is not None:
            q, k = (_normed(x, weight, norms.eps) for x, weight in zip((q, k), norms.weight, strict=True))
        return _turn(q, cos, sin), _turn(k, cos, sin), v.clone()

    @staticmethod
    def backward(ctx: _Rotated, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, *kept = ctx.saved_tensors
        dq, dk, dv = grads
        tokens, heads, width = dq.shape
        norms, kv_heads = ctx.norms, dk.shape[1]
        if fused(dq):
            parts = tuple(g.contiguous() for g in grads)
            dqkv = dq.new_empty(tokens, (heads + 2 * kv_heads) * width)
            _launch(dqkv, parts, cos, sin, norms, kept[0] if kept else dqkv, back=True)
        else:
            dq, dk = _turn(dq, cos, -sin), _turn(dk, cos, -sin)
            if norms is not None:
                q, k, _ = kept[0].view(tokens, -1, width).split([heads, kv_heads, kv_heads], 1)
                dq = _norm_slope(q, dq, norms.weight[0], norms.eps)
                dk = _norm_slope(k, dk, norms.weight[1], norms.eps)
            dqkv = torch.cat([dq, dk, dv], 1).flatten(1)
        return dqkv, None, None, None, None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, D]: of the first R columns (a, b) to (a cos - b sin, b cos + a sin)."""
    turning, rest = x.split([cos.shape[1], x.shape[2] - cos.shape[1]], -1)
    a, b = turning.chunk(2, -1)
    return torch.cat([turning * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None], rest], -1)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, heads, D], weight [D]."""
    wide = x.float()
    unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * unit.to(weight.dtype)).to(x.dtype)


def _norm_slope(x: Tensor, dy: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    unit, g = wide * inverse, dy.float() * weight.float()
    return (inverse * (g - unit * (g * unit).mean(-1, keepdim=True))).to(x.dtype)


def _launch(
    qkv: Tensor,
    parts: tuple[Tensor, ...],
    cos: Tensor,
    sin: Tensor,
    norms: HeadNorms | None,
    before: Tensor,  # as qkv, before norms and rotation
    back: bool,
) -> None:
    q, k, v = parts
    tokens, heads, width = q.shape
    kv_heads, half = k.shape[1], power_of_two(width // 2)
    block = max(16, min(64, _NUMBERS // half // (1 if norms is None else 2)))  # norms hold twice as much
    _rotary_kernel[(-(-tokens // block), heads + 2 * kv_heads)](
        qkv, q, k, v, cos, sin, before, cos if norms is None else norms.weight,
        tokens, heads, kv_heads, width, cos.shape[1], 0.0 if norms is None else norms.eps,
        BACK=back, NORMED=norms is not None, TOKENS=block, HALF=half,
    )  # fmt: skip


if triton is not None:

    @triton.jit
    def _rotary_kernel(
        qkv, q, k, v, cos, sin, before, weight, T, HEADS, KV, D, R, eps,
        BACK: tl.constexpr, NORMED: tl.constexpr, TOKENS: tl.constexpr, HALF: tl.constexpr,
    ):  # fmt: skip
        t = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
        head = tl.program_id(1)
        c = tl.arange(0, HALF)
        turns = c < R // 2  # pairs of the columns that rotate; the others are copied in pairs, too
        left = tl.where(turns, c, c + R // 2)
        right = tl.where(turns, c + R // 2, c + D // 2)
        live = (t < T)[:, None] & (c < D // 2)[None, :]
        row = (t * (HEADS + 2 * KV) + head)[:, None] * D
        joint = qkv + row
        if head < HEADS:
            part = q + (t * HEADS + head)[:, None] * D
        elif head < HEADS + KV:
            part = k + (t * KV + head - HEADS)[:, None] * D
        else:
            part = v + (t * KV + head - HEADS - KV)[:, None] * D
        source = part if BACK else joint
        target = joint if BACK else part
        a = tl.load(source + left[None, :], live, 0.0).to(tl.float32)
        b = tl.load(source + right[None, :], live, 0.0).to(tl.float32)
        changed = head < HEADS + KV  # values are only copied
        if NORMED:
            own = weight + tl.where(head < HEADS, 0, D)
            left_weight = tl.load(own + left, c < D // 2, 0.0)[None, :]
            right_weight = tl.load(own + right, c < D // 2, 0.0)[None, :]
            x = tl.load(before + row + left[None, :], live, 0.0).to(tl.float32)
            z = tl.load(before + row + right[None, :], live, 0.0).to(tl.float32)
            scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(z * z, 1)) / D + eps)[:, None]
            x, z = x * scale, z * scale
            if not BACK:
                u = (x.to(weight.dtype.element_ty) * left_weight).to(target.dtype.element_ty)
                w = (z.to(weight.dtype.element_ty) * right_weight).to(target.dtype.element_ty)
                a = tl.where(changed, u.to(tl.float32), a)
                b = tl.where(changed, w.to(tl.float32), b)
        at = t[:, None] * R + c[None, :]
        near = live & turns[None, :]
        cosine = tl.where(changed, tl.load(cos + at, near, 1.0).to(tl.float32), 1.0)
        sine = tl.where(changed, tl.load(sin + at, near, 0.0).to(tl.float32), 0.0)
        if BACK:
            sine = -sine
        first = a * cosine - b * sine
        second = b * cosine + a * sine
        if NORMED and BACK:
            g, h = first * left_weight.to(tl.float32), second * right_weight.to(tl.float32)
            mean = ((tl.sum(g * x, 1) + tl.sum(h * z, 1)) / D)[:, None]
            first = tl.where(changed, scale * (g - x * mean), first)
            second = tl.where(changed, scale * (h - z * mean), second)
        tl.store(target + left[None, :], first.to(target.dtype.element_ty), live)
        tl.store(target + right[None, :], second.to(target.dtype.element_ty), live)
