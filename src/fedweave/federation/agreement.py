"""Does a client pull with the others or against them? The cosine of its update with the rest, round by round.

The comparison is fair to specialists: a client is held only against what others do to the same experts. It reads a
fixed sample of columns, so that the server keeps a few kilobytes per client and never a second copy of an update.
"""

import torch

from fedweave.experts.layout import AdapterLayout
from fedweave.federation.train import Update

SAMPLE = 4096  # columns; the cosine's error is about 1/64
AGAINST = -0.1  # below it a client pulls against the others; honest specialists scatter around 0


class Agreement:
    """Collects a round's updates, then answers for each client."""

    def __init__(self, layout: AdapterLayout):
        generator = torch.Generator().manual_seed(0)
        self.columns = torch.randint(layout.size, (SAMPLE,), generator=generator).unique()  # [s]
        self.owner = layout.expert_of_column[self.columns]  # [s] the expert of each, M: all
        self.seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # client -> (values [s], weights [s])

    def add(self, update: Update) -> None:
        values = update.delta_theta[self.columns.to(update.delta_theta.device)].float().cpu()
        counts = torch.tensor([*update.counts.tolist(), update.samples])  # n(i,m), and |D_i| for what all share
        weights = counts[self.owner]  # [s]; 0: not uploaded
        self.seen[update.client] = (values * (weights > 0), weights)

    def cosines(self) -> dict[int, float | None]:
        """Per client the cosine with the weighted mean of all others on its experts; None where it is alone."""
        if not self.seen:
            return {}
        seen = dict(sorted(self.seen.items()))  # the order of arrival decides nothing
        total = torch.stack([values * weights for values, weights in seen.values()]).sum(0)
        out: dict[int, float | None] = {}
        for client, (values, weights) in seen.items():
            rest = (total - values * weights) * (weights > 0)
            norms = (values.norm() * rest.norm()).item()
            out[client] = (values @ rest).item() / norms if norms > 1e-20 else None
        return out
