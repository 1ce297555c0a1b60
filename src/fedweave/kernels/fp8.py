"""Products with a frozen weight in 8-bit floating point (e4m3: three bits of mantissa, numbers up to 448).

    x Wᵀ ≈ s_x s_Wᵀ ⊙ (x₈ W₈ᵀ)        dy W ≈ s_dy s_Wᵀ ⊙ (dy₈ W₈)

Hopper's tensor cores do twice as many of these as in bfloat16. A weight is rounded once, with one scale for every
row; for the way back, where its columns are the rows, it is rounded a second time. Inputs get a scale for every
token as they come, so that no token's numbers change another's. Sums are float32, and what comes out is bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedweave.kernels import fused, power_of_two, tl, triton
from fedweave.kernels.frozen import Kept, back

LARGEST = 448.0  # of e4m3
SIDE = 16  # a product's inner and outer width are multiples of it
_LEAST = 1e-12  # scale of a row of zeros, times LARGEST


class EightBit(Kept):
    """A weight [m, n] for training; ``weight`` itself stays for everything else."""

    def __init__(self, weight: Tensor, both: bool):
        self.weight, self.shape, self.dtype = weight, weight.shape, weight.dtype
        self._ahead = round_rows(weight)  # [m, n], [m, 1]
        self._back = round_rows(weight.T.contiguous()) if both else None  # [n, m], [n, 1]

    @staticmethod
    def fits(weight: Tensor) -> bool:
        return all(side % SIDE == 0 for side in weight.shape)

    def times(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        # sums of few bits more at twice the rate are good enough on the way there, not for gradients
        y = _product(x, *self._ahead, fast=True).to(self.dtype)
        return y if bias is None else y.add_(bias)

    def back(self, dy: Tensor) -> Tensor:
        if self._back is None:
            return back(dy, self.weight)
        return _product(dy, *self._back, fast=False).to(self.dtype)


def _product(x: Tensor, w: Tensor, scale: Tensor, fast: bool) -> Tensor:
    """[T, n] times W₈ [m, n], whose rows have scales [m, 1], to [T, m]."""
    rounded, own = round_rows(x)
    if x.is_cuda:
        return torch._scaled_mm(
            rounded, w.T, scale_a=own, scale_b=scale.T, out_dtype=torch.bfloat16, use_fast_accum=fast
        )
    return (rounded.float() @ w.float().T) * own * scale.T


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, n] in e4m3, and what each row was divided by, [T, 1] in float32."""
    if not fused(x):
        wide = x.float()
        scale = wide.abs().amax(1, keepdim=True).clamp(min=_LEAST) / LARGEST
        return (wide / scale).to(torch.float8_e4m3fn), scale
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(len(x), 1, device=x.device)
    _round_kernel[(len(x),)](
        x, out, scale, x.shape[1], x.stride(0), _LEAST, LARGEST, WIDTH=power_of_two(x.shape[1])
    )
    return out, scale


if triton is not None:

    @triton.jit
    def _round_kernel(x, out, scales, n, row, least, largest, WIDTH: tl.constexpr):
        t = tl.program_id(0).to(tl.int64)
        c = tl.arange(0, WIDTH)
        wide = tl.load(x + t * row + c, c < n, 0.0).to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(wide), 0), least) / largest
        tl.store(out + t * n + c, (wide / scale).to(tl.float8e4nv), c < n)
        tl.store(scales + t, scale)
