"""Per-token cross-entropy without ever holding all logits.

Only answer positions reach the LM head, a block of rows at a time. The head is frozen, so the gradient of a
token's loss with respect to its own hidden state can be taken in the same pass, while the block's logits are
at hand: backward is then one multiplication and nothing is computed twice.
"""

from __future__ import annotations

import torch

from fedweave.kernels import Context
from fedweave.kernels.entropy import entropy_and_slope

_BLOCK_ELEMENTS = 1 << 28  # logits of one block: 1 GiB in float32


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, softcap: float | None
    ) -> torch.Tensor:
        rows = max(1, _BLOCK_ELEMENTS // head.shape[0])
        nll = torch.empty(len(hidden), device=hidden.device)  # [n]
        grad = torch.empty_like(hidden) if hidden.requires_grad else None  # [n, d]
        for start in range(0, len(hidden), rows):
            block = slice(start, start + rows)
            logits = hidden[block] @ head.T  # [rows, V]
            nll[block], slope = entropy_and_slope(logits, targets[block], softcap, grad is not None)
            if grad is not None and slope is not None:
                grad[block] = slope @ head
        ctx.save_for_backward(grad)
        return nll

    @staticmethod
    def backward(ctx: Context, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (grad,) = ctx.saved_tensors
        return grad * grad_outputs[0][:, None].to(grad.dtype), None, None, None


def token_nll(
    hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, softcap: float | None = None
) -> torch.Tensor:
    """Negative log-likelihood of each target: hidden [n, d], head [V, d], targets [n] to [n] in float32."""
    return _LinearCrossEntropy.apply(hidden, head, targets, softcap)
