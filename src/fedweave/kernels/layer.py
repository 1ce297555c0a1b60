"""What lies between the products of a decoder layer, in one pass each.

add_norm      s = x + delta,  h = w · s / rms(s)
gated_unit    m = silu(g) · u, where the gate g and u lie side by side in one product's output
rotate        qkv [T, (H + 2·H_kv)·D]  →  q [T, H, D],  k [T, H_kv, D],  v [T, H_kv, D], by rotary positions
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fedweave.kernels import Context, fused, power_of_two, tl, triton

_COLUMNS = 1024  # of a gated unit's block
_TOKENS = 64  # of a rotation's block


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, delta [T, d] to s, h [T, d]; without a delta s is x."""
    if delta is None and not x.requires_grad:
        return x, _norm(x, weight, eps)
    return _AddNorm.apply(x, delta if delta is not None else torch.zeros_like(x), weight, eps)


def computed_again(h: Tensor, s: Tensor, weight: Tensor, eps: float) -> AbstractContextManager[object]:
    """In here a gradient that will need h keeps nothing: s is kept anyway, and h is soon computed again from it."""
    if not torch.is_grad_enabled():
        return nullcontext()
    place, stream = (h.data_ptr(), h.shape), s.detach()

    def pack(kept: Tensor) -> Tensor | None:
        return None if (kept.data_ptr(), kept.shape) == place else kept

    def unpack(kept: Tensor | None) -> Tensor:
        return _norm(stream, weight, eps) if kept is None else kept

    return saved_tensors_hooks(pack, unpack)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if fused(x):
        return _forward(x.contiguous(), None, weight, eps)[1]
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
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
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ds, dh = grads
        s, weight, inverse = ctx.saved_tensors
        if dh is None:
            return ds, ds, None, None
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
        return dx, dx, None, None


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


def gated_unit(both: Tensor) -> Tensor:
    """[T, 2·I] to [T, I]."""
    return _GatedUnit.apply(both)


class _GatedUnit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        width = both.shape[1] // 2
        if not fused(both):
            return F.silu(both[:, :width]) * both[:, width:]
        out = both.new_empty(both.shape[0], width)
        grid = (both.shape[0], -(-width // _COLUMNS))
        _gated_kernel[grid](both, out, width, BLOCK=_COLUMNS)
        return out

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        dm, width = grads[0].contiguous(), both.shape[1] // 2
        if fused(both):
            d = torch.empty_like(both)
            _gated_back_kernel[(both.shape[0], -(-width // _COLUMNS))](both, dm, d, width, BLOCK=_COLUMNS)
            return d
        gate, up = both[:, :width], both[:, width:]
        squashed = gate.sigmoid()
        slope = squashed * (1 + gate * (1 - squashed))  # silu'(g)
        return torch.cat([dm * up * slope, dm * gate * squashed], 1)


def rotate(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split and rotate; cos and sin [T, D], both halves of D alike."""
    return _Rotate.apply(qkv, cos, sin, heads, kv_heads)


class _Rotate(torch.autograd.Function):
    """A rotation's gradient is the rotation back, so forward and backward are one kernel with the sign of the sine
    changed and the direction of the copy reversed."""

    @staticmethod
    def forward(
        ctx: Context, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        tokens, width = len(qkv), cos.shape[1]
        if fused(qkv):
            parts = tuple(qkv.new_empty(tokens, n, width) for n in (heads, kv_heads, kv_heads))
            _launch(qkv, parts, cos, sin, back=False)
            return parts
        q, k, v = qkv.view(tokens, -1, width).split([heads, kv_heads, kv_heads], 1)
        return _turn(q, cos, sin), _turn(k, cos, sin), v.clone()

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        dq, dk, dv = grads
        if fused(dq):
            parts = tuple(g.contiguous() for g in grads)
            dqkv = dq.new_empty(len(dq), sum(p.shape[1] for p in parts) * cos.shape[1])
            _launch(dqkv, parts, cos, sin, back=True)
        else:
            dqkv = torch.cat([_turn(dq, cos, -sin), _turn(dk, cos, -sin), dv], 1).flatten(1)
        return dqkv, None, None, None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, D]: (a, b) to (a cos - b sin, b cos + a sin)."""
    a, b = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]


def _launch(qkv: Tensor, parts: tuple[Tensor, ...], cos: Tensor, sin: Tensor, back: bool) -> None:
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

    @triton.jit
    def _gated_kernel(both, out, WIDTH, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        live = c < WIDTH
        gate = tl.load(both + row * 2 * WIDTH + c, live, 0.0).to(tl.float32)
        up = tl.load(both + row * 2 * WIDTH + WIDTH + c, live, 0.0)
        tl.store(out + row * WIDTH + c, (gate * tl.sigmoid(gate)).to(up.dtype) * up, live)

    @triton.jit
    def _gated_back_kernel(both, dm, d, WIDTH, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        live = c < WIDTH
        gate = tl.load(both + row * 2 * WIDTH + c, live, 0.0).to(tl.float32)
        up = tl.load(both + row * 2 * WIDTH + WIDTH + c, live, 0.0).to(tl.float32)
        g = tl.load(dm + row * WIDTH + c, live, 0.0).to(tl.float32)
        squashed = tl.sigmoid(gate)
        slope = squashed * (1 + gate * (1 - squashed))
        tl.store(d + row * 2 * WIDTH + c, (g * up * slope).to(d.dtype.element_ty), live)
        tl.store(d + row * 2 * WIDTH + WIDTH + c, (g * gate * squashed).to(d.dtype.element_ty), live)

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
