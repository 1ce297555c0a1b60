"""A step: one question of the server, what a client computes for it, and what its reply may hold.

    server                                              client
    engine.ask(step, members, question) ──question──▶   step.answer(compute, clients, question)
                                                            │ Answer: parts and figures
                                                            ▼
    step.read(asked, parts, figures)  ◀── DOOR ◀──message── EXIT  (exit.py: everything that leaves, leaves here)
                      (admission.py: everything that comes in, comes in here)

A method is a few steps and the rules that read their replies. Engines know steps, never which.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from fedweave.experts.layout import Shaped
from fedweave.federation.client import Client, Member
from fedweave.federation.message import Facts, Message, Refused

if TYPE_CHECKING:
    from fedweave.federation.compute import Compute

R = TypeVar("R")
FIGURE = "figure."  # of a sum: what is no tensor of an answer
MOST_LOSS = 1e4  # nats: more than any vocabulary can cost


@dataclass(frozen=True)
class Part:
    """A tensor of a reply. The door lets in no other name, shape or dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    summed: bool = True  # the server only ever adds it up over clients; otherwise it reads each client's own
    rounded: bool = False  # travels in federation.update_dtype; what rounding takes is owed to the next round
    turn: str = ""  # where other numbers take turns under one name: whose these are, and what rounding owes them
    rows: bool = False  # one process may hand over several rows of this shape; their mean is what leaves it
    limit: str = ""  # parts of one name share a limit on their norm
    origin: torch.Tensor | None = None  # where the norm is measured from, if not from zero

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Figure:
    """A number or a text of a reply, or a list of them, and what can be believed of it."""

    kind: type  # int, float or str
    low: float = -math.inf
    high: float = math.inf
    length: tuple[int, int] | None = None  # of a list; None: a single value
    summed: bool = False
    # Under differential privacy (:mod:`fedweave.federation.private`):
    veil: Any = None  # what leaves in its place
    examples: bool = False  # a number of examples: one where whole clients are protected, known otherwise
    spread: float = 0.0  # how far one client, or one example, can move it; noise is in proportion to that


@dataclass(frozen=True)
class Asked:
    """A question as it was put to one client."""

    member: Member
    question: Message
    layers: Mapping[str, Shaped]  # the backbone's adapted layers, or just their shapes
    width: int  # d of the router's features


@dataclass
class Answer:
    """What a client has computed and not sent yet."""

    parts: dict[str, torch.Tensor] = field(default_factory=dict)
    figures: Facts = field(default_factory=dict)


class Reply(ABC, Generic[R]):
    """What a reply may hold, and how the server reads it."""

    name: str  # of the question
    of_data = True  # False: no answer to it depends on data, so that none is filtered

    def said(self, t: int) -> str:
        """The question as an operator reads it."""
        return repr(self.name)

    @abstractmethod
    def figures(self, asked: Asked) -> dict[str, Figure]:
        """The figures of a reply."""

    def parts(self, asked: Asked, figures: Facts) -> dict[str, Part]:
        """The tensors of a reply with these figures; figures that contradict each other or what was agreed are
        refused here."""
        return {}

    def sums(self, rows: int) -> list[slice]:
        """Where its answers are plain sums over a client's rows: over which of so many."""
        return []

    def reach(self, asked: Asked, limit: str, size: int) -> tuple[float, str]:
        """The farthest that the question can lead ``size`` numbers of one limit, as a norm, and what that is."""
        return math.inf, ""

    @abstractmethod
    def read(self, asked: Asked, parts: dict[str, torch.Tensor], figures: Facts) -> R:
        """A reply that has passed the door, as the method's rules use it."""


class Step(Reply[R]):
    """One kind of question: a reply, and what a client computes for it."""

    together: int | None = 128  # clients of one process that answer at once, which bounds its memory; None: all

    @abstractmethod
    def answer(self, compute: Compute, clients: Sequence[Client], question: Message) -> Iterator[Answer]:
        """Client side: one answer for each of these clients, in their order."""


class Summed(Step[R]):
    """A question whose answers are only ever added up: they can be summed without being seen
    (:mod:`fedweave.federation.masks`)."""

    @abstractmethod
    def totals(self, asked: Asked) -> dict[str, tuple[int, ...]]:
        """The layout of the sum, which is the same for all clients."""

    @abstractmethod
    def summands(self, asked: Asked, answer: Answer) -> dict[str, torch.Tensor]:
        """A client's part in it, with its weights multiplied in; what is left out is zero."""

    @abstractmethod
    def read_total(self, asked: Asked, totals: dict[str, torch.Tensor], clients: int) -> R:
        """The sum over so many clients (float64), as if one client spoke for all."""

    def check_mean(self, asked: Asked, limit: str, mean: torch.Tensor) -> None:
        """No client can be held against its limits where only sums are seen, but a mean is no longer than the
        longest answer, or :class:`Refused`."""
        norm, (most, whose) = float(mean.norm()), self.reach(asked, limit, mean.numel())
        if not norm <= most:
            raise Refused(f"the {limit} mean has norm {norm:.3g}, but {whose} is {most:.3g}")


# AdamW moves a parameter by lr·m̂/√v̂ a step, and by Cauchy-Schwarz |m̂|/√v̂ ≤ √(Σ w²/u) for the weights w and u that
# β = (0.9, 0.999) give to past gradients: at most 7.3, and near 1 in practice.
_ADAM_REACH = 7.3


def adam_reach(steps: int, rate: float, size: int) -> float:
    """The longest way, as a norm, that AdamW can go in so many steps with ``size`` numbers."""
    return steps * rate * _ADAM_REACH * math.sqrt(size)
