"""Averages that a few hostile clients cannot carry away: ``federation.rule``, expert by expert and for the router.

A plain mean is a stream and follows whoever shouts loudest. These rules look at all updates of a round together, so
that the server keeps them until the last has come: clients × parameters numbers instead of one running sum. A
client's weight is its own claim, so none counts for more than ``federation.max_share`` of an expert, and the rules
that compare numbers one by one (median, trimmed) count every client alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median_low

import torch

from fedweave.aggregation.rules import ClientAverage, ExpertAverage
from fedweave.aggregation.standing import Standing, Voices, may_be_hostile
from fedweave.config import Config
from fedweave.experts.layout import AdapterLayout

Rule = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]  # (rows [n, p], shares [n], hostile) -> [p]


def mean(rows: torch.Tensor, shares: torch.Tensor, hostile: float) -> torch.Tensor:
    return shares @ rows


def clip(rows: torch.Tensor, shares: torch.Tensor, hostile: float) -> torch.Tensor:
    """No update is longer than the median one."""
    return shares @ shortened(rows, rows.norm(dim=1).median())


def shortened(rows: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
    """These rows, none of them longer than that."""
    return rows * (most / rows.norm(dim=1).clamp(min=1e-20)).clamp(max=1.0)[:, None]


def median(rows: torch.Tensor, shares: torch.Tensor, hostile: float) -> torch.Tensor:
    """Number by number the middle one, or the mean of the middle two."""
    ordered, n = rows.sort(dim=0).values, len(rows)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


def trimmed(rows: torch.Tensor, shares: torch.Tensor, hostile: float) -> torch.Tensor:
    """Number by number the mean without the largest and the smallest, as many of each as may be hostile."""
    cut = min(may_be_hostile(len(rows), hostile), (len(rows) - 1) // 2)
    return rows.sort(dim=0).values[cut : len(rows) - cut].mean(0)


def krum(rows: torch.Tensor, shares: torch.Tensor, hostile: float) -> torch.Tensor:
    """Multi-Krum: the mean of those that lie nearest to their neighbours, without as many as may be hostile."""
    n, bad = len(rows), may_be_hostile(len(rows), hostile)
    if n < 3:
        return shares @ rows
    near = torch.cdist(rows, rows).square().sort(dim=1).values[:, 1 : max(2, n - bad - 1)]  # [n, neighbours]
    kept = near.sum(1).argsort()[: n - bad]
    return (shares[kept] / shares[kept].sum()) @ rows[kept]


RULES: dict[str, Rule] = {
    "mean": mean, "clip": clip, "median": median, "trimmed": trimmed, "krum": krum,
    "agreement": clip,  # of those who are in good standing
}  # fmt: skip


FOR_STRANGERS = "agreement"  # the default over sites


def capped(weights: Sequence[float], most: float) -> torch.Tensor:
    """Weights as shares of which none is above ``most``, or all alike where that cannot be; the surplus goes to
    the others in proportion."""
    shares = torch.tensor(weights, dtype=torch.float64)
    shares /= shares.sum()
    if most * len(shares) <= 1:
        return torch.full_like(shares, 1 / len(shares))
    while (shares > most + 1e-12).any():
        over = shares >= most - 1e-12
        rest = shares[~over].sum()
        shares = torch.where(over, most, shares * ((1 - most * over.sum()) / rest))
    return shares


def believed(claims: Mapping[int, int], config: Config) -> dict[int, float]:
    """The part of every client's claimed examples that counts where examples are counted, so that none has more
    than ``federation.max_share`` of them; the median client's all do."""
    most, claims = chosen_share(config), {index: size for index, size in claims.items() if size}
    if most >= 1 or not claims:
        return dict.fromkeys(claims, 1.0)
    shares = capped(list(claims.values()), most).tolist()
    whole = median_low(size / share for size, share in zip(claims.values(), shares, strict=True))
    return {index: share * whole / size for (index, size), share in zip(claims.items(), shares, strict=True)}


class RobustClients(Voices):
    """As :class:`ClientAverage`, by another rule than the mean; where nobody speaks nothing moves."""

    def __init__(self, size: int, device: torch.device, config: Config, standing: Standing | None = None):
        self.size, self.device, settings = size, device, config.federation
        self.rule, self.hostile, self.most = RULES[chosen_rule(config)], settings.hostile, chosen_share(config)
        super().__init__(standing if chosen_rule(config) == "agreement" else None, [], [])
        self.weights: list[float] = []

    def add(self, delta: torch.Tensor, weight: float, client: int = 0) -> None:
        self.clients.append(client)
        self.rows.append(delta.to(self.device, torch.float32))
        self.weights.append(float(weight))

    @property
    def weight(self) -> float:
        return sum(self.weights)

    def step(self, usual: torch.Tensor | None = None) -> torch.Tensor:
        """Two clients have no middle: by every rule but the mean neither of them is longer than ``usual``."""
        kept = list(range(len(self.rows)))
        if self.standing is not None:
            kept = [i for i in kept if self.clients[i] in self.standing]
        if not kept:
            return torch.zeros(self.size, device=self.device)
        rows = torch.stack([self.rows[i] for i in kept])  # [n, p]
        if usual is not None and len(rows) < 3 and self.rule is not mean:
            rows = shortened(rows, usual)
        return self.rule(rows, capped([self.weights[i] for i in kept], self.most).to(rows), self.hostile)


def usual_length(averages: Iterable[ClientAverage | RobustClients]) -> torch.Tensor | None:
    """The median length of all clients' updates of all experts; None where too few are kept to tell."""
    rows = [row for one in averages if isinstance(one, RobustClients) for row in one.rows]
    return torch.stack([row.norm() for row in rows]).median() if len(rows) > 2 else None


class RobustExperts:
    """As :class:`ExpertAverage`: every expert by those who serve it, the shared part by all."""

    def __init__(self, layout: AdapterLayout, device: torch.device, config: Config, standing: Standing | None):
        owner = layout.owner(device)
        self.move, self.standing = torch.zeros(layout.size, device=device), standing
        self.columns = [(owner == m).nonzero()[:, 0] for m in range(layout.experts + 1)]
        self.parts = [RobustClients(len(own), device, config, standing) for own in self.columns]

    def add(self, delta: torch.Tensor, counts: torch.Tensor, samples: float = 0.0, client: int = 0) -> None:
        for columns, part, weight in zip(self.columns, self.parts, [*counts.tolist(), samples], strict=True):
            if weight > 0 and len(columns):
                part.add(delta[columns], weight, client)

    def step(self) -> torch.Tensor:
        if self.standing is not None:
            self.standing.hear(self.parts)
        usual = usual_length(self.parts[:-1])
        for m, (columns, part) in enumerate(zip(self.columns, self.parts, strict=True)):
            self.move[columns] = part.step(usual if m < len(self.parts) - 1 else None)  # what all share is larger
        return self.move


def chosen_rule(config: Config) -> str:
    """auto: strangers are not believed at any length, clients of this process are."""
    rule = config.federation.rule
    return rule if rule != "auto" else FOR_STRANGERS if _strangers(config) else "mean"


def chosen_share(config: Config) -> float:
    """auto: how many examples strangers have is their own claim."""
    share = config.federation.max_share
    return float(share) if share != "auto" else 0.2 if _strangers(config) else 1.0


def _strangers(config: Config) -> bool:
    """Whether clients are sites, whose single updates are seen."""
    return config.data.source == "sites" and not config.federation.secure_aggregation


def streams(config: Config) -> bool:
    """The paper's mean needs no more than a running sum."""
    return chosen_rule(config) == "mean" and chosen_share(config) >= 1


def expert_average(
    layout: AdapterLayout, device: torch.device, config: Config, standing: Standing | None = None
) -> ExpertAverage | RobustExperts:
    return ExpertAverage(layout, device) if streams(config) else RobustExperts(layout, device, config, standing)


def client_average(
    size: int, device: torch.device, config: Config, standing: Standing | None = None
) -> ClientAverage | RobustClients:
    return ClientAverage(size, device) if streams(config) else RobustClients(size, device, config, standing)
