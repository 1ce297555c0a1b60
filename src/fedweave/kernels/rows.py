"""The experts on a few rows, as while decoding: one lane, no gradient, no dropout.

There the number of operations is what costs, not the arithmetic: a token passes dozens of layers, and each more
operation is a call on a CPU, a launch on a GPU. So both products are one Triton kernel: every block of output
columns computes the few numbers u = A x for itself, which is cheaper than a second launch.
"""

import torch

from fedweave.kernels import fused, power_of_two, tl, triton

MOST_ROWS = 64  # beyond, computing u once for all blocks is cheaper


def add_to_rows(
    y: torch.Tensor,  # [T, width], changed in place
    x: torch.Tensor,  # [T, n]
    a: torch.Tensor,  # [M·r, n]
    b: torch.Tensor,  # [M·r, width]
    wide: torch.Tensor | None,  # [T, M·r] the scaled gates, each for its expert's r columns
    scale: float,  # in place of gates where there are none
) -> None:
    """y += (wide ⊙ x Aᵀ) B."""
    if fused(x):
        _launch(y, x, a, b, wide, scale)
        return
    u = torch.mm(x, a.t())  # [T, M·r]
    if wide is None:
        y.addmm_(u, b, alpha=scale)
    else:
        y.addmm_(u.mul_(wide), b)


_TOKENS, _COLUMNS = 16, 64  # a tensor core's smallest side is 16


def _launch(
    y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, wide: torch.Tensor | None, scale: float
) -> None:
    tokens, width = y.shape
    _rows_kernel[(-(-tokens // _TOKENS), -(-width // _COLUMNS))](
        y, x.contiguous(), a, b, a if wide is None else wide, scale,
        tokens, x.shape[1], len(a), width, y.stride(0),
        GATED=wide is not None, R=max(16, power_of_two(len(a))), TOKENS=_TOKENS, COLUMNS=_COLUMNS,
        DEPTH=min(256, max(16, power_of_two(x.shape[1]))),
    )  # fmt: skip


if triton is not None:

    @triton.jit
    def _rows_kernel(
        y, x, a, b, wide, scale, T, N, MR, WIDTH, y_row,
        GATED: tl.constexpr, R: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    ):  # fmt: skip
        t = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
        c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        r = tl.arange(0, R)
        live, used = t < T, r < MR
        u = tl.zeros([TOKENS, R], tl.float32)
        for first in range(0, N, DEPTH):
            d = first + tl.arange(0, DEPTH)
            rows = tl.load(x + t[:, None] * N + d[None, :], live[:, None] & (d < N)[None, :], 0.0)
            part = tl.load(a + r[None, :] * N + d[:, None], used[None, :] & (d < N)[:, None], 0.0)  # [DEPTH, R]
            u = tl.dot(rows, part, u, input_precision="ieee")
        if GATED:
            u = u * tl.load(wide + t[:, None] * MR + r[None, :], live[:, None] & used[None, :], 0.0)
        else:
            u = u * scale
        part = tl.load(b + r[:, None] * WIDTH + c[None, :], used[:, None] & (c < WIDTH)[None, :], 0.0)
        out = tl.dot(u.to(part.dtype), part, input_precision="ieee")
        to = y + t[:, None] * y_row + c[None, :]
        inside = live[:, None] & (c < WIDTH)[None, :]
        tl.store(to, (tl.load(to, inside, 0.0).to(tl.float32) + out).to(y.dtype.element_ty), inside)
