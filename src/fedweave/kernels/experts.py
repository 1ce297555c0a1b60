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

from fedweave.kernels import Context
from fedweave.kernels.frozen import Weight, back
from fedweave.kernels.lanes import Setting, Target
from fedweave.kernels.products import expand, expand_back, outer, reduce, reduce_back
from fedweave.kernels.source import Source

TOGETHER = 3  # targets that share a launch, at most: q, k and v


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
