"""The paper's two ablations of asymmetric aggregation, and an upper bound that is told the tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from fedweave.discovery.clusterers import Buckets
from fedweave.federation.client import Client, Member, Prototypes, Update
from fedweave.federation.engine import Engine, InProcessEngine
from fedweave.methods.base import Method, ServerState
from fedweave.methods.fedweave import FedWeave
from fedweave.router.mlp import RouterLayout
from fedweave.training.batch import Lane
from fedweave.training.lockstep import LaneResult
from fedweave.training.schedule import allot_steps, local_schedule


class WithoutPrototypeExpert(FedWeave):
    summary = "ablation: experts averaged over whole clients, like the router (client/client)"

    def update(self, client: Client, state: ServerState, result: LaneResult) -> Update:
        update = super().update(client, state, result)
        return replace(update, counts=torch.full_like(update.counts, float(len(client))))


class WithoutClientRouter(FedWeave):
    """Experts as in FedWeave. Then, with the client's trained experts frozen, the router restarts from the
    broadcast state for every bucket, trains that bucket's H_c steps alone, and the endpoints are averaged by bucket
    size. Steps and weights both follow size, so a bucket's effective weight is about its share squared: the
    mismatch is the paper's, kept on purpose."""

    summary = "ablation: router reset for every bucket, endpoints averaged by bucket size (prototype/prototype)"

    def local_updates(
        self, bench: InProcessEngine, state: ServerState, clients: Sequence[Client], t: int
    ) -> Iterator[Update]:
        trained = list(super().local_updates(bench, state, clients, t))
        jobs = [(k, c) for k, client in enumerate(clients) for c in self._active(client)]
        lanes = [self._reset_lane(clients[k], c, state, trained[k], t) for k, c in jobs]
        ends: list[list[tuple[int, torch.Tensor]]] = [[] for _ in clients]
        results = bench.train(state.layout, state.router, lanes, f"router, round {t + 1}", transient=True)
        for (k, c), result in zip(jobs, results, strict=True):
            assert result.delta_phi is not None
            ends[k].append((len(clients[k].buckets[c]), result.delta_phi))
        for update, parts in zip(trained, ends, strict=True):
            total = sum(size for size, _ in parts)
            delta = torch.stack([size / total * phi for size, phi in parts]).sum(0)
            yield replace(update, delta_phi=delta, samples=total)

    def _active(self, client: Client) -> list[int]:
        budget = allot_steps([len(b) for b in client.buckets], self.config.training.local_steps)
        return [c for c, steps in enumerate(budget) if steps]

    def _reset_lane(self, client: Client, c: int, state: ServerState, update: Update, t: int) -> Lane:
        training, seed = self.config.training, self.config.seed
        steps = allot_steps([len(b) for b in client.buckets], training.local_steps)[c]
        schedule = local_schedule(
            [client.buckets[c]], steps, training.batch_size, seed, t, client.index, "reset", c
        )
        assert state.phi is not None
        frozen = torch.zeros(state.layout.size, dtype=torch.bool)
        key = (seed, t, client.index, "reset", c)
        return Lane(client.data, schedule, state.theta + update.delta_theta, state.phi[0], key, frozen)


class Oracle(FedWeave):
    """An upper bound, not a method: buckets are the tasks, and the router is handed the label. Features are one-hot
    task labels (the workspace swaps them in for a method that ``uses_labels``) and the router is a fixed map from
    label to expert."""

    summary = "upper bound: told every task label, one expert per task"
    uses_labels = True

    def find_buckets(self, bench: InProcessEngine, clients: Sequence[Client]) -> list[Buckets]:
        tasks = [client.data.features.argmax(1) for client in clients]
        return [Buckets([(task == m).nonzero()[:, 0].numpy() for m in task.unique()], {}) for task in tasks]

    def discover(self, bench: InProcessEngine, clients: Sequence[Client]) -> Iterator[Prototypes]:
        for client, told in zip(clients, super().discover(bench, clients), strict=True):
            client.assignment = client.data.features.argmax(1).unique().tolist()
            yield replace(told, assignment=client.assignment)

    def align_buckets(self, engine: Engine, found: list[Prototypes]) -> dict[str, Any]:
        for client, told in zip(engine.clients, found, strict=True):
            client.assignment = told.assignment
        return {"experts": engine.width, "prototype_labels": [m for told in found for m in told.assignment]}

    def admit(self, engine: Engine, state: ServerState, newcomer: Member, told: Prototypes) -> str:
        return Method.admit(self, engine, state, newcomer, told)

    def router_layout(self, engine: Engine, experts: int) -> RouterLayout:
        return RouterLayout(experts, experts, experts)

    def warm_start_rounds(self, experts: int) -> int:
        return 0

    def start_router(self, engine: Engine, router: RouterLayout, phi: torch.Tensor) -> torch.Tensor:
        phi.zero_()
        views = router.views(phi)
        views["linear1.weight"].copy_(100 * torch.eye(router.experts))
        views["linear2.weight"].copy_(torch.eye(router.experts))
        return phi

    def lane(self, client: Client, state: ServerState, t: int) -> Lane:
        return replace(super().lane(client, state, t), train_router=False)
