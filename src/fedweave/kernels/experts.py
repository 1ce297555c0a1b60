"""The stacked experts of K lanes on one packed batch:  y += scale · B (g ⊙ (A dropout(x))).

x [T, n] holds the lanes' tokens side by side; every lane has its own A [M·r, n] and B [M·r, m], every token its
own gates g [M]. Forward and backward are made of three products over lane segments:

    reduce   [T, n] to [T, M·r]     u = dropout(x) Aᵀ             du = g ⊙ (scale · dy Bᵀ), and the gates' gradient
    expand   [T, M·r] to [T, m]     y += scale · (g ⊙ u) B        dx += dropout(du A)
    outer    sums over a lane       dB = scale · (g ⊙ u)ᵀ dy      dA = duᵀ dropout(x)

Dropout masks are never written to memory: a mask bit is a hash, cheaper to compute than to read.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fedweave.kernels import Context, fused, power_of_two, tl, triton
from fedweave.kernels.frozen import Weight, back
from fedweave.kernels.lanes import Setting, Target
from fedweave.kernels.products import expand, expand_back, outer, reduce, reduce_back
from fedweave.kernels.source import Source

TOGETHER = 3  # targets that share a launch, at most: q, k and v
MOST_ROWS = 64  # beyond, computing u once for all blocks is cheaper
_TOKENS, _COLUMNS = 16, 64  # a tensor core's smallest side is 16


def add_experts(
    y: Tensor,  # [..., columns] with T rows in all; changed in place
    x: Tensor,  # [T, n]
    gates: Tensor | None,  # [T, M] float32; None: one expert with weight 1
    targets: Sequence[Target],
    factors: Sequence[Tensor],  # A [K, M·r, n] and B [K, M·r, width] of every target in turn, parts of one [K, P]
    setting: Setting,
    weight: Weight | None = None,  # [columns, n]
    source: Source | None = None,
) -> Tensor:
    """y with the experts' contribution. With ``weight`` y is x times that frozen weight, computed without gradient:
    the way back through both is one sum. With a ``source`` that is kept, and not x."""
    return _AddExperts.apply(y, x, gates, targets, setting, weight, source or Source.plain(x), *factors)


class _Added(Context, Protocol):
    targets: Sequence[Target]
    setting: Setting
    weight: Weight | None
    gated: bool
    kind: int  # of x's source
    places: list[Tensor | None]  # where the factors' gradients are added up


class _AddExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Added,
        y: Tensor,
        x: Tensor,
        gates: Tensor | None,
        targets: Sequence[Target],
        setting: Setting,
        weight: Weight | None,
        source: Source,
        *factors: Tensor,
    ) -> Tensor:
        reduced, rows = [], y.flatten(0, -2)  # flat only in here: autograd copies where a view is changed in place
        for some, pairs in _parts(targets):
            own = factors[pairs]
            u, gu = reduce(x, own[::2], some, setting, gates)  # [targets, T, M·r]
            expand(rows, gu, own[1::2], some, setting)
            reduced += [u, gu]
        ctx.targets, ctx.setting, ctx.weight, ctx.gated = targets, setting, weight, gates is not None
        ctx.kind = source.kind
        ctx.places = [factor.grad if factor.is_leaf else None for factor in factors]
        ctx.save_for_backward(*source.kept, *([gates] if gates is not None else []), *reduced, *factors)
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx: _Added, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy, setting, weight = grads[0].flatten(0, -2), ctx.setting, ctx.weight
        saved = list(ctx.saved_tensors)
        kept = 2 * len(list(_parts(ctx.targets))) + ctx.gated + 2 * len(ctx.targets)  # besides the source
        source, rest = Source(ctx.kind, tuple(saved[:-kept])), saved[-kept:]
        gates = rest.pop(0) if ctx.gated else None
        factors = rest[-2 * len(ctx.targets) :]
        dx = None
        if ctx.needs_input_grad[1]:
            dx = back(dy, weight) if weight is not None else dy.new_empty(len(dy), source.width)
        dgates: Tensor | None = None
        factor_grads: list[Tensor | None] = []
        for i, (some, pairs) in enumerate(_parts(ctx.targets)):
            own, (u, gu) = factors[pairs], rest[2 * i : 2 * i + 2]
            du, slope = reduce_back(dy, own[1::2], u, some, setting, gates, ctx.needs_input_grad[2])
            dgates = slope if dgates is None or slope is None else dgates + slope
            factor_grads += outer(du, source, gu, dy, own, ctx.places[pairs], some, setting)
            if dx is not None:
                expand_back(dx, du, own[::2], some, setting, add=i > 0 or weight is not None)
        return None if weight is not None else grads[0], dx, dgates, None, None, None, None, *factor_grads


def _parts(targets: Sequence[Target]) -> Iterator[tuple[Sequence[Target], slice]]:
    """Targets that share their launches, and where their factors stand."""
    for first in range(0, len(targets), TOGETHER):
        some = targets[first : first + TOGETHER]
        yield some, slice(2 * first, 2 * (first + len(some)))


# -------------------------------------------------------------------------------------- a few rows
# While decoding there is one lane, no gradient and no dropout, and the number of operations is what costs, not the
# arithmetic: a token passes dozens of layers, and each more operation is a call on a CPU, a launch on a GPU. So
# both products are one Triton kernel: every block of output columns computes the few numbers u = A x for itself,
# which is cheaper than a second launch.


def add_to_rows(
    y: Tensor,  # [T, width], changed in place
    x: Tensor,  # [T, n]
    a: Tensor,  # [M·r, n]
    b: Tensor,  # [M·r, width]
    wide: Tensor | None,  # [T, M·r] the scaled gates, each for its expert's r columns
    scale: float,  # in place of gates where there are none
) -> None:
    """y += (wide ⊙ x Aᵀ) B."""
    if fused(x):
        tokens, width = y.shape
        _rows_kernel[(-(-tokens // _TOKENS), -(-width // _COLUMNS))](
            y, x.contiguous(), a, b, a if wide is None else wide, scale,
            tokens, x.shape[1], len(a), width, y.stride(0),
            GATED=wide is not None, R=max(16, power_of_two(len(a))), TOKENS=_TOKENS, COLUMNS=_COLUMNS,
            DEPTH=min(256, max(16, power_of_two(x.shape[1]))),
        )  # fmt: skip
        return
    u = torch.mm(x, a.t())  # [T, M·r]
    if wide is None:
        y.addmm_(u, b, alpha=scale)
    else:
        y.addmm_(u.mul_(wide), b)


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
