"""The blockwise loss equals torch's cross-entropy, value and gradient."""

import pytest
import torch
import torch.nn.functional as F

from fedweave.kernels import entropy
from fedweave.kernels.entropy import token_nll


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("block", [1 << 28, 50 * 7])  # one block; seven rows at a time
def test_value_and_gradient(monkeypatch, softcap, block):
    monkeypatch.setattr(entropy, "BLOCK_ELEMENTS", {"cpu": block})
    torch.manual_seed(0)
    hidden, head = torch.randn(23, 12, requires_grad=True), torch.randn(50, 12)
    targets, upstream = torch.randint(0, 50, (23,)), torch.rand(23)
    nll = token_nll(hidden, head, targets, softcap)
    (nll * upstream).sum().backward()
    mine, hidden.grad = hidden.grad.clone(), None
    logits = hidden @ head.T
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    expected = F.cross_entropy(logits, targets, reduction="none")
    (expected * upstream).sum().backward()
    torch.testing.assert_close(nll, expected)
    torch.testing.assert_close(mine, hidden.grad)
