"""Averages that a few hostile clients cannot carry away: ``federation.rule``, expert by expert and for the router.

A plain mean is a stream and follows whoever shouts loudest. These rules look at all updates of a round together, so
that the server keeps them until the last has come: clients × parameters numbers instead of one running sum. A
client's weight is its own claim, so none counts for more than ``federation.max_share`` of an expert, and the rules
that compare numbers one by one (median, trimmed) count every client alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median_low
from typing import Protocol

import torch

from fedweave.aggregation.rules import ClientAverage, ExpertAverage
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
    cut = min(_bad(len(rows), hostile), (len(rows) - 1) // 2)
    return rows.sort(dim=0).values[cut : len(rows) - cut].mean(0)


def krum(rows: torch.Tensor, shares: torch.Tensor, hostile: float) -> torch.Tensor:
    """Multi-Krum: the mean of those that lie nearest to their neighbours, without as many as may be hostile."""
    n, bad = len(rows), _bad(len(rows), hostile)
    if n < 3:
        return shares @ rows
    near = torch.cdist(rows, rows).square().sort(dim=1).values[:, 1 : max(2, n - bad - 1)]  # [n, neighbours]
    kept = near.sum(1).argsort()[: n - bad]
    return (shares[kept] / shares[kept].sum()) @ rows[kept]


RULES: dict[str, Rule] = {
    "mean": mean, "clip": clip, "median": median, "trimmed": trimmed, "krum": krum,
    "agreement": clip,  # of those who are in good standing
}  # fmt: skip


def left_out(evidence: Mapping[str, float], hostile: float) -> list[str]:
    """Clients whose evidence is against them, the worst first and no more than may be hostile."""
    doubtful = sorted((total, name) for name, total in evidence.items() if total < 0)
    return [name for _, name in doubtful[: _bad(len(evidence), hostile)]]


class Named(Protocol):
    """A client as the server knows it."""

    index: int
    name: str


class Standing:
    """Who has pulled with the others so far, and who against them.

    One round tells little of a client: specialists differ from each other, and near an optimum everybody pulls
    against the rest. What honest clients have in common shows early, when they have far to go. So evidence adds up,
    over experts, router and rounds: the mean cosine of a client's update with each of the others', times the mean
    over all clients, which is small where they do not go one way. Those whose sum is below zero count nothing, the
    lowest first and no more than may be hostile, and they are no witnesses against others. All witnesses count
    alike, whatever they claim, however long their updates are and however much they resemble each other."""

    def __init__(self, members: Iterable[Named], config: Config, evidence: Mapping[str, float] | None = None):
        self._names = {member.index: member.name for member in members}
        self._hostile = config.federation.hostile
        self.evidence = dict(evidence or {})  # client -> its sum so far

    def hear(self, averages: Iterable[ClientAverage | RobustClients | None]) -> None:
        """One round's updates of every expert, or of the router; what is averaged by another rule tells nothing."""
        parts = [one for one in averages if isinstance(one, RobustClients) and one.standing and len(one.rows) > 1]
        clients = sorted({client for part in parts for client in part.clients})
        place = {client: i for i, client in enumerate(clients)}
        agreed, common = torch.zeros(2, len(clients), len(clients), dtype=torch.float64)
        for part in parts:
            rows = torch.stack(part.rows)
            unit = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-20)
            at = torch.tensor([place[client] for client in part.clients])
            agreed[at[:, None], at] += (unit @ unit.T).clamp(-_CLEAR, _CLEAR).double().cpu()
            common[at[:, None], at] += 1
        agreed.fill_diagonal_(0), common.fill_diagonal_(0)
        before = {self._names[client]: _MEMORY * self._sum(client) for client in clients}
        for _ in range(_PASSES):  # who counts nothing is no witness
            trusted = torch.tensor([client in self for client in clients], dtype=torch.float64)
            told = agreed @ trusted / (common @ trusted).clamp(min=1.0)
            one_way = max(0.0, float(told @ trusted / trusted.sum().clamp(min=1.0)))
            after = {
                name: was + one_way * now for (name, was), now in zip(before.items(), told.tolist(), strict=True)
            }
            if after == {name: self.evidence.get(name) for name in before}:
                break
            self.evidence |= after

    def __contains__(self, client: int) -> bool:
        return self._names[client] not in left_out(self.evidence, self._hostile)

    def _sum(self, client: int) -> float:
        return self.evidence.get(self._names[client], 0.0)

    def __bool__(self) -> bool:  # also while it holds nothing
        return True


FOR_STRANGERS = "agreement"  # the default over sites
_CLEAR = 0.2  # a cosine beyond which no witness counts for more: few who say the same are not many
_PASSES = 8  # until nobody changes sides
_MEMORY = 0.7  # of what was known before: nobody lives on a good name for good


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


def _bad(n: int, hostile: float) -> int:
    """Of n clients, those that may be hostile."""
    return int(hostile * n + 1e-9)


class RobustClients:
    """As :class:`ClientAverage`, by another rule than the mean; where nobody speaks nothing moves."""

    def __init__(self, size: int, device: torch.device, config: Config, standing: Standing | None = None):
        self.size, self.device, settings = size, device, config.federation
        self.rule, self.hostile, self.most = RULES[chosen_rule(config)], settings.hostile, chosen_share(config)
        self.standing = standing if chosen_rule(config) == "agreement" else None
        self.clients: list[int] = []
        self.rows: list[torch.Tensor] = []
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
