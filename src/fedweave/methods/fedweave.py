"""FedWeave: buckets within clients are the unit of expert specialisation, whole clients that of the router."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fedweave.alignment.align import align, signature_distance
from fedweave.discovery.signatures import signature, stack_signatures, warmup_lane
from fedweave.federation.engine import InProcessEngine
from fedweave.methods.base import Method, ServerState
from fedweave.router.mlp import RouterLayout
from fedweave.router.warmstart import warm_start


class FedWeave(Method):
    summary = "prototype-level experts, one client-level router (the paper's method)"

    def prepare(self, engine: InProcessEngine) -> ServerState:
        # Lines 1-4: every client forms buckets, warms up one LoRA per bucket and sends its signature.
        report = self.find_buckets(engine)
        adapters = self.warm_up(engine)
        # Line 5: the server clusters the signatures into M experts.
        report |= self.align_buckets(engine, adapters)
        # Line 6: an expert starts as the mean of its buckets' warmup adapters; the router starts at random.
        labels = torch.tensor(report["prototype_labels"])
        stacked = torch.stack(adapters)  # [prototypes, P of one expert]
        layout = engine.layout(self.config.experts.rank, report["experts"])
        start = layout.with_experts(1).initial(self.config.seed)
        theta = layout.stack([
            stacked[labels == m].mean(0) if (labels == m).any() else start for m in range(layout.experts)
        ])  # fmt: skip
        router = self.router_layout(engine, layout.experts)
        phi = self.start_router(engine, router, router.initial(self.config.seed + 1).to(engine.device))
        return ServerState(layout, router, theta.to(engine.device), phi[None], report=report)

    def restart(self, engine: InProcessEngine, start: ServerState) -> ServerState:
        """Buckets are found as ever; each goes to the expert that the given router prefers for its prompts, because
        that is the expert it would get at inference. No warmup, no signatures, and M stays what it is."""
        report = self.find_buckets(engine)
        assert start.router is not None and start.phi is not None
        for client in engine.clients:
            votes = start.router.vote(start.phi, start.shares, client.data.features.to(start.phi))  # [n, M]
            client.assignment = [int(votes[bucket].mean(0).argmax()) for bucket in client.buckets]
        labels = [m for client in engine.clients for m in client.assignment]
        report |= {"prototypes": len(labels), "experts": start.layout.experts, "prototype_labels": labels}
        return replace(start, report=report)

    def find_buckets(self, engine: InProcessEngine) -> dict[str, Any]:
        """Each client clusters its own prompt features; returns what the report keeps."""
        found = engine.discover()
        for client, buckets in zip(engine.clients, found, strict=True):
            client.buckets, client.note = buckets.members, buckets.note
        return {"bucket_silhouettes": {c.name: b.silhouettes for c, b in zip(engine.clients, found, strict=True)}}

    def warm_up(self, engine: InProcessEngine) -> list[torch.Tensor]:
        """The warmup adapter of every bucket, client by client, [P of one expert] each; all buckets in lockstep."""
        discovery = self.config.discovery
        layout = engine.layout(self.config.experts.rank, experts=1)
        start = layout.initial(self.config.seed)
        lanes = [
            warmup_lane(
                client.data, bucket, start, discovery.warmup_steps, discovery.warmup_batch, self.config.seed,
                client.index, c,
            )
            for client in engine.clients
            for c, bucket in enumerate(client.buckets)
        ]  # fmt: skip
        return [start + result.delta_theta.cpu() for result in engine.train(layout, None, lanes, "warmup")]

    def align_buckets(self, engine: InProcessEngine, adapters: list[torch.Tensor]) -> dict[str, Any]:
        """Decide M and a(i,c) from the signatures."""
        layout = engine.layout(self.config.experts.rank, experts=1)
        distance = signature_distance(stack_signatures([signature(layout, adapter) for adapter in adapters]))
        alignment = align(distance, self.config.alignment.max_experts)
        labels = iter(alignment.labels.tolist())
        for client in engine.clients:
            client.assignment = [next(labels) for _ in client.buckets]
        return {
            "prototypes": len(adapters),
            "experts": alignment.experts,
            "prototype_labels": alignment.labels.tolist(),
            "alignment_silhouettes": alignment.silhouettes,
            "alignment_note": alignment.note,
            "signature_distance": distance.round(6).tolist(),
        }

    def router_layout(self, engine: InProcessEngine, experts: int) -> RouterLayout:
        return RouterLayout(engine.backbone.width, self.config.router.hidden, experts, self.config.router.features)

    def start_router(self, engine: InProcessEngine, router: RouterLayout, phi: torch.Tensor) -> torch.Tensor:
        """φ⁰ [Q]: random, or warmed up on the labels a(i,c)."""
        settings = self.config.router.warm_start
        if not settings.enabled or router.experts == 1:
            return phi
        pairs = [
            (client.data.features.to(engine.device), client.example_experts().to(engine.device))
            for client in engine.clients
        ]
        progress = engine.console.progress("router warm start", settings.rounds * len(pairs), "client rounds")
        phi = warm_start(router, phi, pairs, settings, self.config.seed, progress.advance)
        progress.close()
        return phi
