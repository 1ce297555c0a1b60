"""What a federated method is: how it prepares, what a client trains, what it sends, how the server averages.

Everything a baseline or an ablation changes is one of these functions; the round loop, the trainer and the
engines are the same for all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from fedweave.aggregation.rules import ClientAverage, ExpertAverage
from fedweave.config import Config
from fedweave.experts.layout import AdapterLayout
from fedweave.federation.client import Client, Update
from fedweave.federation.engine import InProcessEngine
from fedweave.router.mlp import RouterLayout
from fedweave.training.batch import Lane
from fedweave.training.lockstep import LaneResult
from fedweave.training.schedule import allot_steps, local_schedule


@dataclass
class ServerState:
    """What the server holds and broadcasts."""

    layout: AdapterLayout
    router: RouterLayout | None
    theta: torch.Tensor  # [P] the experts
    phi: torch.Tensor | None  # [Q] the router
    report: dict[str, Any] = field(default_factory=dict)  # how discovery and alignment went


class Method:
    """FedAvg at the granularity that a subclass chooses; see :class:`fedweave.methods.fedweave.FedWeave`."""

    summary = ""

    def __init__(self, config: Config):
        self.config = config

    # ---------------------------------------------------------------------------------- once

    def prepare(self, engine: InProcessEngine) -> ServerState:
        """Algorithm 1, lines 1 to 6: fix the clients' buckets and assignments, and the initial state."""
        raise NotImplementedError

    # ---------------------------------------------------------------------------------- client side

    def lane(self, client: Client, state: ServerState, t: int) -> Lane:
        """Lines 10 and 11: what client i trains in round t."""
        training = self.config.training
        schedule = local_schedule(
            client.buckets, training.local_steps, training.batch_size, self.config.seed, t, client.index
        )
        key = (self.config.seed, t, client.index)
        return Lane(client.data, schedule, state.theta, state.phi, key)

    def update(self, client: Client, state: ServerState, result: LaneResult) -> Update:
        """Line 12: what client i sends."""
        budget = allot_steps([len(b) for b in client.buckets], self.config.training.local_steps)
        counts = client.counts(state.layout.experts, budget)
        return Update(
            client.index,
            result.delta_theta,
            counts,
            result.delta_phi,
            len(client),
            result.losses,
            result.tokens,
        )

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
        return ServerState(state.layout, state.router, state.theta + experts.step(), phi, state.report)
