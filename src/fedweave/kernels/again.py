"""A part of a network that keeps its inputs alone and runs again on the way back (activation checkpointing).

Nothing in a step draws from a random state, dropout masks are hashes, and every kernel adds in a fixed order: the
second run computes what the first one did, to the last bit.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from fedweave.kernels import Context
from fedweave.kernels.frozen import Weight, back


def run_again(run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """``run(*inputs)``, of which only the inputs are kept. Gradients of leaves that ``run`` uses beside them are
    added up where they lie, as in any backward pass. The second run is the one with gradients enabled."""
    anchor = inputs[0].new_empty(0).requires_grad_()  # the leaves are no inputs: without it autograd sees no need
    return _Again.apply(run, anchor, *inputs)


class _Run(Context, Protocol):
    run: Callable[..., Tensor]


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Run, run: Callable[..., Tensor], anchor: Tensor, *inputs: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(*inputs)
        return run(*inputs)

    @staticmethod
    def backward(ctx: _Run, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        inputs = [x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            out = ctx.run(*inputs)
        torch.autograd.backward(out, grads[0])
        return None, None, *(x.grad for x in inputs)


def unread_product(x: Tensor, weight: Weight) -> Tensor:
    """x Wᵀ for a frozen W [m, n], of which only the way back is wanted: the values are whatever lies in memory."""
    return _Unread.apply(x, weight)


class _Frozen(Context, Protocol):
    weight: Weight


class _Unread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Frozen, x: Tensor, weight: Weight) -> Tensor:
        ctx.weight = weight
        return x.new_empty(len(x), len(weight))

    @staticmethod
    def backward(ctx: _Frozen, *grads: Tensor) -> tuple[Tensor, None]:
        return back(grads[0], ctx.weight), None
