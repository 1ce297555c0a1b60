"""Per-token cross-entropy without ever holding all logits.

Only answer positions reach the LM head, a block of rows at a time. The head is frozen, so the gradient of a
token's loss with respect to its own hidden state can be taken in the same pass, while the block's logits are
at hand: backward is then one multiplication and nothing is computed twice.
The logits become their own gradient in place:  z  →  softmax(z) - onehot.
"""

import torch
from torch import Tensor

from fedweave.kernels import Context, fused, tl, triton
from fedweave.kernels.frozen import Weight, back, times

BLOCK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 28}  # logits of one block: 32 MiB and 1 GiB in float32
_BLOCK = 4096


def token_nll(hidden: Tensor, head: Weight, targets: Tensor, softcap: float | None = None) -> Tensor:
    """Negative log-likelihood of each target: hidden [n, d], head [V, d], targets [n] to [n] in float32."""
    return _LinearCrossEntropy.apply(hidden, head, targets, softcap)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, hidden: Tensor, head: Weight, targets: Tensor, softcap: float | None) -> Tensor:
        rows = max(1, BLOCK_ELEMENTS[hidden.device.type] // head.shape[0])
        nll = torch.empty(len(hidden), device=hidden.device)  # [n]
        grad = torch.empty_like(hidden) if hidden.requires_grad else None  # [n, d]
        for start in range(0, len(hidden), rows):
            block = slice(start, start + rows)
            logits = times(hidden[block], head)  # [rows, V]
            nll[block], slope = entropy_and_slope(logits, targets[block], softcap, grad is not None)
            if grad is not None and slope is not None:
                grad[block] = back(slope, head)
        ctx.save_for_backward(grad)
        return nll

    @staticmethod
    def backward(ctx: Context, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = ctx.saved_tensors
        return grad * grad_outputs[0][:, None].to(grad.dtype), None, None, None


def entropy_and_slope(
    logits: Tensor, targets: Tensor, softcap: float | None, slope: bool
) -> tuple[Tensor, Tensor | None]:
    """Losses [n] in float32 of logits [n, V] (before the soft-cap), and d loss / d logits if asked for."""
    if fused(logits):
        nll = torch.empty(len(logits), device=logits.device)
        _entropy_kernel[(len(logits),)](
            logits, targets, nll, logits.shape[1], softcap or 0.0,
            CAP=softcap is not None, SLOPE=slope, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
        return nll, logits if slope else None
    wide = logits.float()
    bend = None
    if softcap is not None:
        squashed = torch.tanh(wide / softcap)
        wide, bend = softcap * squashed, 1 - squashed.square()
    log_z = wide.logsumexp(-1, keepdim=True)
    target = targets[:, None]
    nll = (log_z - wide.gather(1, target))[:, 0]
    if not slope:
        return nll, None
    probability = wide.sub_(log_z).exp_()
    probability.scatter_add_(1, target, probability.new_full(target.shape, -1.0))
    if bend is not None:
        probability *= bend
    return nll, probability.to(logits.dtype)


if triton is not None:

    @triton.jit
    def _capped(z, cap, CAP: tl.constexpr):
        if CAP:
            e = tl.exp(-2.0 * tl.abs(z / cap))  # tanh from an exponential that cannot overflow
            size = (1.0 - e) / (1.0 + e)
            z = cap * tl.where(z < 0, -size, size)
        return z

    @triton.jit
    def _entropy_kernel(logits, targets, nll, V, cap, CAP: tl.constexpr, SLOPE: tl.constexpr, BLOCK: tl.constexpr):
        row = logits + tl.program_id(0).to(tl.int64) * V
        target = tl.load(targets + tl.program_id(0))
        peak = tl.full([BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        hit = tl.zeros([BLOCK], tl.float32)  # the target's logit, read before anything is overwritten
        for start in range(0, V, BLOCK):  # every thread keeps its own running maximum and sum
            c = start + tl.arange(0, BLOCK)
            z = tl.load(row + c, c < V, float("-inf")).to(tl.float32)
            z = tl.where(c < V, _capped(z, cap, CAP), float("-inf"))
            higher = tl.maximum(peak, z)
            seen = higher > float("-inf")
            total = tl.where(seen, total * tl.exp(peak - higher) + tl.exp(z - higher), 0.0)
            peak = higher
            hit += tl.where(c == target, z, 0.0)
        top = tl.max(peak, 0)
        log_z = top + tl.log(tl.sum(total * tl.exp(peak - top), 0))
        tl.store(nll + tl.program_id(0), log_z - tl.sum(hit, 0))
        if SLOPE:
            for start in range(0, V, BLOCK):
                c = start + tl.arange(0, BLOCK)
                z = _capped(tl.load(row + c, c < V, 0.0).to(tl.float32), cap, CAP)
                p = tl.exp(z - log_z) - tl.where(c == target, 1.0, 0.0)
                if CAP:
                    p *= 1 - (z / cap) * (z / cap)
                tl.store(row + c, p.to(logits.dtype.element_ty), c < V)
