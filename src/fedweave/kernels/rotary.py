"""Rotary positions: the fused product's output to rotated queries and keys, and values.

    qkv [T, (H + 2·H_kv)·D]  →  q [T, H, D],  k [T, H_kv, D],  v [T, H_kv, D]

A rotation's gradient is the rotation back, so forward and backward are one kernel with the sign of the sine
changed and the direction of the copy reversed.
"""

from __future__ import annotations

import torch

from fedweave.kernels import Context, fused, power_of_two, tl, triton

_TOKENS = 64


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, kv_heads: int
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        tokens, width = len(qkv), cos.shape[1]
        if fused(qkv):
            parts = tuple(qkv.new_empty(tokens, n, width) for n in (heads, kv_heads, kv_heads))
            _launch(qkv, parts, cos, sin, back=False)
            return parts
        q, k, v = qkv.view(tokens, -1, width).split([heads, kv_heads, kv_heads], 1)
        return _turn(q, cos, sin), _turn(k, cos, sin), v.clone()

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        dq, dk, dv = grads
        if fused(dq):
            parts = tuple(g.contiguous() for g in grads)
            dqkv = dq.new_empty(len(dq), sum(p.shape[1] for p in parts) * cos.shape[1])
            _launch(dqkv, parts, cos, sin, back=True)
        else:
            dqkv = torch.cat([_turn(dq, cos, -sin), _turn(dk, cos, -sin), dv], 1).flatten(1)
        return dqkv, None, None, None, None


def rotate(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int, kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split and rotate; cos and sin [T, D], both halves of D alike."""
    return _Rotate.apply(qkv, cos, sin, heads, kv_heads)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D]: (a, b) to (a cos - b sin, b cos + a sin)."""
    a, b = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]


def _launch(
    qkv: torch.Tensor, parts: tuple[torch.Tensor, ...], cos: torch.Tensor, sin: torch.Tensor, back: bool
) -> None:
    q, k, v = parts
    tokens, width = len(qkv), cos.shape[1]
    heads, kv_heads = q.shape[1], k.shape[1]
    grid = (-(-tokens // _TOKENS), heads + 2 * kv_heads)
    half = power_of_two(width // 2)
    _rotary_kernel[grid](
        qkv, q, k, v, cos, sin, tokens, heads, kv_heads, width, BACK=back, TOKENS=_TOKENS, HALF=half
    )


if triton is not None:

    @triton.jit
    def _rotary_kernel(
        qkv, q, k, v, cos, sin, T, HEADS, KV, D, BACK: tl.constexpr, TOKENS: tl.constexpr, HALF: tl.constexpr
    ):
        t = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
        head = tl.program_id(1)
        c = tl.arange(0, HALF)
        live = (t < T)[:, None] & (c < D // 2)[None, :]
        joint = qkv + (t * (HEADS + 2 * KV) + head)[:, None] * D + c[None, :]
        if head < HEADS:
            part = q + (t * HEADS + head)[:, None] * D + c[None, :]
        elif head < HEADS + KV:
            part = k + (t * KV + head - HEADS)[:, None] * D + c[None, :]
        else:
            part = v + (t * KV + head - HEADS - KV)[:, None] * D + c[None, :]
        source = part if BACK else joint
        target = joint if BACK else part
        a = tl.load(source, live, 0.0).to(tl.float32)
        b = tl.load(source + D // 2, live, 0.0).to(tl.float32)
        at = t[:, None] * D + c[None, :]
        turned = head < HEADS + KV  # values are only copied
        cosine = tl.where(turned, tl.load(cos + at, live, 0.0).to(tl.float32), 1.0)
        sine = tl.where(turned, tl.load(sin + at, live, 0.0).to(tl.float32), 0.0)
        if BACK:
            sine = -sine
        tl.store(target, (a * cosine - b * sine).to(target.dtype.element_ty), live)
        tl.store(target + D // 2, (b * cosine + a * sine).to(target.dtype.element_ty), live)
