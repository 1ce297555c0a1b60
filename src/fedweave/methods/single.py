"""Single-adapter baselines: one LoRA for everyone, of the rank that four experts have together.

FedIT averages all of it. FFA-LoRA freezes A at its random start and trains B alone. FedSA-LoRA averages A and
leaves each client its own B. Local-only shares nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from fedweave.aggregation.rules import ClientAverage
from fedweave.errors import UserError
from fedweave.experts.layout import AdapterLayout
from fedweave.federation.client import Client, Update
from fedweave.federation.engine import Engine
from fedweave.methods.base import Method, Served, ServerState
from fedweave.training.batch import Lane
from fedweave.training.lockstep import LaneResult


class FedIT(Method):
    summary = "baseline: one shared LoRA, both factors averaged by sample count"

    def prepare(self, engine: Engine) -> ServerState:
        layout = engine.layout(self.config.experts.single_rank, experts=1)
        return self.restart(engine, ServerState(layout, None, layout.initial(self.config.seed), None))

    def restart(self, engine: Engine, start: ServerState) -> ServerState:
        engine.prototypes(self)
        samples = [len(client) for client in engine.clients]
        report = {"experts": 1, "client_samples": samples}
        return replace(start, theta=start.theta.to(engine.device), report=report)


class FFALoRA(FedIT):
    summary = "baseline: A frozen at a common random start, B trained and averaged"

    def lane(self, client: Client, state: ServerState, t: int) -> Lane:
        return replace(super().lane(client, state, t), trainable=state.layout.is_b)

    def shared(self, layout: AdapterLayout) -> torch.Tensor:
        return layout.is_b


class _OwnParameters(FedIT):
    """Row i of ``private`` is what client i keeps to itself. In a real federation there are no rows: a site has its
    own, adds to it what its update keeps, and the server sees neither."""

    def restart(self, engine: Engine, start: ServerState) -> ServerState:
        state = super().restart(engine, start)
        return replace(state, private=engine.private(state.theta))

    def is_whole(self, state: ServerState) -> bool:
        return state.private is not None

    def served(self, state: ServerState) -> list[Served]:
        if not self.is_whole(state):
            raise UserError(
                f"{self.config.method} leaves parameters at its sites: this server has no whole model to use."
            )
        return super().served(state)

    def own(self, client: Client, state: ServerState) -> torch.Tensor:
        """[P] what the client has kept so far."""
        if state.private is not None:
            return state.private[client.index]
        if client.own is None:
            client.own = state.layout.initial(self.config.seed).to(state.theta)
        return client.own

    def update(self, client: Client, state: ServerState, result: LaneResult) -> Update:
        return replace(super().update(client, state, result), kept=result.delta_theta)


class FedSALoRA(_OwnParameters):
    summary = "baseline: A averaged, every client keeps its own B"

    def lane(self, client: Client, state: ServerState, t: int) -> Lane:
        own = torch.where(state.layout.is_b.to(state.theta.device), self.own(client, state), state.theta)
        return replace(super().lane(client, state, t), theta=own)

    def shared(self, layout: AdapterLayout) -> torch.Tensor:
        return ~layout.is_b

    def aggregate(self, state: ServerState, updates: Iterable[Update]) -> ServerState:
        """A moves by the weighted mean; B moves at home. For global evaluation θ carries the mean of all B, where
        the server has them."""
        is_b = state.layout.is_b.to(state.theta.device)
        private = state.private.clone() if state.private is not None else None
        shared = ClientAverage(state.layout.size, state.theta.device)
        for update in updates:
            if private is not None and update.kept is not None:
                private[update.client] += torch.where(is_b, update.kept, 0.0)
            shared.add(torch.where(is_b, 0.0, update.delta_theta), update.samples)
        if private is None:
            return replace(state, theta=state.theta + shared.step())
        weights = torch.tensor(state.report["client_samples"], device=private.device, dtype=private.dtype)
        mean_b = (weights[:, None] * private).sum(0) / weights.sum()
        return replace(state, theta=torch.where(is_b, mean_b, state.theta + shared.step()), private=private)


class LocalOnly(_OwnParameters):
    summary = "reference: every client trains alone; figures are the mean over clients"

    def lane(self, client: Client, state: ServerState, t: int) -> Lane:
        return replace(super().lane(client, state, t), theta=self.own(client, state))

    def shared(self, layout: AdapterLayout) -> torch.Tensor:
        return torch.zeros(layout.size, dtype=torch.bool)

    def aggregate(self, state: ServerState, updates: Iterable[Update]) -> ServerState:
        """Nothing is communicated: each client keeps what it learned."""
        private = state.private.clone() if state.private is not None else None
        for update in updates:
            if private is not None and update.kept is not None:
                private[update.client] += update.kept
        return replace(state, private=private)

    def served(self, state: ServerState) -> list[Served]:
        super().served(state)
        assert state.private is not None
        return [Served(own, None, [1.0]) for own in state.private]
