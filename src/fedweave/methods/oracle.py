"""An upper bound, not a method: buckets are the kinds of examples, and the router is handed the kind.

The kind is the category, or the task where there is none. Features are one-hot kinds (the workspace swaps them in
for a method that ``uses_labels``) and the router is a fixed map from kind to expert. All else is FedWeave's: the
same start, the same shared part, the same batches.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from fedweave.aggregation.standing import Standing
from fedweave.config import Config
from fedweave.discovery.clusterers import Buckets
from fedweave.federation.admission import Receipts
from fedweave.federation.client import Client, Member, examples_of
from fedweave.federation.compute import Compute
from fedweave.federation.engines.base import Engine
from fedweave.federation.message import Facts, Message, Refused
from fedweave.federation.method import Payload, Sizes
from fedweave.federation.news import Change
from fedweave.federation.state import ServerState
from fedweave.federation.steps import Answer, Asked, Figure, Part
from fedweave.methods.fedweave import FedWeave
from fedweave.methods.lessons import give_lessons, shared_of
from fedweave.methods.preparation import (
    assign,
    discover_units,
    mixture_payload,
    preparation_bytes,
    start_experts,
    warm_starts,
)
from fedweave.methods.prototypes import Discover, Prototypes, StartExperts
from fedweave.router.mlp import RouterLayout
from fedweave.router.routed import RoutedExperts


def by_label(compute: Compute, clients: Sequence[Client]) -> list[Buckets]:
    kinds = [client.data.features.argmax(1) for client in clients]
    return [Buckets([(kind == m).nonzero()[:, 0].numpy() for m in kind.unique()], {}) for kind in kinds]


class DiscoverLabels(Discover):
    """As ever, and the clients name the kind of every bucket."""

    def answer(self, compute: Compute, clients: Sequence[Client], question: Message) -> Iterator[Answer]:
        for client, answer in zip(clients, super().answer(compute, clients, question), strict=True):
            labels = client.data.features.argmax(1).unique().tolist()
            yield replace(answer, figures=answer.figures | {"labels": labels})

    def figures(self, asked: Asked) -> dict[str, Figure]:
        several = (1, asked.width)
        figures = super().figures(asked)
        figures["sizes"] = replace(figures["sizes"], length=several)
        return figures | {"labels": Figure(int, 0, asked.width - 1, several)}

    def parts(self, asked: Asked, figures: Facts) -> dict[str, Part]:
        if len(figures["labels"]) != len(figures["sizes"]):
            raise Refused("it does not name the kind of every bucket")
        return super().parts(asked, figures)

    def read(self, asked: Asked, parts: dict[str, torch.Tensor], figures: Facts) -> Prototypes:
        return replace(super().read(asked, parts, figures), labels=figures["labels"])


class Oracle(FedWeave):
    summary = "upper bound: told every example's kind, one expert per kind"
    uses_labels = True
    continues = opens = False
    units = staticmethod(by_label)

    def __init__(self, config: Config):
        super().__init__(config)
        self.discover = DiscoverLabels(self)
        self.start = StartExperts(self.discover) if config.experts.start == "warmup" else None
        self.contest = self.relabel = self.familiar = None
        self.trains_router = False

    def group(self, compute: Compute, client: Client) -> None:
        """It is told: every kind is a bucket, and has its expert from the beginning."""
        (found,) = by_label(compute, [client])
        client.buckets, client.waiting = found.members, client.waiting[:0]
        client.assignment = [int(client.data.features[bucket[0]].argmax()) for bucket in found.members]

    def settle(self, engine: Engine, state: ServerState, change: Change) -> ServerState:
        """A kind that comes in mid-run starts as those did that were there, from the mean of its warmups or at
        zero, and has its lessons (``living.lessons``)."""
        layout, experts = state.layout, state.layout.unstack(state.theta)
        learned = layout.with_experts(1).is_b.to(state.theta.device)
        fed = examples_of(engine.members, layout.experts)
        came = [m for m, expert in enumerate(experts) if fed[m] and not expert[learned].any()]
        if not came:
            return state
        if self.start is not None:
            state = self.warmed(engine, self.start, state, came, change)
        return give_lessons(engine, self.living.lesson, state, came, change)

    def warmed(
        self, engine: Engine, start: StartExperts, state: ServerState, came: Sequence[int], change: Change
    ) -> ServerState:
        """The state in which these experts are the means of their warmups."""
        layout, experts = state.layout, state.layout.unstack(state.theta)
        question, heard = Message(facts={"t": change.t, "first": min(came)}), Receipts()
        owners = [member for member in engine.members if set(member.assignment) & set(came)]
        standing = Standing(engine.members, self.config, state.standing)
        starts = warm_starts(engine, start, layout, came, owners, question, heard, standing)
        change.heard(heard, question)
        for m, one in zip(came, starts, strict=True):
            experts[m] = one.to(state.theta)
        return replace(state, theta=layout.stack(experts, shared_of(state)))

    def admit(self, engine: Engine, state: ServerState, newcomer: Member) -> str:
        return ""  # nobody comes later who knows the labels

    def prepare(self, engine: Engine, start: RoutedExperts | None = None) -> ServerState:
        heard, started = Receipts(), Receipts()
        found = discover_units(engine, self.discover, heard)
        report = assign(engine.members, found, engine.width, [m for told in found for m in told.labels])
        experts = self.config.experts
        layout = engine.layout(experts.rank, engine.width, experts.shared_rank)
        theta = layout.initial(self.config.seed)
        if self.start is not None:
            theta = start_experts(engine, self.start, layout, started, Standing(engine.members, self.config))
        router = RouterLayout(layout.experts, layout.experts, layout.experts)
        phi = torch.zeros(router.size, device=engine.device)
        views = router.views(phi)
        views["linear1.weight"].copy_(100 * torch.eye(router.experts))
        views["linear2.weight"].copy_(torch.eye(router.experts))
        report["preparation_bytes"] = preparation_bytes(engine.members, (heard, 0), (started, 0))
        return ServerState(layout, router, theta.to(engine.device), phi[None], report=report)

    @classmethod
    def payload(cls, sizes: Sizes) -> Payload:
        """The router is a fixed map."""
        return mixture_payload(sizes, sizes.served, trained_router=False)
