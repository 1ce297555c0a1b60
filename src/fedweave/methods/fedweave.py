"""FedWeave: buckets within clients are the unit of expert specialisation, whole clients that of the router."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fedweave.aggregation.rules import ClientAverage
from fedweave.alignment.align import align, signature_distance
from fedweave.discovery.signatures import Signatures, warmup_lane
from fedweave.errors import UserError
from fedweave.experts.layout import AdapterLayout
from fedweave.federation.engine import InProcessEngine
from fedweave.federation.spool import Spool
from fedweave.methods.base import Method, ServerState
from fedweave.router.mlp import RouterLayout
from fedweave.router.warmstart import warm_start

_SHOWN_PROTOTYPES = 512  # more distances than that are nothing to read, and a large file


class FedWeave(Method):
    summary = "prototype-level experts, one client-level router (the paper's method)"

    def prepare(self, engine: InProcessEngine) -> ServerState:
        # Lines 1-4: every client forms buckets, warms up one LoRA per bucket and sends its signature.
        report = self.find_buckets(engine)
        signatures, adapters = self.warm_up(engine)
        # Line 5: the server clusters the signatures into M experts.
        report |= self.align_buckets(engine, signatures)
        # Line 6: an expert starts as the mean of its buckets' warmup adapters; the router starts at random.
        layout = engine.layout(self.config.experts.rank, report["experts"])
        theta = self.start_experts(layout, report["prototype_labels"], adapters)
        router = self.router_layout(engine, layout.experts)
        phi = self.start_router(engine, router, router.initial(self.config.seed + 1).to(engine.device))
        report["preparation_bytes"] = self.preparation_bytes(engine, layout, router)
        return ServerState(layout, router, theta.to(engine.device), phi[None], report=report)

    def find_buckets(self, engine: InProcessEngine) -> dict[str, Any]:
        """Each client clusters its own prompt features; returns what the report keeps."""
        found = engine.discover()
        for client, buckets in zip(engine.clients, found, strict=True):
            client.buckets, client.note = buckets.members, buckets.note
        return {"bucket_silhouettes": {c.name: b.silhouettes for c, b in zip(engine.clients, found, strict=True)}}

    def warm_up(self, engine: InProcessEngine) -> tuple[list[torch.Tensor], Spool]:
        """Signature and warmup adapter of every bucket, client by client, all in lockstep. Adapters stay with their
        clients until they are asked for."""
        discovery = self.config.discovery
        signer = self.signatures(engine)
        start = signer.layout.initial(self.config.seed)
        lanes = [
            warmup_lane(
                client.data, bucket, start, discovery.warmup_steps, discovery.warmup_batch, self.config.seed,
                client.index, c,
            )
            for client in engine.clients
            for c, bucket in enumerate(client.buckets)
        ]  # fmt: skip
        signatures, adapters = [], Spool(signer.layout.size)
        for lane, result in zip(lanes, engine.train(signer.layout, None, lanes, "warmup"), strict=True):
            adapter = start + result.delta_theta.cpu()
            if not torch.isfinite(adapter).all():
                raise UserError(f"the warmup of {lane.data.name!r} gave NaN or infinity; lower training.lr.")
            signatures.append(signer.of(adapter))
            adapters.append(adapter)
        return signatures, adapters

    def signatures(self, engine: InProcessEngine) -> Signatures:
        layout = engine.layout(self.config.experts.rank, experts=1)
        return Signatures(layout, self.config.discovery.sketch, self.config.seed)

    def start_experts(
        self, layout: AdapterLayout, labels: list[int], adapters: Iterable[torch.Tensor]
    ) -> torch.Tensor:
        """θ⁰ [P]: means of warmup adapters as a stream; an expert without any starts where all of them did."""
        single = layout.with_experts(1)
        means = [ClientAverage(single.size, torch.device("cpu")) for _ in range(layout.experts)]
        for label, adapter in zip(labels, adapters, strict=True):
            means[label].add(adapter, 1.0)
        start = single.initial(self.config.seed)
        return layout.stack([mean.step() if mean.weight else start for mean in means])

    def align_buckets(self, engine: InProcessEngine, signatures: list[torch.Tensor]) -> dict[str, Any]:
        """Decide M and a(i,c) from the signatures."""
        distance = signature_distance(self.signatures(engine).blocks(signatures))
        alignment = align(distance, self.config.alignment.max_experts)
        labels = iter(alignment.labels.tolist())
        for client in engine.clients:
            client.assignment = [next(labels) for _ in client.buckets]
        shown = distance.astype(float).round(6).tolist() if len(distance) <= _SHOWN_PROTOTYPES else None
        return {
            "prototypes": len(signatures),
            "experts": alignment.experts,
            "prototype_labels": alignment.labels.tolist(),
            "alignment_silhouettes": alignment.silhouettes,
            "alignment_note": alignment.note,
            "signature_distance": shown,
        }

    def router_layout(self, engine: InProcessEngine, experts: int) -> RouterLayout:
        return RouterLayout(engine.backbone.width, self.config.router.hidden, experts, self.config.router.features)

    def warm_start_rounds(self, experts: int) -> int:
        """How often the router travels before round 1."""
        settings = self.config.router.warm_start
        return settings.rounds if settings.enabled and experts > 1 else 0

    def start_router(self, engine: InProcessEngine, router: RouterLayout, phi: torch.Tensor) -> torch.Tensor:
        """φ⁰ [Q]: random, or warmed up on the labels a(i,c)."""
        settings = self.config.router.warm_start
        if not self.warm_start_rounds(router.experts):
            return phi
        pairs = [
            (client.data.features.to(engine.device), client.example_experts().to(engine.device))
            for client in engine.clients
        ]
        progress = engine.console.progress("router warm start", settings.rounds * len(pairs), "client rounds")
        phi = warm_start(router, phi, pairs, settings, self.config.seed, progress.advance)
        progress.close()
        return phi

    def preparation_bytes(
        self, engine: InProcessEngine, layout: AdapterLayout, router: RouterLayout
    ) -> dict[str, dict[str, int]]:
        """What each client sends and receives before round 1: a signature per bucket, its warmup adapters summed
        for every expert that it serves, and the router of the warm start back and forth."""
        signer = self.signatures(engine)
        warm = 4 * router.size * self.warm_start_rounds(layout.experts)
        signature = sum(signer.widths) * signer.dtype.itemsize
        adapter = 4 * signer.layout.size
        return {
            client.name: {
                "up": signature * len(client.buckets) + adapter * len(set(client.assignment)) + warm,
                "down": warm,
            }
            for client in engine.clients
        }
