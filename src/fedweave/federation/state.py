"""What the server holds from round to round, and the part of it that it tells its clients."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from fedweave.experts.layout import AdapterLayout, Shaped
from fedweave.federation.message import Facts, Message
from fedweave.router.mlp import RouterLayout
from fedweave.router.routed import RoutedExperts


@dataclass
class Broadcast(RoutedExperts):
    """The model as the participants of a round receive it, and how fast they shall learn."""

    pace: float = 1.0  # share of the learning rates: halved whenever the run goes back to its best state


@dataclass
class ServerState(Broadcast):
    """The global model and what the server remembers beside it."""

    private: torch.Tensor | None = None  # [clients, P] what clients keep, where the server plays them
    signatures: torch.Tensor | None = None  # [M, D] means of the experts' buckets, for clients that come later
    known: torch.Tensor | None = None  # what familiar prompts were like, for when some of them are gone
    norms: dict[str, list[float]] = field(default_factory=dict)  # median norms of accepted updates, recent rounds
    standing: dict[str, float] = field(default_factory=dict)  # client -> how far it has pulled with the others
    doubts: dict[str, int] = field(default_factory=dict)  # client -> rounds in a row in which it pulled against all
    bucket_doubts: dict[str, list[int]] = field(default_factory=dict)  # the same of its buckets, by their expert
    report: dict[str, Any] = field(default_factory=dict)  # how discovery and alignment went

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint must hold."""
        own = {"private": self.private, "signatures": self.signatures, "known": self.known}
        return super().tensors() | {name: tensor for name, tensor in own.items() if tensor is not None}


def broadcast(model: Broadcast, t: int, dtype: torch.dtype = torch.float32) -> Message:
    """Line 9: experts and routers, as every participant of round t receives them."""
    layout = model.layout
    facts: Facts = {
        "t": t, "rank": layout.rank, "experts": layout.experts, "shared": layout.shared, "shares": model.shares,
        "pace": model.pace,
    }  # fmt: skip
    tensors = {name: tensor.to(dtype) for name, tensor in RoutedExperts.tensors(model).items()}
    return Message(tensors, facts | (router_facts(model.router) if model.router else {}))


def received(message: Message, layers: Mapping[str, Shaped], device: torch.device) -> Broadcast:
    """A broadcast as a client uses it."""
    tensors = {name: tensor.to(device, torch.float32) for name, tensor in message.tensors.items()}
    facts = message.facts
    layout = AdapterLayout.of(layers, facts["rank"], facts["experts"], facts["shared"])
    router = read_router(facts) if "router_hidden" in facts else None
    return Broadcast(layout, router, tensors["theta"], tensors.get("phi"), list(facts["shares"]), facts["pace"])


def router_facts(router: RouterLayout) -> Facts:
    return {f"router_{name}": value for name, value in asdict(router).items()}


def read_router(facts: Facts) -> RouterLayout:
    return RouterLayout(**{field.name: facts[f"router_{field.name}"] for field in fields(RouterLayout)})
