"""Single-adapter baselines: one LoRA for everyone, of the rank that four experts have together.

FedIT averages all of it. FFA-LoRA freezes A at its random start and trains B alone. FedSA-LoRA averages A and
leaves each client its own B. Local-only shares nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from fedweave.aggregation.rules import ClientAverage
from fedweave.federation.client import Client, Update
from fedweave.federation.engine import InProcessEngine
from fedweave.methods.base import Method, Served, ServerState, one_bucket
from fedweave.training.batch import Lane


class FedIT(Method):
    summary = "baseline: one shared LoRA, both factors averaged by sample count"

    def prepare(self, engine: InProcessEngine) -> ServerState:
        layout = engine.layout(self.config.experts.single_rank, experts=1)
        return self.restart(engine, ServerState(layout, None, layout.initial(self.config.seed), None))

    def restart(self, engine: InProcessEngine, start: ServerState) -> ServerState:
        one_bucket(engine)
        samples = [len(client) for client in engine.clients]
        report = {"experts": 1, "client_samples": samples}
        return replace(start, theta=start.theta.to(engine.device), report=report)


class FFALoRA(FedIT):
    summary = "baseline: A frozen at a common random start, B trained and averaged"

    def lane(self, client: Client, state: ServerState, t: int) -> Lane:
        return replace(super().lane(client, state, t), trainable=state.layout.is_b)


class _OwnParameters(FedIT):
    """Row i of ``private`` is what client i keeps to itself."""

    def restart(self, engine: InProcessEngine, start: ServerState) -> ServerState:
        state = super().restart(engine, start)
        return replace(state, private=state.theta.repeat(len(engine.clients), 1))


class FedSALoRA(_OwnParameters):
    summary = "baseline: A averaged, every client keeps its own B"

    def lane(self, client: Client, state: ServerState, t: int) -> Lane:
        assert state.private is not None
        own = torch.where(state.layout.is_b.to(state.theta.device), state.private[client.index], state.theta)
        return replace(super().lane(client, state, t), theta=own)

    def aggregate(self, state: ServerState, updates: Iterable[Update]) -> ServerState:
        """A moves by the weighted mean; B moves at home. For global evaluation θ carries the mean of all B."""
        assert state.private is not None
        is_b = state.layout.is_b.to(state.theta.device)
        private = state.private.clone()
        shared = ClientAverage(state.layout.size, state.theta.device)
        for update in updates:
            private[update.client] += torch.where(is_b, update.delta_theta, 0.0)
            shared.add(torch.where(is_b, 0.0, update.delta_theta), update.samples)
        weights = torch.tensor(state.report["client_samples"], device=private.device, dtype=private.dtype)
        mean_b = (weights[:, None] * private).sum(0) / weights.sum()
        return replace(state, theta=torch.where(is_b, mean_b, state.theta + shared.step()), private=private)


class LocalOnly(_OwnParameters):
    summary = "reference: every client trains alone; figures are the mean over clients"

    def lane(self, client: Client, state: ServerState, t: int) -> Lane:
        assert state.private is not None
        return replace(super().lane(client, state, t), theta=state.private[client.index])

    def aggregate(self, state: ServerState, updates: Iterable[Update]) -> ServerState:
        """Nothing is communicated: each client keeps what it learned."""
        assert state.private is not None
        private = state.private.clone()
        for update in updates:
            private[update.client] += update.delta_theta
        return replace(state, private=private)

    def served(self, state: ServerState) -> list[Served]:
        assert state.private is not None
        return [Served(own, None, [1.0]) for own in state.private]
