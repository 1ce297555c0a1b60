"""IFCA with LoRA experts: in every round a client takes the adapter with the lowest loss on its data and trains it.

An adapter is averaged over the clients that took it. Their number M is ``alignment.max_experts``; the original is
given it, too. All start alike (B = 0), so that in the first round every client draws one. IFCA has no router: a
prompt that is no client's gets all adapters, weighted by the data of those who took them in the last round.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from fedweave.errors import UserError
from fedweave.federation.client import Client
from fedweave.federation.compute import Compute
from fedweave.federation.engines.base import Engine
from fedweave.federation.method import Payload, Sizes
from fedweave.federation.state import Broadcast, ServerState
from fedweave.federation.train import Update
from fedweave.methods.single import SingleAdapter
from fedweave.router.mlp import RouterLayout
from fedweave.router.routed import RoutedExperts
from fedweave.streams import stream_key
from fedweave.training.batch import Lane

_LOOKED_AT = 64  # examples that a client judges the adapters by


class IFCA(SingleAdapter):
    summary = "baseline: each client trains the one of M adapters with the lowest loss on its data"
    own_routing = "soft"
    trains_router = False

    def prepare(self, engine: Engine, start: RoutedExperts | None = None) -> ServerState:
        if start is not None:
            raise UserError(f"method={self.config.method} cannot start from a bundle; leave init empty.")
        state, experts = super().prepare(engine), self.config.alignment.max_experts
        layout = engine.layout(self.config.experts.single_rank, experts)
        theta = layout.stack([layout.with_experts(1).initial(self.config.seed + m) for m in range(experts)])
        router = RouterLayout(engine.width, 1, experts)
        phi = by_share(router, torch.ones(experts))[None]
        report = state.report | {"experts": experts}
        return ServerState(layout, router, theta.to(engine.device), phi.to(engine.device), report=report)

    def local_updates(
        self, compute: Compute, state: Broadcast, clients: Sequence[Client], t: int
    ) -> Iterator[Update]:
        for client in clients:
            client.assignment = [self.choice(compute, state, client, t)]
        return super().local_updates(compute, state, clients, t)

    def choice(self, compute: Compute, state: RoutedExperts, client: Client, t: int) -> int:
        """The adapter with the lowest mean loss on a sample of the client's examples."""
        experts = state.layout.experts
        rng = np.random.default_rng(stream_key("ifca", self.config.seed, t, client.index))
        if not state.theta[state.layout.is_b.to(state.theta.device)].any():
            return int(rng.integers(experts))
        sample = [client.data.examples[i] for i in rng.permutation(len(client.data))[:_LOOKED_AT]]
        losses = [
            compute.losses(state.layout, state.theta, sample, gates.expand(len(sample), -1)).mean()
            for gates in torch.eye(experts)
        ]
        return int(torch.stack(losses).argmin())

    def lane(self, client: Client, state: RoutedExperts, t: int) -> Lane:
        gates = F.one_hot(self.labels(client, state), state.layout.experts).float()
        return replace(super().lane(client, state, t), phi=None, gates=gates)

    def aggregate(self, engine: Engine, state: ServerState, updates: Iterable[Update]) -> ServerState:
        router, taken = state.router, torch.zeros(state.layout.experts)
        assert router is not None

        def counted() -> Iterator[Update]:
            for update in updates:
                taken.add_(update.counts.cpu())
                yield update

        state = super().aggregate(engine, state, counted())
        return replace(state, phi=by_share(router, taken)[None].to(state.theta.device))

    @classmethod
    def payload(cls, sizes: Sizes) -> Payload:
        """A client trains and sends the one it took, and receives all."""
        one, m = sizes.single.with_experts(1).size, sizes.experts.experts
        return Payload(sizes.single.rank, m, routers=0, trainable=m * one, up=one, down=m * one)


def by_share(router: RouterLayout, taken: torch.Tensor) -> torch.Tensor:
    """φ [Q] that gives every prompt the same weights: those of ``taken`` [M]."""
    phi = torch.zeros(router.size)
    router.views(phi)["linear2.bias"].copy_((taken / taken.sum()).clamp(min=1e-12).log())
    return phi
