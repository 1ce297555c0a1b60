"""Products with a frozen weight in 8-bit floating point (e4m3: three bits of mantissa, numbers up to 448).

    x Wᵀ ≈ s_x s_Wᵀ ⊙ (x₈ W₈ᵀ)        dy W ≈ s_dy s_Wᵀ ⊙ (dy₈ W₈)

Hopper's tensor cores do twice as many of these as in bfloat16. A weight is rounded once, with one scale for every
row; for the way back, where its columns are the rows, it is rounded a second time. Inputs get a scale for every
token as they come, so that no token's numbers change another's. Sums are float32, and what comes out is bfloat16.

Rounding in a pass of its own costs a narrow model what it gains. So kernels that hold whole rows (norms, the gated
unit, and their ways back) write the rounded twin of what they compute themselves, and nothing else where nobody
reads anything else; what attention writes, head by head, is rounded here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedweave.kernels import fused, power_of_two, tl, triton
from fedweave.kernels.frozen import Kept, Rounded, back

LARGEST = 448.0  # of e4m3
WITHIN = True  # whether other kernels write twins; off for measurements
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

    def times(self, x: Tensor, bias: Tensor | None = None, twin: Rounded | None = None) -> Tensor:
        # sums of few bits more at twice the rate are good enough on the way there, not for gradients
        y = _product(twin or round_rows(x), self._ahead, fast=True).to(self.dtype)
        return y if bias is None else y.add_(bias)

    def back(self, dy: Tensor) -> Tensor:
        if self._back is None:
            return back(dy, self.weight)
        return self.back_rounded(carried(dy) or round_rows(dy))

    @property
    def goes_back(self) -> bool:
        """Whether gradients are in 8 bits, too."""
        return self._back is not None

    def back_rounded(self, dy: Rounded) -> Tensor:
        assert self._back is not None
        return _product(dy, self._back, fast=False).to(self.dtype)


def _product(x: Rounded, w: Rounded, fast: bool) -> Tensor:
    """[T, n] times W₈ [m, n], whose rows have scales [m, 1], to [T, m]."""
    if x.numbers.is_cuda:
        return torch._scaled_mm(
            x.numbers,
            w.numbers.T,
            scale_a=x.scale,
            scale_b=w.scale.T,
            out_dtype=torch.bfloat16,
            use_fast_accum=fast,
        )
    return (x.numbers.float() @ w.numbers.float().T) * x.scale * w.scale.T


def round_rows(x: Tensor) -> Rounded:
    """x [T, n] in e4m3, row by row."""
    if not fused(x):
        wide = x.float()
        scale = wide.abs().amax(1, keepdim=True).clamp(min=_LEAST) / LARGEST
        return Rounded((wide / scale).to(torch.float8_e4m3fn), scale)
    x = x if x.stride(1) == 1 else x.contiguous()
    twin, width = room_for(x.shape, x.device), power_of_two(x.shape[1])
    rows = max(1, 4096 // width)
    warps = 8 if width <= 8192 else 16
    _round_kernel[(-(-len(x) // rows),)](x, *twin, *x.shape, x.stride(0), ROWS=rows, WIDTH=width, num_warps=warps)
    return twin


def room_for(shape: Sequence[int], device: torch.device) -> Rounded:
    """Where a kernel may write a twin of this shape, [T, n]."""
    numbers = torch.empty(*shape, dtype=torch.float8_e4m3fn, device=device)
    return Rounded(numbers, torch.empty(shape[0], 1, device=device))


# A gradient that is written in full has its twin with it on the way to the product before. Where autograd makes
# another tensor of it the twin is lost, and made again.


def carry(x: Tensor, twin: Rounded) -> None:
    x.rounded = twin  # type: ignore[attr-defined]


def carried(x: Tensor) -> Rounded | None:
    return getattr(x, "rounded", None)


if triton is not None:

    @triton.jit
    def e4m3_scale(most):
        """What a row is divided by whose largest number is ``most``."""
        return tl.maximum(most, 1e-12) / 448.0

    @triton.jit
    def e4m3(wide):
        """[rows, columns] in float32 to e4m3, with the rows' scales [rows]."""
        scale = e4m3_scale(tl.max(tl.abs(wide), 1))
        return (wide / scale[:, None]).to(tl.float8e4nv), scale

    @triton.jit
    def _round_kernel(x, out, scales, T, N, row, ROWS: tl.constexpr, WIDTH: tl.constexpr):
        t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        c = tl.arange(0, WIDTH)
        live = (t < T)[:, None] & (c < N)[None, :]
        wide_t = t.to(tl.int64)[:, None]
        numbers, scale = e4m3(tl.load(x + wide_t * row + c[None, :], live, 0.0).to(tl.float32))
        tl.store(out + wide_t * N + c[None, :], numbers, live)
        tl.store(scales + t, scale, t < T)

else:  # for those who import it
    e4m3 = e4m3_scale = None
