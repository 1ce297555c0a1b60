"""The stacked experts of K lanes on one packed batch:  y += scale · B (g ⊙ (A dropout(x))).

x [T, n] holds the lanes' tokens side by side; every lane has its own A [M·r, n] and B [M·r, m], every token its
own gates g [M]. Forward and backward are made of three products over lane segments:

    reduce   [T, n] to [T, M·r]     u = dropout(x) Aᵀ             du = g ⊙ (scale · dy Bᵀ), and the gates' gradient
    expand   [T, M·r] to [T, m]     y += scale · (g ⊙ u) B        dx += dropout(du A)
    outer    sums over a lane       dB = scale · (g ⊙ u)ᵀ dy      dA = duᵀ dropout(x)

Dropout masks are never written to memory: a mask bit is a hash, cheaper to compute than to read.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from fedweave.kernels import Context
from fedweave.kernels.lanes import Setting, Target
from fedweave.kernels.products import expand, outer, reduce, reduce_back


def add_experts(
    y: torch.Tensor,  # [..., columns] with T rows in all; changed in place
    x: torch.Tensor,  # [T, n]
    gates: torch.Tensor | None,  # [T, M] float32; None: one expert with weight 1
    targets: Sequence[Target],
    factors: Sequence[torch.Tensor],  # A [K, M·r, n] and B [K, M·r, width] of every target in turn
    setting: Setting,
    weight: torch.Tensor | None = None,  # [columns, n]
) -> torch.Tensor:
    """y with the experts' contribution. With ``weight`` y is x times that frozen weight, computed without gradient:
    the way back through both is one sum."""
    return _AddExperts.apply(y, x, gates, targets, setting, weight, *factors)


class _Added(Context, Protocol):
    targets: Sequence[Target]
    setting: Setting
    weight: torch.Tensor | None
    gated: bool
    places: list[torch.Tensor | None]  # where the factors' gradients are added up


class _AddExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Added,
        y: torch.Tensor,
        x: torch.Tensor,
        gates: torch.Tensor | None,
        targets: Sequence[Target],
        setting: Setting,
        weight: torch.Tensor | None,
        *factors: torch.Tensor,
    ) -> torch.Tensor:
        reduced, rows = [], y.flatten(0, -2)  # flat only in here: autograd copies where a view is changed in place
        for target, a, b in zip(targets, factors[::2], factors[1::2], strict=True):
            u, gu = reduce(x, a, setting, target.index, gates)  # [T, M·r]
            expand(rows[:, target.start : target.start + target.width], gu, b, setting, setting.scale)
            reduced += [u, gu]
        ctx.targets, ctx.setting, ctx.weight, ctx.gated = targets, setting, weight, gates is not None
        ctx.places = [factor.grad if factor.is_leaf else None for factor in factors]
        ctx.save_for_backward(x, *([gates] if gates is not None else []), *reduced, *factors)
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx: _Added, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dy, setting, weight, count = grads[0].flatten(0, -2), ctx.setting, ctx.weight, len(ctx.targets)
        x, *rest = ctx.saved_tensors
        gates = rest.pop(0) if ctx.gated else None
        reduced, factors = rest[: 2 * count], rest[2 * count :]
        dx = None
        if ctx.needs_input_grad[1]:
            dx = dy @ weight if weight is not None else torch.empty_like(x)
        dgates = torch.zeros_like(gates) if gates is not None else None
        factor_grads: list[torch.Tensor | None] = []
        for i, target in enumerate(ctx.targets):
            pair = slice(2 * i, 2 * i + 2)
            (a, b), (u, gu) = factors[pair], reduced[pair]
            part = dy[:, target.start : target.start + target.width]
            du = reduce_back(part, b, u, setting, gates, dgates)
            factor_grads += outer(du, x, gu, part, (a, b), ctx.places[pair], setting, target.index)
            if dx is not None:
                expand(dx, du, a, setting, 1.0, drop=target.index, add=i > 0 or weight is not None)
        return None if weight is not None else grads[0], dx, dgates, None, None, None, *factor_grads
