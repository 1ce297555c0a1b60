"""Does a client pull with the others or against them? The cosine of its update with the rest, round by round, as a
whole and on every expert: what a client does to one expert is its buckets' of that kind.

The comparison is fair to specialists: a client is held only against what others do to the same experts. It believes
no claim: on an expert all count alike, however many examples they say they have and however long their updates are,
or one liar would be "the others", and the honest would pull against it. It reads a fixed sample of columns, so that
the server keeps a few kilobytes per client and never a second copy of an update.
"""

import torch

from fedweave.experts.layout import AdapterLayout
from fedweave.federation.train import Update

SAMPLE = 4096  # columns; the cosine's error is about 1/64
AGAINST = -0.1  # below it a client pulls against the others; honest specialists scatter around 0
_SURE = 3.0  # standard errors of a cosine by the few columns of one expert
_FEWEST = 3  # clients of an expert: of two nobody can tell which one pulls against the other


class Agreement:
    """Collects a round's updates, then answers for each client."""

    def __init__(self, layout: AdapterLayout):
        generator, self.experts = torch.Generator().manual_seed(0), layout.experts
        self.columns = torch.randint(layout.size, (SAMPLE,), generator=generator).unique()  # [s]
        self.owner = layout.expert_of_column[self.columns]  # [s] the expert of each, M: all
        self.seen: dict[int, torch.Tensor] = {}  # client -> [s], of length 1 on every expert; 0: not uploaded

    def add(self, update: Update) -> None:
        values = update.delta_theta[self.columns.to(update.delta_theta.device)].double().cpu()
        counts = torch.tensor([*update.counts.tolist(), update.samples])  # n(i,m), and |D_i| for what all share
        values = values * (counts[self.owner] > 0)
        squares = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, self.owner, values.square())
        self.seen[update.client] = values / squares.sqrt().clamp(min=1e-30)[self.owner]

    def cosines(self) -> dict[int, float | None]:
        """Per client the cosine with the sum of all others on its experts; None where it is alone."""
        if not self.seen:
            return {}
        seen = dict(sorted(self.seen.items()))  # the order of arrival decides nothing
        total = torch.stack(list(seen.values())).sum(0)
        out: dict[int, float | None] = {}
        for client, values in seen.items():
            rest = (total - values) * (values != 0)
            norms = (values.norm() * rest.norm()).item()
            out[client] = (values @ rest).item() / norms if norms > 1e-9 else None
        return out

    def against(self) -> dict[int, list[bool | None]]:
        """[M] per client: whether it pulls against all others on an expert; None where that cannot be told."""
        if not self.seen:
            return {}
        seen = torch.stack([self.seen[client] for client in sorted(self.seen)])  # [clients, s]
        rest = seen.sum(0) - seen  # [clients, s]
        cosines = self._by_expert(seen * rest) / self._by_expert(rest.square()).sqrt().clamp(
            min=1e-30
        )  # [clients, M]
        served = self._by_expert(seen.square()) > 0
        told = served & (served.sum(0) >= _FEWEST)
        columns = self._by_expert(torch.ones(1, len(self.owner), dtype=torch.float64))
        limits = (-_SURE / columns.clamp(min=1).sqrt()).clamp(max=AGAINST)
        return {
            client: [bool(c) if t else None for c, t in zip(*rows, strict=True)]
            for client, rows in zip(sorted(self.seen), zip(cosines < limits, told, strict=True), strict=True)
        }

    def _by_expert(self, values: torch.Tensor) -> torch.Tensor:
        """Sums over each expert's columns: [clients, s] to [clients, M]."""
        sums = values.new_zeros(len(values), self.experts + 1)
        return sums.index_add_(1, self.owner, values)[:, : self.experts]
