"""All clients in this process, on one device, trained in lockstep. A site is such an engine with one client."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fedweave.backbone.load import Backbone
from fedweave.config import Config
from fedweave.console import Console
from fedweave.federation.admission import Sealed
from fedweave.federation.client import OWN, RESIDUAL, Client, Member
from fedweave.federation.compute import Compute
from fedweave.federation.engines.base import Engine
from fedweave.federation.exit import Exit
from fedweave.federation.message import Message, NoAnswer
from fedweave.federation.recent import Recent
from fedweave.federation.steps import Answer, Asked, Reply, Step


class InProcessEngine(Engine):
    """Clients that share one frozen backbone."""

    members: list[Client]

    def __init__(
        self,
        backbone: Backbone,
        clients: list[Client],
        config: Config,
        console: Console,
        travels: bool = False,
        recent: Recent | None = None,
    ):
        self.members, self.config, self.console, self.travels = clients, config, console, travels
        self.backbone, self.device, self.identity = backbone, backbone.device, backbone.identity
        self.compute = Compute(backbone, config, console, recent)
        self.layers = self.compute.layers
        self.exit = Exit(config, backbone.identity, travels)

    @property
    def width(self) -> int:  # type: ignore[override]
        return self.members[0].data.features.shape[1]

    def replies(self, step: Reply, asked: Sequence[Asked], question: Message) -> Iterator[tuple[Member, Sealed]]:
        yield from self.answers(step, asked, question)

    def speaking(self, asked: Sequence[Asked]) -> Sequence[Asked]:
        """Those of whom there is an answer to wait for."""
        hostile = self.exit.hostile
        return asked if hostile is None else [one for one in asked if hostile.speaks(one.member)]  # type: ignore[arg-type]

    def answers(self, step: Reply, asked: Sequence[Asked], question: Message) -> Iterator[tuple[Client, Message]]:
        assert isinstance(step, Step)
        asked = self.speaking(asked)
        together = step.together or max(1, len(asked))
        for start in range(0, len(asked), together):
            group = asked[start : start + together]
            clients: list[Client] = [one.member for one in group]  # type: ignore[misc]
            computed = step.answer(self.compute, clients, question)
            for one, client, answer in zip(group, clients, computed, strict=True):
                yield client, self._leave(step, one, client, answer)

    def _leave(self, step: Reply, one: Asked, client: Client, answer: Answer) -> Message:
        """Its message; why there is none is one, too, so that it costs nobody else anything."""
        try:
            return self.exit.leave(step, one, client, answer)
        except NoAnswer as reason:
            return Message.silent(str(reason))

    def detach(self) -> None:
        self.compute.detach()

    # ---------------------------------------------------------------------------------- memories

    def restore(self, records: Sequence[dict[str, Any]], tensors: Mapping[str, torch.Tensor]) -> None:
        own, known = tensors.get("private"), {record["name"]: record for record in records}
        self.members = [client for client in self.members if client.name in known]
        for row, client in enumerate(self.members):
            client.restore(known[client.name])
            prefix = _residuals(client)
            owed = {RESIDUAL + n.removeprefix(prefix): x for n, x in tensors.items() if n.startswith(prefix)}
            client.memory.restore(owed | ({} if own is None else {OWN: own[row].to(self.device)}))

    def go_back(self, private: torch.Tensor | None) -> None:
        for row, client in enumerate(self.members):
            client.memory.restore({} if private is None else {OWN: private[row]})

    def memories(self) -> dict[str, torch.Tensor]:
        """What rounding has taken; what clients keep for themselves is in the state (``ServerState.private``)."""
        return {
            f"{_residuals(client)}{name.removeprefix(RESIDUAL)}": owed
            for client in self.members
            for name, owed in client.memory.after.items()
            if name.startswith(RESIDUAL)
        }

    def entrust(self, name: str, tensor: torch.Tensor) -> None:
        for client in self.members:
            client.memory.keep(name, tensor)

    def kept(self, name: str) -> torch.Tensor | None:
        return torch.stack([client.memory.after[name] for client in self.members])


def _residuals(client: Client) -> str:
    return f"{RESIDUAL}{client.index}."
