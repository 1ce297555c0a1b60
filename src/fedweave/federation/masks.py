"""Secure aggregation over the ordinary questions: of what is only ever added up the server sees the sum alone.

    keys     every client makes keys for this question                 (privacy/masking.py has the scheme)
    shares   … and deals out shares of its secrets, sealed for its mates
    STEP     … and answers, masked: the same layout for all, with zeros for experts that it does not serve
    unmask   … and tells the shares that take the masks off the sum of those who have answered

The rules of a method then hear one client that speaks for all: its parts are weighted means, its counts are sums.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fedweave.errors import UserError
from fedweave.federation.admission import Receipts
from fedweave.federation.client import Client, Distant
from fedweave.federation.message import Facts, Message, NoAnswer, Refused
from fedweave.federation.steps import Answer, Asked, Figure, Part, R, Reply, Step, Summed
from fedweave.privacy.masking import (
    KEYS,
    SEALED,
    SHARE,
    Broken,
    Open,
    Party,
    decode,
    encode,
    threshold,
    unmask,
    usable,
)

if TYPE_CHECKING:
    from fedweave.federation.compute import Compute
    from fedweave.federation.engines.base import Engine

MASKED = "masked"  # the one tensor of a masked answer


class _Masking(Step[torch.Tensor]):
    """A question of the scheme: bytes, which tell nothing of data."""

    part, of_data = "", False

    def figures(self, asked: Asked) -> dict[str, Figure]:
        return {}

    def read(self, asked: Asked, parts: dict[str, torch.Tensor], figures: Facts) -> torch.Tensor:
        return parts[self.part]

    def answer(self, compute: Compute, clients: Sequence[Client], question: Message) -> Iterator[Answer]:
        for client in clients:
            yield Answer({self.part: self.told(client, question)})

    @abstractmethod
    def told(self, client: Client, question: Message) -> torch.Tensor:
        """A client's bytes."""


class AskKeys(_Masking):
    name = part = "keys"

    def told(self, client: Client, question: Message) -> torch.Tensor:
        client.party = Party(client.index)
        return _tensor(client.party.public())

    def parts(self, asked: Asked, figures: Facts) -> dict[str, Part]:
        return {self.part: Part((KEYS,), torch.uint8, summed=False)}

    def read(self, asked: Asked, parts: dict[str, torch.Tensor], figures: Facts) -> torch.Tensor:
        if not usable(_bytes(parts[self.part])):
            raise Refused("its keys are none")
        return parts[self.part]


class AskShares(_Masking):
    name = part = "shares"

    def told(self, client: Client, question: Message) -> torch.Tensor:
        mates, keys = question.facts["mates"], question.tensors["keys"]
        sealed = _party(client).share({v: _bytes(row) for v, row in zip(mates, keys, strict=True)})
        return torch.stack([_tensor(sealed[v]) for v in mates])

    def parts(self, asked: Asked, figures: Facts) -> dict[str, Part]:
        return {self.part: Part((len(asked.question.facts["mates"]), SEALED), torch.uint8, summed=False)}


class AskUnmask(_Masking):
    name, part = "unmask", "shares"

    def told(self, client: Client, question: Message) -> torch.Tensor:
        alive, gone = question.facts["alive"], question.facts["gone"]
        told = _party(client).tell(alive, gone)
        return torch.stack([_tensor(told[v]) for v in [*alive, *gone]])

    def parts(self, asked: Asked, figures: Facts) -> dict[str, Part]:
        facts = asked.question.facts
        return {self.part: Part((len(facts["alive"]) + len(facts["gone"]), SHARE), torch.uint8, summed=False)}


STEPS: list[Step] = [AskKeys(), AskShares(), AskUnmask()]
NAMES = {step.name for step in STEPS}


# -------------------------------------------------------------------------------------- the client


def hidden(step: Summed, asked: Asked, client: Client, summands: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """What leaves of an answer whose numbers are only ever added up: int64 [n]."""
    facts, party = asked.question.facts, client.party
    if MASKED not in facts:
        raise Broken("the server asks for an answer without masks, where this federation has them")
    device = next((given.device for given in summands.values()), torch.device("cpu"))
    vector = []
    for name, shape in step.totals(asked).items():
        given = summands.get(name)
        told = torch.zeros(math.prod(shape), dtype=torch.float64) if given is None else given.detach().double()
        vector.append(told.flatten().to(device))
    if isinstance(party, Open):
        return _fixed(torch.cat(vector), len(party.keys))
    party, column = _party(client), facts[MASKED].index(client.index)
    sealed = {v: _bytes(row[column]) for v, row in zip(facts[MASKED], asked.question.tensors["boxes"], strict=True)}
    return party.hide(_fixed(torch.cat(vector), len(party.keys)), sealed)


def _fixed(values: torch.Tensor, clients: int) -> torch.Tensor:
    """In fixed point. A client that has diverged keeps its answer to itself: in a sum nobody could refuse it."""
    try:
        return encode(values, clients)
    except UserError as reason:
        raise NoAnswer(str(reason).rstrip(".")) from None


def _party(client: Client) -> Party:
    if not isinstance(client.party, Party):
        raise Broken("this client has no keys for the question: it was started anew in between")
    return client.party


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


# -------------------------------------------------------------------------------------- the server


class Masked(Reply[torch.Tensor]):
    """A masked answer to a step, as the door knows it."""

    def __init__(self, step: Summed):
        self.name, self.step = step.name, step

    def said(self, t: int) -> str:
        return self.step.said(t)

    def figures(self, asked: Asked) -> dict[str, Figure]:
        return {}

    def parts(self, asked: Asked, figures: Facts) -> dict[str, Part]:
        size = sum(math.prod(shape) for shape in self.step.totals(asked).values())
        return {MASKED: Part((size,), torch.int64)}

    def read(self, asked: Asked, parts: dict[str, torch.Tensor], figures: Facts) -> torch.Tensor:
        return parts[MASKED]


def masked_ask(
    engine: Engine, step: Summed[R], members: Sequence[Any], question: Message, receipts: Receipts
) -> Iterator[tuple[Any, R]]:
    """One reply, of all who have answered together; none where too few have. Clients of this process have nobody to
    hide from: their sum is the same to the bit without masks."""
    facts, index_of = {"t": question.facts["t"]}, {member.index: member for member in members}
    said = step.said(facts["t"])
    if len(members) < 3:
        raise UserError(
            f"{said} would be asked of {len(members)} clients: federation.secure_aggregation needs three at least."
        )

    def closed(count: int) -> None:
        receipts.accepted.clear()
        engine.console.warn(
            f"{said}: {count} of {len(members)} clients are too few to open their sum; nothing is used."
        )

    if not engine.travels:
        for member in members:
            member.party = Open(dict.fromkeys(index_of, b""))
        asked_for = Message(question.tensors, {**question.facts, MASKED: sorted(index_of)})
        total, alive = _sum(engine, step, members, asked_for, receipts)
        if len(alive) < threshold(len(members)):
            return closed(len(alive))
        yield from _read(engine, step, members[0], question, receipts, len(alive), lambda: total)
        return

    def told(aside: Step, indices: Sequence[int], message: Message) -> dict[int, torch.Tensor]:
        found = engine.ask(aside, [index_of[i] for i in indices], message, Receipts(bytes_up=receipts.bytes_up))
        return {member.index: reply for member, reply in sorted(found, key=lambda pair: pair[0].index)}

    keys = {i: _bytes(key) for i, key in told(AskKeys(), sorted(index_of), Message(facts=dict(facts))).items()}
    needed = threshold(len(keys))
    if len(keys) < needed:
        return closed(len(keys))
    listed = Message({"keys": torch.stack([_tensor(key) for key in keys.values()])}, {**facts, "mates": list(keys)})
    dealt = told(AskShares(), list(keys), listed)
    mates, columns = list(dealt), [list(keys).index(i) for i in dealt]
    if len(mates) < needed:
        return closed(len(mates))
    boxes = torch.stack([dealt[i][columns] for i in mates])  # [from, to, bytes]
    asked_for = Message({**question.tensors, "boxes": boxes}, {**question.facts, MASKED: mates})
    total, alive = _sum(engine, step, [index_of[i] for i in mates], asked_for, receipts)
    gone = [i for i in mates if i not in alive]
    if len(alive) < needed:
        return closed(len(alive))
    shares = told(AskUnmask(), alive, Message(facts={**facts, "alive": alive, "gone": gone}))
    if len(shares) < needed:
        return closed(len(shares))
    order = [*alive, *gone]
    by_teller = {i: {u: _bytes(row) for u, row in zip(order, rows, strict=True)} for i, rows in shares.items()}
    yield from _read(
        engine, step, index_of[alive[0]], question, receipts, len(alive),
        lambda: unmask(total, {i: keys[i] for i in mates}, alive, by_teller),
    )  # fmt: skip


def _read(
    engine: Engine,
    step: Summed[R],
    member: Any,
    question: Message,
    receipts: Receipts,
    clients: int,
    total: Callable[[], torch.Tensor],  # int64 [n]; may find that the sum stays closed
) -> Iterator[tuple[Any, R]]:
    """The sum over so many clients, as the step reads it."""
    asked = Asked(member, question, engine.layers, engine.width)
    shapes = step.totals(asked)
    try:
        opened = decode(total())
        totals = dict(zip(shapes, opened.split([math.prod(shape) for shape in shapes.values()]), strict=True))
        reply = step.read_total(asked, {n: x.view(shapes[n]) for n, x in totals.items()}, clients)
    except (Refused, UserError, ValueError) as reason:  # shares are strangers' bytes
        receipts.accepted.clear()
        said = step.said(question.facts["t"])
        engine.console.warn(f"{said}: the sum of all answers is not used: {str(reason).rstrip('.')}.")
        return
    yield Distant(-1, "all sites" if engine.travels else "all clients"), reply


def _sum(
    engine: Engine, step: Summed, members: Sequence[Any], question: Message, receipts: Receipts
) -> tuple[torch.Tensor, list[int]]:
    """(the sum of masked answers as a stream, int64 [n] modulo 2⁶⁴, whose they are)"""
    total, alive = torch.zeros(1, dtype=torch.int64), []
    for member, vector in engine.hear(step, Masked(step), members, question, receipts):
        total = total.to(vector.device) + vector
        alive.append(member.index)
    return total, sorted(alive)
