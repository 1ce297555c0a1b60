"""The gated unit of an MLP:  m = silu(g) · u,  where the gate g and u lie side by side in one product's output."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fedweave.kernels import Context, fused, tl, triton

_BLOCK = 1024


class _GatedUnit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, both: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(both)
        width = both.shape[1] // 2
        if not fused(both):
            return F.silu(both[:, :width]) * both[:, width:]
        out = both.new_empty(both.shape[0], width)
        grid = (both.shape[0], -(-width // _BLOCK))
        _gated_kernel[grid](both, out, width, BLOCK=_BLOCK)
        return out

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> torch.Tensor:
        (both,) = ctx.saved_tensors
        dm, width = grads[0].contiguous(), both.shape[1] // 2
        if fused(both):
            d = torch.empty_like(both)
            _gated_back_kernel[(both.shape[0], -(-width // _BLOCK))](both, dm, d, width, BLOCK=_BLOCK)
            return d
        gate, up = both[:, :width], both[:, width:]
        squashed = gate.sigmoid()
        slope = squashed * (1 + gate * (1 - squashed))  # silu'(g)
        return torch.cat([dm * up * slope, dm * gate * squashed], 1)


def gated_unit(both: torch.Tensor) -> torch.Tensor:
    """[T, 2·I] to [T, I]."""
    return _GatedUnit.apply(both)


if triton is not None:

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
