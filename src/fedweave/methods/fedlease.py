"""FedLEASE: client clusters are the unit. One expert and one router per cluster of clients.

A client trains its cluster's expert, beside the other, frozen ones, and its cluster's router. Both are averaged
within the cluster. For global evaluation the cluster routers vote, weighted by their clients' sample share.
(The original's per-token, per-layer router with 2M-1 outputs is replaced by the paper's per-prompt router, so
that granularity is all that differs.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from fedweave.aggregation.rules import ClientAverage, ExpertAverage
from fedweave.discovery.clusterers import Buckets
from fedweave.federation.client import Client, Update
from fedweave.federation.engine import Engine, InProcessEngine
from fedweave.methods.base import Method, ServerState
from fedweave.methods.fedweave import FedWeave
from fedweave.training.batch import Lane


class FedLEASE(FedWeave):
    summary = "baseline: one expert and one router per cluster of clients"
    own_routing = "soft"  # experts are trained side by side with the frozen others, and used so

    def find_buckets(self, bench: InProcessEngine, clients: Sequence[Client]) -> list[Buckets]:
        return Method.find_buckets(self, bench, clients)

    def prepare(self, engine: Engine) -> ServerState:
        state = super().prepare(engine)
        assert state.phi is not None
        sizes = [0.0] * state.layout.experts
        for client in engine.clients:
            sizes[client.assignment[0]] += len(client)
        shares = [size / sum(sizes) for size in sizes]
        return replace(state, phi=state.phi.repeat(state.layout.experts, 1), shares=shares)

    def warm_start_rounds(self, experts: int) -> int:
        return 0  # within a cluster there is only one label to learn

    def lane(self, client: Client, state: ServerState, t: int) -> Lane:
        assert state.phi is not None
        cluster = client.assignment[0]
        lane = super().lane(client, state, t)
        return replace(lane, phi=state.phi[cluster], trainable=state.layout.expert_of_column == cluster)

    def aggregate(self, state: ServerState, updates: Iterable[Update]) -> ServerState:
        assert state.phi is not None and state.router is not None
        device = state.theta.device
        experts = ExpertAverage(state.layout, device)
        routers = [ClientAverage(state.router.size, device) for _ in state.shares]
        for update in updates:
            experts.add(update.delta_theta, update.counts)
            assert update.delta_phi is not None
            routers[int(update.counts.argmax())].add(update.delta_phi, update.samples)
        phi = torch.stack([old + average.step() for old, average in zip(state.phi, routers, strict=True)])
        return replace(state, theta=state.theta + experts.step(), phi=phi)
