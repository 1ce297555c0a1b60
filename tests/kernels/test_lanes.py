"""Sums within sequences, and their way back."""

import torch

from fedweave.kernels.lanes import spread, sum_segments


def test_sums_and_gradients_with_empty_sequences():
    boundaries = torch.tensor([0, 3, 3, 5, 9], dtype=torch.int32)
    sequence = torch.tensor([0, 0, 0, 2, 2, 3, 3, 3, 3])
    tokens = torch.randn(9, 2)
    expected = torch.zeros(4, 2).index_add(0, sequence, tokens)
    torch.testing.assert_close(sum_segments(tokens, boundaries), expected)
    values = torch.randn(4, 2, requires_grad=True)
    (slope,) = torch.autograd.grad((spread(values, sequence, boundaries) * tokens).sum(), values)
    torch.testing.assert_close(slope, expected)
