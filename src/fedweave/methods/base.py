"""What a federated method is: how it prepares, what a client trains, what it sends, how the server averages.

Everything a baseline or an ablation changes is one of these functions; the round loop, the trainer and the
engines are the same for all. The defaults are FedAvg of whole updates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from fedweave.aggregation.rules import ClientAverage, ExpertAverage
from fedweave.config import Config
from fedweave.discovery.clusterers import Buckets
from fedweave.discovery.signatures import Signatures
from fedweave.errors import UserError
from fedweave.experts.layout import AdapterLayout
from fedweave.federation.client import Client, Member, Prototypes, Update
from fedweave.federation.engine import Engine, InProcessEngine
from fedweave.federation.parcel import Courier
from fedweave.router.mlp import RouterLayout
from fedweave.router.warmstart import Pupil, warm_start_clients
from fedweave.training.batch import Lane
from fedweave.training.lockstep import LaneResult
from fedweave.training.schedule import allot_steps, local_schedule


@dataclass
class ServerState:
    """What the server holds and broadcasts; ``private`` stands for what clients keep to themselves."""

    layout: AdapterLayout
    router: RouterLayout | None
    theta: torch.Tensor  # [P] the experts
    phi: torch.Tensor | None  # [R, Q] the routers, one for all or one per cluster
    shares: list[float] = field(default_factory=lambda: [1.0])  # [R] weight of each router at inference
    private: torch.Tensor | None = None  # [clients, P] parameters that never leave their client
    signatures: torch.Tensor | None = None  # [M, D] means of the experts' buckets, for clients that come later
    norms: dict[str, list[float]] = field(default_factory=dict)  # median norms of accepted updates, recent rounds
    report: dict[str, Any] = field(default_factory=dict)  # how discovery and alignment went

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint must hold."""
        named = {"theta": self.theta, "phi": self.phi, "private": self.private, "signatures": self.signatures}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


@dataclass
class Served:
    """One model that answers: experts and routers."""

    theta: torch.Tensor  # [P]
    phi: torch.Tensor | None  # [R, Q]
    shares: list[float]  # [R]


class Method(ABC):
    """The steps of a federated method; :class:`fedweave.methods.fedweave.FedWeave` is the fullest example."""

    summary = ""
    uses_labels = False  # True only for an upper bound that is told the tasks
    own_routing = "sparse"  # how the method means its experts to be used at inference

    def __init__(self, config: Config):
        self.config = config

    # ---------------------------------------------------------------------------------- once

    @abstractmethod
    def prepare(self, engine: Engine) -> ServerState:
        """Algorithm 1, lines 1 to 6: fix the clients' buckets and assignments, and the initial state."""

    def restart(self, engine: Any, start: ServerState) -> ServerState:
        """The same for ``init=BUNDLE``: experts and router exist; find which of them each bucket belongs to."""
        raise UserError(f"method={self.config.method} cannot start from a bundle; leave init empty.")

    def signatures(self, engine: Engine) -> Signatures | None:
        """How clients sign their buckets; None where they need not."""
        return None

    def admit(self, engine: Engine, state: ServerState, newcomer: Member, told: Prototypes) -> str:
        """Give a client that comes after alignment its experts, -1 where none fits; returns a line for the log."""
        newcomer.assignment = told.assignment or [0 for _ in told.sizes]
        return ", ".join(f"bucket {c} → expert {m}" for c, m in enumerate(newcomer.assignment))

    # ---------------------------------------------------------------------------------- client side

    def find_buckets(self, bench: InProcessEngine, clients: Sequence[Client]) -> list[Buckets]:
        """Lines 1 and 2. Unless a method says otherwise the unit is the client: everything in one bucket."""
        return [Buckets([np.arange(len(client.data))], {}) for client in clients]

    def form_buckets(self, bench: InProcessEngine, clients: Sequence[Client]) -> list[Buckets]:
        """Every client gets its buckets; the same ones whenever it is asked."""
        found = self.find_buckets(bench, clients)
        for client, buckets in zip(clients, found, strict=True):
            client.buckets, client.note = buckets.members, buckets.note
        return found

    def discover(self, bench: InProcessEngine, clients: Sequence[Client]) -> Iterator[Prototypes]:
        """Lines 1 to 4 at the clients: what each tells of its buckets."""
        self.form_buckets(bench, clients)
        for client in clients:
            client.assignment = [0]
            yield Prototypes(client.sizes, torch.empty(0, 0), assignment=[0])

    def warm_router(
        self,
        bench: InProcessEngine,
        clients: Sequence[Client],
        router: RouterLayout,
        phi: torch.Tensor,
        t: int,
        contrast: str,
    ) -> Iterator[tuple[torch.Tensor, int]]:
        """(Δφ, |D_i|) of the clients after round t of the router's warm start, which learns the labels a(i,c)."""
        pupils = [
            Pupil(client.data.features, client.example_experts(), (self.config.seed, t, client.index))
            for client in clients
        ]
        deltas = warm_start_clients(router, phi, pupils, self.config.router.warm_start, contrast)
        yield from zip(deltas, map(len, clients), strict=True)

    def lane(self, client: Client, state: ServerState, t: int) -> Lane:
        """Lines 10 and 11: what client i trains in round t."""
        training = self.config.training
        schedule = local_schedule(
            client.buckets, training.local_steps, training.batch_size, self.config.seed, t, client.index
        )
        phi = state.phi[0] if state.phi is not None else None
        return Lane(client.data, schedule, state.theta, phi, (self.config.seed, t, client.index))

    def update(self, client: Client, state: ServerState, result: LaneResult) -> Update:
        """Line 12: what client i sends."""
        budget = allot_steps([len(b) for b in client.buckets], self.config.training.local_steps)
        counts = client.counts(state.layout.experts, budget)
        return Update(
            client.index, result.delta_theta, counts, result.delta_phi, len(client), result.losses, result.tokens
        )

    def shared(self, layout: AdapterLayout) -> torch.Tensor | None:
        """The columns of θ that travel, [P] bool; None: all of them."""
        return None

    def courier(self, state: ServerState) -> Courier:
        """Packs what :meth:`update` names, on either side."""
        shared, dtype = self.shared(state.layout), self.config.federation.update_dtype
        return Courier(state.layout, state.router, shared, dtype, state.theta.device)

    def local_updates(
        self, bench: InProcessEngine, state: ServerState, clients: Sequence[Client], t: int
    ) -> Iterator[Update]:
        """Lines 9 to 13: every client trains from the broadcast state; updates come one by one."""
        lanes = [self.lane(client, state, t) for client in clients]
        results = bench.train(state.layout, state.router, lanes, f"round {t + 1}", transient=True)
        for client, result in zip(clients, results, strict=True):
            yield self.update(client, state, result)

    # ---------------------------------------------------------------------------------- server side

    def aggregate(self, state: ServerState, updates: Iterable[Update]) -> ServerState:
        """Line 14: experts over matched prototypes, the router over whole clients."""
        experts = ExpertAverage(state.layout, state.theta.device)
        router = ClientAverage(state.router.size, state.theta.device) if state.router else None
        for update in updates:
            experts.add(update.delta_theta, update.counts)
            if router is not None and update.delta_phi is not None:
                router.add(update.delta_phi, update.samples)
        phi = state.phi + router.step() if router is not None and state.phi is not None else None
        return replace(state, theta=state.theta + experts.step(), phi=phi)

    # ---------------------------------------------------------------------------------- inference

    @property
    def routing(self) -> str:
        """Routing of the test."""
        asked = self.config.evaluation.routing
        return self.own_routing if asked == "auto" else asked

    @property
    def selection(self) -> str:
        """Routing of the validation loss."""
        asked = self.config.evaluation.selection
        return self.routing if asked == "auto" else asked

    def is_whole(self, state: ServerState) -> bool:
        """Whether the server has all of a model that answers; some methods leave a part at the sites."""
        return True

    def served(self, state: ServerState) -> list[Served]:
        """The global model; a method without one names every client's, and figures are their mean."""
        return [Served(state.theta, state.phi, state.shares)]
