"""Cross-entropy of a block of logits, which become their own gradient in place:  z  →  softmax(z) - onehot."""

from __future__ import annotations

import torch

from fedweave.kernels import fused, tl, triton

_BLOCK = 4096


def entropy_and_slope(
    logits: torch.Tensor, targets: torch.Tensor, softcap: float | None, slope: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
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
