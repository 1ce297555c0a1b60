"""The one door of the server: every reply to every step passes here before anything reads it.

A refused reply costs its sender that reply and nobody else anything: averages are weighted by what was let in. Each
refusal is one sentence with the client's name and the reason.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Generic

import torch

from fedweave.config import Config
from fedweave.errors import first_line
from fedweave.federation.client import Member
from fedweave.federation.message import Facts, Message, NoAnswer, Refused, Spec, decode, dtype_name, encoded_specs
from fedweave.federation.private import noised_reach
from fedweave.federation.steps import Asked, Figure, Part, R, Reply

_REMEMBERED_ROUNDS = 8
_NO_NUMBERS = "NaN or infinity, which a lower training.lr or router.lr may mend"


@dataclass
class Receipts:
    """What came in to one question: figures, not vectors, so that memory does not grow with the clients."""

    recent: dict[str, list[float]] = field(default_factory=dict)  # median norms of earlier rounds, by limit
    accepted: set[int] = field(default_factory=set)  # client indices
    refused: list[tuple[str, str]] = field(default_factory=list)  # (client, reason)
    clipped: list[str] = field(default_factory=list)
    bytes_up: dict[str, int] = field(default_factory=dict)  # what each client sent, used or not
    norms: dict[str, list[float]] = field(default_factory=dict)  # of what was accepted, by limit

    def remembered(self) -> dict[str, list[float]]:
        """``recent`` of the next round. Whole rounds are remembered, so that the order in which replies arrive
        decides nothing."""
        medians = {limit: [median(norms)] if norms else [] for limit, norms in self.norms.items()}
        return {limit: [*self.recent.get(limit, []), *m][-_REMEMBERED_ROUNDS:] for limit, m in medians.items()}


Sealed = Message | Callable[[], Message]  # a reply that nobody has opened yet is opened at the door


class Door(Generic[R]):
    def __init__(
        self,
        config: Config,
        step: Reply[R],
        asked: Sequence[Asked],
        identity: Mapping[str, str],  # Backbone.identity of the federation
        device: torch.device,
        receipts: Receipts,
    ):
        self.config, self.step, self.identity, self.device = config, step, identity, device
        self.asked = {one.member.index: one for one in asked}
        self.t = asked[0].question.facts["t"] if asked else 0
        self.receipts = receipts

    def admit(self, member: Member, sealed: Sealed, warn: Callable[[str], None]) -> R | None:
        """The reply as the step reads it; None where it is refused. Whatever goes wrong in here is the sender's."""
        name = member.name
        try:
            message = (sealed if isinstance(sealed, Message) else sealed()).spoken()
            self.receipts.bytes_up[name] = self.receipts.bytes_up.get(name, 0) + message.size
            reply = self._check(member, message)
        except NoAnswer as reason:
            warn(f"{name} gave no answer: {reason}.")
            return None
        except Exception as reason:  # a stranger's bytes can raise anything in whoever reads them
            why = str(reason) if isinstance(reason, Refused) else f"it cannot be read ({first_line(reason)})"
            self.receipts.refused.append((name, why))
            warn(f"{refusal(name, self.step.said(self.t), why)}.")
            return None
        self.receipts.accepted.add(member.index)
        return reply

    def _check(self, member: Member, message: Message) -> R:
        """Nothing in a message is taken for granted, types included."""
        asked = self.asked.get(member.index)
        if asked is None:
            raise Refused("it was not asked")
        if message.facts.get("step") != self.step.name or message.facts.get("t") != self.t:
            raise Refused("it answers another question than the open one")
        if member.index in self.receipts.accepted:
            raise Refused("an answer from it has been accepted already")
        check_identity(message.facts, self.identity)
        figures = check_figures(message.facts, self.step.figures(asked))
        parts = self.step.parts(asked, figures)
        check_tensors(message.tensors, self._specs(parts, message))
        for name, part in parts.items():
            if part.rows:  # rows of one process would travel as their mean
                self.receipts.bytes_up[member.name] -= part.bytes * (len(message.tensors[name]) - 1)
        values = {name: self._decoded(name, part, message) for name, part in parts.items()}
        squares = squared_lengths(values, {name: part.origin for name, part in parts.items()})
        if not all(map(math.isfinite, squares.values())):  # a number that is none shows in its sum
            for name, value in (*message.tensors.items(), *values.items()):
                check_finite(name, value)
        return self.step.read(asked, self._bounded(asked, parts, values, squares, member.name), figures)

    # ---------------------------------------------------------------------------------- tensors

    def _specs(self, parts: Mapping[str, Part], message: Message) -> dict[str, Spec]:
        specs: dict[str, Spec] = {}
        for name, part in parts.items():
            if part.rounded:
                specs |= encoded_specs(name, math.prod(part.shape), self.config.federation.update_dtype)
            elif part.rows:
                given = message.tensors.get(name)
                rows = len(given) if isinstance(given, torch.Tensor) and given.ndim == 1 + len(part.shape) else 1
                specs[name] = ((max(rows, 1), *part.shape), part.dtype)
            else:
                specs[name] = (part.shape, part.dtype)
        return specs

    def _decoded(self, name: str, part: Part, message: Message) -> torch.Tensor:
        if not part.rounded:
            return message.tensors[name]
        dtype = self.config.federation.update_dtype
        return decode(
            name, {key: message.tensors[key].to(self.device) for key in encoded_specs(name, 1, dtype)}, dtype
        )

    def _bounded(
        self,
        asked: Asked,
        parts: Mapping[str, Part],
        values: dict[str, torch.Tensor],
        squares: Mapping[str, float],
        name: str,
    ) -> dict[str, torch.Tensor]:
        """Every limit's parts within it: refused, or scaled down where the operator says so."""
        limits: dict[str, list[str]] = {}
        for key, part in parts.items():
            if part.limit:
                limits.setdefault(part.limit, []).append(key)
        norms: dict[str, float] = {}
        for limit, keys in limits.items():
            norm = math.sqrt(sum(squares[key] for key in keys))
            most, whose = self._limit(asked, limit, sum(values[key].numel() for key in keys))
            if norm > most:
                origins = any(parts[key].origin is not None for key in keys)
                if self.config.federation.long_updates == "reject" or not math.isfinite(norm) or origins:
                    raise Refused(f"its {limit} update has norm {norm:.3g}, but {whose} is {most:.3g}")
                values |= {key: values[key] * (most / norm) for key in keys}
                norm = most
                self.receipts.clipped.append(name)
            norms[limit] = norm
        for limit, norm in norms.items():
            self.receipts.norms.setdefault(limit, []).append(norm)
        return values

    def _limit(self, asked: Asked, limit: str, size: int) -> tuple[float, str]:
        """The tightest limit on a norm, and its name."""
        federation = self.config.federation
        if federation.norm_limit == "auto":
            private = self.config.privacy.level == "client"
            reach = noised_reach(self.config, self.step.name, size) if private else None
            limits = [reach or self.step.reach(asked, limit, size)]
        else:
            limits = [(float(federation.norm_limit), "federation.norm_limit")]
        # a round in which most moved nothing, such as one whose router sent all prompts to one expert, says nothing
        recent = [norm for norm in self.receipts.recent.get(limit, []) if norm > 0]
        if federation.norm_factor and recent:
            limits.append((
                federation.norm_factor * median(recent),
                f"the limit of {federation.norm_factor:g} times the recent median",
            ))  # fmt: skip
        return min(limits)


def refusal(name: str, question: str, why: str) -> str:
    return f"{name}'s answer to {question} was refused: {why}"


# -------------------------------------------------------------------------------------- one check each


def check_identity(given: Facts, own: Mapping[str, str]) -> None:
    """The same backbone and the same tokenizer, or :class:`Refused`."""
    for part, name in own.items():
        if given.get(part) != name:
            raise Refused(f"its {part} is not the one of this federation; give the site the same model files")


def check_figures(facts: Facts, expected: Mapping[str, Figure]) -> Facts:
    """Every expected figure, of its kind and within its range."""
    found: Facts = {}
    for name, figure in expected.items():
        fact = facts.get(name)
        if figure.length is None:
            items: Sequence[object] = [fact]
        elif isinstance(fact, list):
            items = fact
            least, most = figure.length
            if not least <= len(fact) <= most:
                wanted = least if least == most else f"{least} to {most}"
                raise Refused(f"{name} has {len(fact)} entries, where {wanted} are possible")
        else:
            raise Refused(f"{name} is missing or no list")
        for item in items:
            _check_item(name, item, figure)
        found[name] = fact
    return found


def _check_item(name: str, item: object, figure: Figure) -> None:
    if figure.kind is str:
        if not isinstance(item, str) or len(item) > figure.high:
            raise Refused(f"{name} is missing, no text or too long")
        return
    if isinstance(item, bool) or not isinstance(item, int | float):
        raise Refused(f"{name} is {_shown(item)}, which is no number")
    if not math.isfinite(item):
        raise Refused(f"{name} holds {_NO_NUMBERS}")
    if figure.kind is int and item != int(item):
        raise Refused(f"{name} is {_shown(item)}, which is no whole number")
    if not figure.low <= item <= figure.high:
        raise Refused(f"{name} is {_shown(item)}, where {figure.low:g} to {figure.high:g} are possible")


def check_tensors(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, Spec]) -> None:
    """Exactly the expected names, shapes and dtypes, or :class:`Refused`."""
    if missing := [name for name in expected if name not in tensors]:
        raise Refused(f"{missing[0]} is missing")
    if extra := [name for name in tensors if name not in expected]:
        raise Refused(f"{_shown(extra[0])} was not asked for")
    for name, (shape, dtype) in expected.items():
        tensor = tensors[name]
        if not isinstance(tensor, torch.Tensor):
            raise Refused(f"{name} is no tensor")
        if tuple(tensor.shape) != shape:
            raise Refused(f"{name} has shape {list(tensor.shape)}, not {list(shape)}")
        if tensor.dtype != dtype:
            raise Refused(f"{name} is {dtype_name(tensor.dtype)}, not {dtype_name(dtype)}")


def squared_lengths(
    values: Mapping[str, torch.Tensor], origins: Mapping[str, torch.Tensor | None]
) -> dict[str, float]:
    """Of every tensor of real numbers, as measured from its origin. A GPU is waited for once, not once for each."""
    real = {name: value for name, value in values.items() if value.is_floating_point()}
    moved = [value if (o := origins[name]) is None else value - o for name, value in real.items()]
    sums = [part.square().sum().double() for part in moved]
    return (
        dict(zip(real, torch.stack([one.to(sums[0].device) for one in sums]).tolist(), strict=True)) if sums else {}
    )


def check_finite(name: str, values: torch.Tensor) -> None:
    if not torch.isfinite(values).all():
        raise Refused(f"{name} holds {_NO_NUMBERS}")


def _shown(value: object) -> str:
    """A stranger's value, short enough for a sentence."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}…"
