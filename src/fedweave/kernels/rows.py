"""Experts of a few rows, one token each:  y += (wide ⊙ x Aᵀ) B.

While decoding there is one lane, no gradient and no dropout, and the number of operations is what costs, not the
arithmetic: a token passes dozens of layers, and each more operation is a call on a CPU, a launch on a GPU. So both
products are one Triton kernel where that pays:

    together   few experts in all: every block of output columns computes u = A x of all of them for itself, which
               is cheaper than a second launch;
    picked     many experts, of which each row uses few: a block is one row, and reads those experts alone;
    apart      many experts, and rows that use many: u is computed once.
"""

import torch
from torch import Tensor

from fedweave.kernels import fused, power_of_two, tl, triton

MOST_ROWS = 64  # beyond, kernels/experts.py is cheaper
TOGETHER = 64  # the most columns of u that every block computes for itself
FEW = 8  # experts of a row that are read one after another
_TOKENS, _COLUMNS = 16, 64  # a tensor core's smallest side is 16
_WIDE, _DEPTH = 512, 1024  # a picked block's columns, and how much of its row it reads at once


def few_experts(gates: Tensor) -> bool:
    """Whether no row of [rows, M] uses more experts than are worth reading one after another."""
    return int((gates != 0).sum(-1).max()) <= FEW


def add_to_rows(
    y: Tensor,  # [T, width], changed in place
    x: Tensor,  # [T, n]
    a: Tensor,  # [M·r, n]
    b: Tensor,  # [M·r, width]
    wide: Tensor | None,  # [T, M·r] the scaled gates, each for its expert's r columns
    scale: float,  # in place of gates where there are none
    rank: int,  # r
    few: bool,  # whether every row uses few experts; wide may hold other numbers when a recording is replayed
) -> None:
    """y += (wide ⊙ x Aᵀ) B."""
    tokens, width = y.shape
    if fused(x) and len(a) <= TOGETHER:
        _together_kernel[(-(-tokens // _TOKENS), -(-width // _COLUMNS))](
            y, x.contiguous(), a, b, a if wide is None else wide, scale,
            tokens, x.shape[1], len(a), width, y.stride(0),
            GATED=wide is not None, R=max(16, power_of_two(len(a))), TOKENS=_TOKENS, COLUMNS=_COLUMNS,
            DEPTH=min(256, max(16, power_of_two(x.shape[1]))),
        )  # fmt: skip
    elif fused(x) and wide is not None and few:
        columns = min(_WIDE, power_of_two(width))
        _picked_kernel[(tokens, -(-width // columns))](
            y, x.contiguous(), a, b, wide, x.shape[1], len(a), width, y.stride(0), rank,
            EXPERTS=power_of_two(len(a) // rank), R=power_of_two(rank), COLUMNS=columns,
            DEPTH=min(_DEPTH, power_of_two(x.shape[1])),
        )  # fmt: skip
    else:
        u = torch.mm(x, a.t())  # [T, M·r]
        if wide is None:
            y.addmm_(u, b, alpha=scale)
        else:
            y.addmm_(u.mul_(wide), b)


if triton is not None:

    @triton.jit
    def _together_kernel(
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

    @triton.jit
    def _picked_kernel(
        y, x, a, b, wide, N, MR, WIDTH, y_row, RANK,
        EXPERTS: tl.constexpr, R: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    ):  # fmt: skip
        t = tl.program_id(0).to(tl.int64)
        c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        m, r = tl.arange(0, EXPERTS), tl.arange(0, R)
        gates = tl.load(wide + t * MR + m * RANK, m * RANK < MR, 0.0)  # [M] the row's
        waiting = tl.abs(gates)
        out = tl.zeros([COLUMNS], tl.float32)
        largest = tl.max(waiting, 0)
        while largest > 0:
            expert = tl.argmax(waiting, 0)
            row = expert * RANK + r
            u = tl.zeros([R], tl.float32)
            for first in range(0, N, DEPTH):
                d = first + tl.arange(0, DEPTH)
                own = tl.load(x + t * N + d, d < N, 0.0).to(tl.float32)
                part = tl.load(a + row[:, None] * N + d[None, :], (r < RANK)[:, None] & (d < N)[None, :], 0.0)
                u += tl.sum(part.to(tl.float32) * own[None, :], 1)
            u = u * tl.sum(tl.where(m == expert, gates, 0.0), 0)
            part = tl.load(b + row[:, None] * WIDTH + c[None, :], (r < RANK)[:, None] & (c < WIDTH)[None, :], 0.0)
            out += tl.sum(part.to(tl.float32) * u.to(part.dtype).to(tl.float32)[:, None], 0)
            waiting = tl.where(m == expert, 0.0, waiting)
            largest = tl.max(waiting, 0)
        to = y + t * y_row + c
        tl.store(to, (tl.load(to, c < WIDTH, 0.0).to(tl.float32) + out).to(y.dtype.element_ty), c < WIDTH)
