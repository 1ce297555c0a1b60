"""Teacher-forced losses: the mean token NLL of each example's answer, then the mean over examples."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from fedweave.backbone.load import Backbone
from fedweave.backbone.packing import pack, token_budget_batches
from fedweave.backbone.prompts import Encoded
from fedweave.console import ProgressBar
from fedweave.experts.layout import AdapterLayout
from fedweave.experts.mixture import Mixture
from fedweave.kernels.entropy import token_nll
from fedweave.kernels.lanes import sum_segments


def serving_weights(
    layout: AdapterLayout, theta: torch.Tensor, dtype: torch.dtype
) -> list[dict[str, torch.Tensor]]:
    """One state as the mixture reads it: K = 1, in the backbone's dtype."""
    return layout.views(theta[None].to(dtype))


@torch.no_grad()
def example_losses(
    backbone: Backbone,
    examples: Sequence[Encoded],
    mixture: Mixture | None = None,
    theta: torch.Tensor | None = None,
    gates: torch.Tensor | None = None,  # [n, M]; None: one expert with weight 1
    progress: ProgressBar | None = None,
) -> torch.Tensor:
    """Loss of every example, [n] on the CPU; without a mixture that of the bare backbone."""
    losses = torch.empty(len(examples))
    budget = 32_768 if backbone.device.type == "cuda" else 2_048
    weights = serving_weights(mixture.layout, theta, backbone.dtype) if mixture and theta is not None else None
    for batch in token_budget_batches([len(e.ids) for e in examples], budget):
        rows = [examples[i] for i in batch]
        packed = pack([[e.ids for e in rows]], backbone.device)
        first = torch.tensor([e.answer_start for e in rows], device=backbone.device)[packed.sequence]  # [T]
        if mixture is None or weights is None:
            hidden = backbone.hidden(packed)
        else:
            token_gates = None
            if gates is not None:
                token_gates = gates[batch].to(backbone.device).index_select(0, packed.sequence)[None]  # [1, T, M]
            with mixture.active(weights, token_gates, spoken=packed.positions[0] >= first - 1):
                hidden = backbone.hidden(packed)
        answer = (packed.positions[0] >= first).nonzero()[:, 0]  # [n] positions of answer tokens
        sequence, target = packed.sequence[answer], packed.ids[0, answer]
        nll = token_nll(hidden.index_select(0, answer - 1), backbone.head, target, backbone.softcap)
        counts = torch.bincount(sequence, minlength=len(batch))
        sums = sum_segments(nll, F.pad(counts.cumsum(0), (1, 0)))
        losses[batch] = (sums / counts).cpu()
        if progress:
            progress.advance(len(batch))
    return losses
