"""An engine: where clients run, and how a question reaches them. It knows nothing of what a question is for."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from fedweave.config import Config
from fedweave.console import Console
from fedweave.errors import UserError
from fedweave.experts.layout import AdapterLayout, Shaped
from fedweave.federation.admission import Door, Receipts, Sealed
from fedweave.federation.client import Member
from fedweave.federation.masks import masked_ask
from fedweave.federation.message import Message
from fedweave.federation.steps import Asked, R, Reply, Summed


class Engine(ABC):
    """The server's view of its clients: who they are, and the one way to ask them."""

    config: Config
    console: Console
    members: Sequence[Any]  # each a Member
    layers: Mapping[str, Shaped]  # the backbone's adapted layers, or just their shapes
    device: torch.device  # where the server computes
    identity: Mapping[str, str]  # Backbone.identity of the federation
    width: int  # d of the router's features
    grows = False  # whether clients may come after alignment
    travels = True  # whether messages leave the process
    quarantined: frozenset[str] = frozenset()  # clients that are not asked anything

    @cached_property
    def answered(self) -> dict[str, dict[str, int]]:
        """How often every client was asked what: what is spent of a privacy budget, answered or not."""
        return {}

    def layout(self, rank: int, experts: int, shared: int = 0) -> AdapterLayout:
        return AdapterLayout.of(self.layers, rank, experts, shared)

    # ---------------------------------------------------------------------------------- asking

    def ask(
        self, step: Reply[R], members: Sequence[Any], question: Message, receipts: Receipts | None = None
    ) -> Iterator[tuple[Any, R]]:
        """Put a question to these clients; what they reply, as it comes and once the door has let it in."""
        question.facts.setdefault("t", 0)
        heard = receipts or Receipts()
        if self.config.federation.secure_aggregation and isinstance(step, Summed):
            yield from masked_ask(self, step, members, question, heard)
        else:
            yield from self.hear(step, step, members, question, heard)

    def hear(
        self, step: Reply, read: Reply[R], members: Sequence[Any], question: Message, receipts: Receipts
    ) -> Iterator[tuple[Any, R]]:
        """Put a question and let in what can be ``read``."""
        members = [member for member in members if member.name not in self.quarantined]
        asked = [Asked(member, question, self.layers, self.width) for member in members]
        for member in members:
            answers = self.answered.setdefault(member.name, {})
            answers[step.name] = answers.get(step.name, 0) + 1
        door = Door(self.config, read, asked, self.identity, self.device, receipts)
        for member, sealed in self.replies(step, asked, question):
            reply = door.admit(member, sealed, self.console.warn)
            if reply is not None:
                yield member, reply

    @abstractmethod
    def replies(self, step: Reply, asked: Sequence[Asked], question: Message) -> Iterator[tuple[Member, Sealed]]:
        """Whatever comes back, from whom, unopened."""

    # ---------------------------------------------------------------------------------- who is there

    def present(self) -> Sequence[Any]:
        """Who can be asked to train."""
        return [member for member in self.members if member.takes_part and member.name not in self.quarantined]

    def newcomers(self) -> Sequence[Any]:
        """Clients that came after alignment and have no experts yet."""
        return []

    def welcome(self, newcomer: Any) -> None:
        """A newcomer has been given experts: from now on it is a member."""
        self.members = [*self.members, newcomer]

    def only(self, answered: set[int]) -> None:
        """Go on with the members that have answered; those that have not may come back as newcomers."""
        if not any(member.index in answered for member in self.members):
            raise UserError("no client gave a usable answer to the first question; look at the lines above.")
        self.members = [member for member in self.members if member.index in answered]

    # ---------------------------------------------------------------------------------- memories

    @abstractmethod
    def restore(self, records: Sequence[dict[str, Any]], tensors: Mapping[str, torch.Tensor]) -> None:
        """The clients as a checkpoint recorded them; their :meth:`memories` are among its tensors."""

    def memories(self) -> dict[str, torch.Tensor]:
        """What clients must not forget when the server resumes, where the server plays the clients."""
        return {}

    def go_back(self, private: torch.Tensor | None) -> None:
        """The run goes back to its best state, and with it what clients keep ([clients, …]), where the server plays
        the clients. Others see a lower pace, and have only to forget what rounding took."""
        return None

    def entrust(self, name: str, tensor: torch.Tensor) -> None:
        """Put something into every client's memory before round 1, where the server plays the clients."""
        return None

    def kept(self, name: str) -> torch.Tensor | None:
        """[clients, …] what clients keep under a name, where the server plays them; None where they do."""
        return None
