"""Teacher-forced losses: the mean token NLL of each example's answer, then the mean over examples."""

from collections.abc import Sequence

import numpy as np
import torch

from fedweave.backbone.load import Backbone
from fedweave.backbone.packing import pack, token_budget_batches
from fedweave.backbone.prompts import Encoded
from fedweave.console import ProgressBar
from fedweave.experts.layout import AdapterLayout
from fedweave.experts.mixture import Mixture
from fedweave.kernels import to_device
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
    """Loss of every example, [n] on the CPU; without a mixture that of the bare backbone. A GPU is waited for once,
    at the end: the host packs a batch while the one before it is computed."""
    device = backbone.device
    budget = 32_768 if device.type == "cuda" else 2_048
    weights = serving_weights(mixture.layout, theta, backbone.dtype) if mixture and theta is not None else None
    gates = gates.to(device) if gates is not None else None
    batches, means = token_budget_batches([len(e.ids) for e in examples], budget), []
    for batch in batches:
        rows = [examples[i] for i in batch]
        packed = pack([[e.ids for e in rows]], device)
        first = to_device(np.array([e.answer_start for e in rows]), device)[packed.sequence]  # [T]
        if mixture is None or weights is None:
            hidden = backbone.hidden(packed)
        else:
            token_gates = None
            if gates is not None:
                own = gates.index_select(0, to_device(np.array(batch), device))
                token_gates = own.index_select(0, packed.sequence)[None]  # [1, T, M]
            with mixture.active(weights, token_gates, spoken=packed.positions[0] >= first - 1):
                hidden = backbone.hidden(packed)
        lengths = np.array([len(e.ids) for e in rows])
        ends, counts = lengths.cumsum(), lengths - np.array([e.answer_start for e in rows])
        answer = np.concatenate([np.arange(end - n, end) for end, n in zip(ends, counts, strict=True)])
        source, target = to_device(answer - 1, device), packed.ids[0].index_select(0, to_device(answer, device))
        nll = token_nll(hidden.index_select(0, source), backbone.head, target, backbone.softcap)  # [n]
        sums = sum_segments(nll, to_device(np.concatenate([[0], counts.cumsum()]), device))
        means.append(sums / to_device(counts, device))
        if progress:
            progress.advance(len(batch))
    losses = torch.empty(len(examples))
    if batches:
        losses[np.concatenate(batches)] = torch.cat(means).cpu()
    return losses
