"""The paper's two ablations of asymmetric aggregation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from fedweave.config import Config
from fedweave.errors import UserError
from fedweave.federation.client import Client
from fedweave.federation.compute import Compute
from fedweave.federation.method import Payload, Sizes
from fedweave.federation.state import Broadcast
from fedweave.federation.train import Update
from fedweave.methods.fedweave import FedWeave
from fedweave.methods.preparation import mixture_payload
from fedweave.router.routed import RoutedExperts
from fedweave.training.batch import Lane
from fedweave.training.schedule import allot_steps, local_schedule


class WithoutPrototypeExpert(FedWeave):
    summary = "ablation: experts averaged over whole clients, like the router (client/client)"

    def counts(self, client: Client, state: RoutedExperts) -> torch.Tensor:
        return torch.full((state.layout.experts,), float(len(client)))

    @classmethod
    def payload(cls, sizes: Sizes) -> Payload:
        return mixture_payload(sizes, sizes.experts.experts)


class WithoutClientRouter(FedWeave):
    """Experts as in FedWeave. Then, with the client's trained experts frozen, the router restarts from the
    broadcast state for every bucket, trains that bucket's H_c steps alone, and the endpoints are averaged by bucket
    size. Steps and weights both follow size, so a bucket's effective weight is about its share squared: the
    mismatch is the paper's, kept on purpose."""

    summary = "ablation: router reset for every bucket, endpoints averaged by bucket size (prototype/prototype)"

    def __init__(self, config: Config):
        super().__init__(config)
        if not self.trains_router:
            raise UserError(f"method={config.method} trains its router; set router.training=soft.")

    def local_updates(
        self, compute: Compute, state: Broadcast, clients: Sequence[Client], t: int
    ) -> Iterator[Update]:
        trained = list(super().local_updates(compute, state, clients, t))
        budgets = [allot_steps(client.sizes, self.config.training.local_steps) for client in clients]
        jobs = [(k, c) for k, budget in enumerate(budgets) for c, steps in enumerate(budget) if steps]
        lanes = [self._reset_lane(clients[k], c, state, trained[k], t) for k, c in jobs]
        ends: list[list[tuple[int, torch.Tensor]]] = [[] for _ in clients]
        results = compute.train(
            state.layout, state.router, lanes, f"router, round {t + 1}", transient=True, pace=self.pace(state, t)
        )
        for (k, c), result in zip(jobs, results, strict=True):
            assert result.delta_phi is not None
            ends[k].append((len(clients[k].buckets[c]), result.delta_phi))
        for update, parts in zip(trained, ends, strict=True):
            total = sum(size for size, _ in parts)
            delta = torch.stack([size / total * phi for size, phi in parts]).sum(0)
            yield replace(update, delta_phi=delta, samples=total)

    def _reset_lane(self, client: Client, c: int, state: RoutedExperts, update: Update, t: int) -> Lane:
        training, seed = self.config.training, self.config.seed
        steps = allot_steps(client.sizes, training.local_steps)[c]
        schedule = local_schedule(
            [client.buckets[c]], steps, training.batch_size, seed, t, client.index, "reset", c
        )
        assert state.phi is not None
        frozen = torch.zeros(state.layout.size, dtype=torch.bool)
        key = (seed, t, client.index, "reset", c)
        return Lane(client.data, schedule, state.theta + update.delta_theta, state.phi[0], key, frozen)
