"""FedWeave: buckets within clients are the unit of expert specialisation, whole clients that of the router."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch

from fedweave.alignment.align import align, signature_distance
from fedweave.discovery.clusterers import Buckets
from fedweave.discovery.signatures import signature, stack_signatures, warmup_lane
from fedweave.federation.client import Client, Prototypes
from fedweave.federation.engine import Engine, InProcessEngine
from fedweave.methods.base import Method, ServerState
from fedweave.router.mlp import RouterLayout
from fedweave.router.warmstart import warm_start


class FedWeave(Method):
    summary = "prototype-level experts, one client-level router (the paper's method)"

    # ---------------------------------------------------------------------------------- client side

    def discover(self, bench: InProcessEngine, clients: Sequence[Client]) -> Iterator[Prototypes]:
        """Lines 1-4: every client forms buckets and warms up one LoRA per bucket."""
        found = self.form_buckets(bench, clients)
        adapters = iter(self.warm_up(bench, clients))
        for client, buckets in zip(clients, found, strict=True):
            own = torch.stack(list(islice(adapters, len(client.buckets))))
            yield Prototypes(client.sizes, own, client.note, buckets.silhouettes)

    def find_buckets(self, bench: InProcessEngine, clients: Sequence[Client]) -> list[Buckets]:
        """Each client clusters its own prompt features."""
        return bench.cluster(clients)

    def warm_up(self, bench: InProcessEngine, clients: Sequence[Client]) -> list[torch.Tensor]:
        """The warmup adapter of every bucket, client by client, [P of one expert] each; all buckets in lockstep."""
        discovery = self.config.discovery
        layout = bench.layout(self.config.experts.rank, experts=1)
        start = layout.initial(self.config.seed)
        lanes = [
            warmup_lane(
                client.data, bucket, start, discovery.warmup_steps, discovery.warmup_batch, self.config.seed,
                client.index, c,
            )
            for client in clients
            for c, bucket in enumerate(client.buckets)
        ]  # fmt: skip
        return [start + result.delta_theta.cpu() for result in bench.train(layout, None, lanes, "warmup")]

    # ---------------------------------------------------------------------------------- server side

    def prepare(self, engine: Engine) -> ServerState:
        found = engine.prototypes(self)
        # Line 5: the server clusters the signatures into M experts.
        named = zip(engine.clients, found, strict=True)
        report: dict[str, Any] = {
            "bucket_silhouettes": {c.name: told.silhouettes for c, told in named if told.silhouettes}
        }
        report |= self.align_buckets(engine, found)
        # Line 6: an expert starts as the mean of its buckets' warmup adapters; the router starts at random.
        labels = torch.tensor(report["prototype_labels"])
        stacked = torch.cat([told.adapters for told in found])  # [prototypes, P of one expert]
        layout = engine.layout(self.config.experts.rank, report["experts"])
        start = layout.with_experts(1).initial(self.config.seed)
        theta = layout.stack([
            stacked[labels == m].mean(0) if (labels == m).any() else start for m in range(layout.experts)
        ])  # fmt: skip
        router = self.router_layout(engine, layout.experts)
        phi = self.start_router(engine, router, router.initial(self.config.seed + 1).to(engine.device))
        return ServerState(layout, router, theta.to(engine.device), phi[None], report=report)

    def align_buckets(self, engine: Engine, found: list[Prototypes]) -> dict[str, Any]:
        """Decide M and a(i,c) from the signatures."""
        layout = engine.layout(self.config.experts.rank, experts=1)
        adapters = [adapter for told in found for adapter in told.adapters]
        distance = signature_distance(stack_signatures([signature(layout, adapter) for adapter in adapters]))
        alignment = align(distance, self.config.alignment.max_experts)
        labels = iter(alignment.labels.tolist())
        for client, told in zip(engine.clients, found, strict=True):
            client.assignment = [next(labels) for _ in told.sizes]
        return {
            "prototypes": len(adapters),
            "experts": alignment.experts,
            "prototype_labels": alignment.labels.tolist(),
            "alignment_silhouettes": alignment.silhouettes,
            "alignment_note": alignment.note,
            "signature_distance": distance.round(6).tolist(),
        }

    def router_layout(self, engine: Engine, experts: int) -> RouterLayout:
        return RouterLayout(engine.width, self.config.router.hidden, experts, self.config.router.features)

    def start_router(self, engine: Engine, router: RouterLayout, phi: torch.Tensor) -> torch.Tensor:
        """φ⁰ [Q]: random, or warmed up on the labels a(i,c)."""
        settings = self.config.router.warm_start
        if not settings.enabled or router.experts == 1:
            return phi
        progress = engine.console.progress(
            "router warm start", settings.rounds * len(engine.clients), "client rounds"
        )

        def updates(phi: torch.Tensor, t: int) -> Iterator[tuple[torch.Tensor, int]]:
            for update in engine.router_updates(self, router, phi, t):
                yield update
                progress.advance()

        phi = warm_start(router, phi, settings.rounds, updates)
        progress.close()
        return phi
