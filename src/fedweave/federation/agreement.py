"""Does a client pull with the others or against them? The cosine of its update with the rest, round by round, as a
whole and on every expert: what a client does to one expert is its buckets' of that kind.

The comparison is fair to specialists: a client is held only against what others do to the same experts. It believes
no claim: on an expert all count alike, however many examples they say they have and however long their updates are,
or one liar would be "the others", and the honest would pull against it. It reads a fixed sample of columns, so that
the server keeps a few kilobytes per client and never a second copy of an update.
"""

from functools import cached_property

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
        self._sampled: dict[int, torch.Tensor] = {}  # client -> [s], where its update was
        self._counts: dict[int, list[float]] = {}  # client -> n(i,m), and |D_i| for what all share

    def add(self, update: Update) -> None:
        self.columns = self.columns.to(update.delta_theta.device)
        self._sampled[update.client] = update.delta_theta[self.columns]
        self._counts[update.client] = [*update.counts.tolist(), update.samples]
        self.__dict__.pop("seen", None)  # whoever asks next sees it, too

    @cached_property
    def seen(self) -> dict[int, torch.Tensor]:
        """client -> [s], of length 1 on every expert; 0: not uploaded. All come from a GPU together, and the order
        of arrival decides nothing."""
        if not self._sampled:
            return {}
        clients = sorted(self._sampled)
        values = torch.stack([self._sampled[client] for client in clients]).cpu().double()  # [clients, s]
        values *= torch.tensor([self._counts[client] for client in clients])[:, self.owner] > 0
        lengths = self._sums(values.square()).sqrt().clamp(min=1e-30)  # [clients, M + 1]
        return dict(zip(clients, values / lengths[:, self.owner], strict=True))

    def cosines(self) -> dict[int, float | None]:
        """Per client the cosine with the sum of all others on its experts; None where it is alone."""
        if not self.seen:
            return {}
        total = torch.stack(list(self.seen.values())).sum(0)
        out: dict[int, float | None] = {}
        for client, values in self.seen.items():
            rest = (total - values) * (values != 0)
            norms = (values.norm() * rest.norm()).item()
            out[client] = (values @ rest).item() / norms if norms > 1e-9 else None
        return out

    def against(self) -> dict[int, list[bool | None]]:
        """[M] per client: whether it pulls against all others on an expert; None where that cannot be told."""
        if not self.seen:
            return {}
        seen = torch.stack(list(self.seen.values()))  # [clients, s]
        rest = seen.sum(0) - seen  # [clients, s]
        cosines = self._by_expert(seen * rest) / self._by_expert(rest.square()).sqrt().clamp(
            min=1e-30
        )  # [clients, M]
        served = self._by_expert(seen.square()) > 0
        told = served & (served.sum(0) >= _FEWEST)
        columns = self._by_expert(torch.ones(1, len(self.owner), dtype=torch.float64))
        limits = (-_SURE / columns.clamp(min=1).sqrt()).clamp(max=AGAINST)
        return {
            client: [c if t else None for c, t in zip(*rows, strict=True)]
            for client, *rows in zip(self.seen, (cosines < limits).tolist(), told.tolist(), strict=True)
        }

    def _sums(self, values: torch.Tensor) -> torch.Tensor:
        """Sums over each expert's columns, and over what all share: [clients, s] to [clients, M + 1]."""
        return values.new_zeros(len(values), self.experts + 1).index_add_(1, self.owner, values)

    def _by_expert(self, values: torch.Tensor) -> torch.Tensor:
        return self._sums(values)[:, : self.experts]  # [clients, M]
