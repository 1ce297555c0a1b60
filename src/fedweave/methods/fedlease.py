"""FedLEASE: client clusters are the unit. One expert and one router per cluster of clients.

A client trains its cluster's expert, beside the other, frozen ones, and its cluster's router. Both are averaged
within the cluster. For global evaluation the cluster routers vote, weighted by their clients' sample share.
(The original's per-token, per-layer router with 2M-1 outputs is replaced by the paper's per-prompt router, so
that granularity is all that differs.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from fedweave.aggregation.rules import ClientAverage, ExpertAverage
from fedweave.alignment.align import align
from fedweave.config import Config
from fedweave.federation.client import Client, Member
from fedweave.federation.engines.base import Engine
from fedweave.federation.method import Method, Payload, Sizes
from fedweave.federation.state import ServerState
from fedweave.federation.steps import Step
from fedweave.federation.train import Update
from fedweave.methods.preparation import (
    Align,
    admit_by_signature,
    continue_experts,
    mixture_payload,
    prepare_experts,
)
from fedweave.methods.prototypes import Discover, StartExperts
from fedweave.router.routed import RoutedExperts
from fedweave.training.batch import Lane


class FedLEASE(Method):
    summary = "baseline: one expert and one router per cluster of clients"
    own_routing = "soft"  # experts are trained side by side with the frozen others, and used so
    discovers = True

    def __init__(self, config: Config):
        super().__init__(config)
        self.discover = Discover(self)
        self.start = StartExperts(self.discover)
        self.align: Align = align

    def steps(self) -> list[Step]:
        return [self.discover, self.start, *super().steps()]

    def prepare(self, engine: Engine, start: RoutedExperts | None = None) -> ServerState:
        if start is not None:
            return continue_experts(engine, self.discover, start)
        # within a cluster there is only one label to learn: no warm start
        state = prepare_experts(engine, self.discover, self.start, self.align, warm=None)
        assert state.phi is not None
        sizes = [0.0] * state.layout.experts
        for member in engine.members:
            sizes[member.assignment[0]] += len(member)
        shares = [size / sum(sizes) for size in sizes]
        return replace(state, phi=state.phi.repeat(state.layout.experts, 1), shares=shares)

    def admit(self, engine: Engine, state: ServerState, newcomer: Member) -> str:
        return admit_by_signature(engine, self.discover, state, newcomer)

    def lane(self, client: Client, state: RoutedExperts, t: int) -> Lane:
        assert state.phi is not None
        cluster = client.assignment[0]
        lane = super().lane(client, state, t)
        return replace(lane, phi=state.phi[cluster], trainable=state.layout.expert_of_column == cluster)

    def aggregate(self, engine: Engine, state: ServerState, updates: Iterable[Update]) -> ServerState:
        assert state.phi is not None and state.router is not None
        device = state.theta.device
        experts = ExpertAverage(state.layout, device)
        routers = [ClientAverage(state.router.size, device) for _ in state.shares]
        for update in updates:
            experts.add(update.delta_theta, update.counts, update.samples)
            assert update.delta_phi is not None
            routers[int(update.counts.argmax())].add(update.delta_phi, update.samples)
        phi = torch.stack([old + average.step() for old, average in zip(state.phi, routers, strict=True)])
        return replace(state, theta=state.theta + experts.step(), phi=phi)

    @classmethod
    def payload(cls, sizes: Sizes) -> Payload:
        """A client trains and sends its cluster's expert and router alone."""
        plain = replace(sizes, experts=sizes.experts.with_experts(sizes.experts.experts))
        return mixture_payload(plain, up_experts=1, routers=sizes.experts.experts)
