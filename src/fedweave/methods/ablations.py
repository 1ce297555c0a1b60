"""The paper's two ablations of asymmetric aggregation, and an upper bound that is told the tasks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from fedweave.federation.client import Client, Update
from fedweave.federation.engine import InProcessEngine
from fedweave.methods.base import ServerState
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
        self, engine: InProcessEngine, state: ServerState, participants: list[Client], t: int
    ) -> Iterator[Update]:
        trained = list(super().local_updates(engine, state, participants, t))
        jobs = [(k, c) for k, client in enumerate(participants) for c in self._active(client)]
        lanes = [self._reset_lane(participants[k], c, state, trained[k], t) for k, c in jobs]
        ends: list[list[tuple[int, torch.Tensor]]] = [[] for _ in participants]
        results = engine.train(state.layout, state.router, lanes, f"round {t + 1} router", transient=True)
        for (k, c), result in zip(jobs, results, strict=True):
            assert result.delta_phi is not None
            ends[k].append((len(participants[k].buckets[c]), result.delta_phi))
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

    def find_buckets(self, engine: InProcessEngine) -> dict:
        for client in engine.clients:
            task = client.data.features.argmax(1)
            client.buckets = [(task == m).nonzero()[:, 0].numpy() for m in task.unique()]
            client.assignment = task.unique().tolist()
        return {}

    def align_buckets(self, engine: InProcessEngine, signatures: list[torch.Tensor]) -> dict:
        return {"experts": engine.clients[0].data.features.shape[1], "prototype_labels": [
            m for client in engine.clients for m in client.assignment
        ]}  # fmt: skip

    def router_layout(self, engine: InProcessEngine, experts: int) -> RouterLayout:
        return RouterLayout(experts, experts, experts)

    def warm_start_rounds(self, experts: int) -> int:
        return 0

    def start_router(self, engine: InProcessEngine, router: RouterLayout, phi: torch.Tensor) -> torch.Tensor:
        phi.zero_()
        views = router.views(phi)
        views["linear1.weight"].copy_(100 * torch.eye(router.experts))
        views["linear2.weight"].copy_(torch.eye(router.experts))
        return phi

    def lane(self, client: Client, state: ServerState, t: int) -> Lane:
        return replace(super().lane(client, state, t), train_router=False)
