"""Per-token cross-entropy without ever holding all logits.

Only answer positions reach the LM head, a block of rows at a time. The head is frozen, so the gradient of a
token's loss with respect to its own hidden state can be taken in the same pass, while the block's logits are
at hand: backward is then one multiplication and nothing is computed twice.
"""

from __future__ import annotations

from typing import Any

import torch

_BLOCK_ELEMENTS = 1 << 28  # logits of one block: 1 GiB in float32


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, softcap: float | None
    ) -> torch.Tensor:
        rows = max(1, _BLOCK_ELEMENTS // head.shape[0])
        need = hidden.requires_grad
        nll = torch.empty(len(hidden), device=hidden.device)  # [n]
        grad = torch.empty_like(hidden) if need else None  # [n, d]
        for start in range(0, len(hidden), rows):
            block = slice(start, start + rows)
            logits = (hidden[block] @ head.T).float()  # [rows, V]
            slope = None
            if softcap is not None:
                squashed = torch.tanh(logits / softcap)
                logits, slope = softcap * squashed, 1 - squashed.square()
            target = targets[block, None]
            log_z = logits.logsumexp(-1, keepdim=True)
            nll[block] = (log_z - logits.gather(1, target))[:, 0]
            if grad is not None:
                probability = logits.sub_(log_z).exp_()  # d nll / d logits = softmax - onehot
                probability.scatter_add_(1, target, probability.new_full(target.shape, -1.0))
                if slope is not None:
                    probability *= slope
                grad[block] = probability.to(head.dtype) @ head
        ctx.save_for_backward(grad)
        return nll

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (grad,) = ctx.saved_tensors
        return grad * grad_outputs[0][:, None].to(grad.dtype), None, None, None


def token_nll(
    hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, softcap: float | None = None
) -> torch.Tensor:
    """Negative log-likelihood of each target: hidden [n, d], head [V, d], targets [n] to [n] in float32."""
    return _LinearCrossEntropy.apply(hidden, head, targets, softcap)
