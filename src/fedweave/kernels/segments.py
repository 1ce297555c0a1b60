"""From sequences to their tokens and back, in a fixed order: sums by index add as threads happen to arrive."""

from __future__ import annotations

import torch

from fedweave.kernels import Context


def sum_segments(values: torch.Tensor, boundaries: torch.Tensor) -> torch.Tensor:
    """values [T, …] summed within every sequence, [S, …]; boundaries [S + 1], cumulative lengths."""
    # unsafe: nobody checks the boundaries, which would make the host wait
    return torch.segment_reduce(values, "sum", offsets=boundaries.long(), axis=0, unsafe=True, initial=0)


def spread(values: torch.Tensor, sequence: torch.Tensor, boundaries: torch.Tensor) -> torch.Tensor:
    """values [S, …] of sequences to their tokens, [T, …]; sequence [T] is whose each token is."""
    return _Spread.apply(values, sequence, boundaries)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, values: torch.Tensor, sequence: torch.Tensor, boundaries: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(boundaries)
        return values.index_select(0, sequence)

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return sum_segments(grads[0].contiguous(), ctx.saved_tensors[0]), None, None
