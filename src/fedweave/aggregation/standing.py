"""Who has pulled with the others so far, and who against them: what ``federation.rule=agreement`` goes by."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

import torch

from fedweave.config import Config
from fedweave.router.mlp import RouterLayout

N = TypeVar("N", int, str)
_CLEAR = 0.2  # a cosine beyond which no witness counts for more: few who say the same are not many
_PASSES = 8  # until nobody changes sides
_MEMORY = 0.7  # of what was known before: nobody lives on a good name for good


def left_out(evidence: Mapping[str, float], hostile: float) -> list[str]:
    """Clients whose evidence is against them, the worst first and no more than may be hostile; it names all."""
    return _lowest(evidence, may_be_hostile(len(evidence), hostile))


def _lowest(evidence: Mapping[N, float], most: int) -> list[N]:
    doubtful = sorted((total, name) for name, total in evidence.items() if total < 0)
    return [name for _, name in doubtful[:most]]


def refused_too(evidence: Mapping[str, float], refused: Iterable[str]) -> dict[str, float]:
    """An answer that the door refuses speaks against its sender as loudly as anything speaks for anybody."""
    loudest = max(map(abs, evidence.values()), default=0.0)
    return {**evidence, **(dict.fromkeys(refused, -loudest) if loudest else {})}


def may_be_hostile(n: int, share: float) -> int:
    """Of n clients."""
    return int(share * n + 1e-9)


class Named(Protocol):
    """A client as the server knows it."""

    index: int
    name: str


class Owner(Named, Protocol):
    assignment: list[int]


class Voices:
    """What clients say of one thing: of an expert, of an output of the router."""

    def __init__(self, standing: Standing | None, clients: list[int], rows: list[torch.Tensor]):
        self.standing, self.clients, self.rows = standing, clients, rows  # None: nobody weighs who speaks

    def of(self, columns: torch.Tensor, clients: Container[int]) -> Voices:
        """What these clients say of these columns."""
        said = [(client, row) for client, row in zip(self.clients, self.rows, strict=True) if client in clients]
        return Voices(self.standing, [client for client, _ in said], [row[columns] for _, row in said])


def by_output(average: object, router: RouterLayout, members: Sequence[Owner]) -> list[Voices]:
    """What clients say of a router, part by part: of the output of every expert those who have buckets of it, of
    the first layer all. In the first layer, which is most of a router, clients of different kinds move every which
    way: what they agree on would not show in the whole."""
    if not isinstance(average, Voices) or not average.rows:
        return []
    owners = {m: {member.index for member in members if m in member.assignment} for m in range(router.experts)}
    device, everybody = average.rows[0].device, {member.index for member in members}
    first = average.of(torch.arange(router.first_layer, device=device), everybody)
    return [first, *(average.of(router.outputs(m, m + 1).to(device), own) for m, own in owners.items())]


class Standing:
    """Who has pulled with the others so far, and who against them.

    One round tells little of a client: specialists differ from each other, and near an optimum everybody pulls
    against the rest. What honest clients have in common shows early, when they have far to go. So evidence adds up,
    over experts, router and rounds: the mean cosine of a client's update with each witness's, times the mean over
    the witnesses, which is small where they do not go one way. Witnesses are those who pull with the rest in this
    round and are in good standing: where three tenths pull the other way, all together go nowhere. Those whose sum
    is below zero count nothing, the lowest first and no more than may be hostile. All witnesses count alike,
    whatever they claim, however long their updates are and however much they resemble each other."""

    def __init__(self, members: Iterable[Named], config: Config, evidence: Mapping[str, float] | None = None):
        self._names = {member.index: member.name for member in members}
        self._hostile = config.federation.hostile
        self.evidence = dict(evidence or {})  # client -> its sum so far

    def hear(self, averages: Iterable[object], turn: int | None = None) -> None:
        """One round's updates of every expert, or of the router; what is averaged by another rule tells nothing.
        ``turn``: the how manieth of averages that count as one, of which the last, where everybody has got most of
        what it wants and pulls against the rest, is not to outweigh the first."""
        parts = [one for one in averages if isinstance(one, Voices) and one.standing and len(one.rows) > 1]
        if not parts:
            return
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
        self.evidence = dict.fromkeys(self._names.values(), 0.0) | self.evidence  # a share of all may be hostile
        believed = torch.tensor([client in self for client in clients])
        trusted = believed.double()
        for _ in range(_PASSES):
            told = agreed @ trusted / (common @ trusted).clamp(min=1.0)
            against = _lowest(dict(enumerate(told.tolist())), self._most)
            now = (believed & torch.tensor([i not in against for i in range(len(clients))])).double()
            if torch.equal(now, trusted):
                break
            trusted = now
        one_way = max(0.0, float(told @ trusted / trusted.sum().clamp(min=1.0)))
        kept, new = (_MEMORY, 1.0) if turn is None else (turn / (turn + 1), 1 / (turn + 1))
        for client, cosine in zip(clients, told.tolist(), strict=True):
            name = self._names[client]
            self.evidence[name] = kept * self.evidence[name] + new * one_way * cosine

    def __contains__(self, client: int) -> bool:
        return self._names[client] not in left_out(self.evidence, self._hostile)

    @property
    def _most(self) -> int:
        return may_be_hostile(len(self._names), self._hostile)

    def __bool__(self) -> bool:  # also while it holds nothing
        return True
