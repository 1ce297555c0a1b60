"""FedWeave: buckets within clients are the unit of expert specialisation, whole clients that of the router."""

from __future__ import annotations

import torch

from fedweave.alignment.align import align, signature_distance
from fedweave.discovery.signatures import signature, stack_signatures, warmup_lane
from fedweave.federation.client import Client
from fedweave.federation.engine import InProcessEngine
from fedweave.methods.base import Method, ServerState
from fedweave.router.mlp import RouterLayout
from fedweave.router.warmstart import warm_start


class FedWeave(Method):
    summary = "prototype-level experts, one client-level router (the paper's method)"

    def prepare(self, engine: InProcessEngine) -> ServerState:
        config = self.config
        single = engine.layout(config.experts.rank, experts=1)
        start = single.initial(config.seed)

        # Lines 1-4: every client forms buckets, warms up one LoRA per bucket and sends its signature.
        found = engine.discover()
        for client, buckets in zip(engine.clients, found, strict=True):
            client.buckets, client.note = buckets.members, buckets.note
        prototypes = [(client, c) for client in engine.clients for c in range(len(client.buckets))]
        adapters = self._warm_up(engine, prototypes, start)
        signatures = [signature(single, adapter) for adapter in adapters]

        # Line 5: the server clusters the signatures into M experts.
        distance = signature_distance(stack_signatures(signatures))
        alignment = align(distance, config.alignment.max_experts)
        for client in engine.clients:
            client.assignment = [
                int(m) for (owner, _), m in zip(prototypes, alignment.labels, strict=True) if owner is client
            ]

        # Line 6: an expert starts as the mean of its buckets' warmup adapters; the router starts at random.
        layout = single.with_experts(alignment.experts)
        stacked = torch.stack(adapters)  # [prototypes, P of one expert]
        theta = layout.stack(
            [stacked[torch.from_numpy(alignment.labels == m)].mean(0) for m in range(alignment.experts)]
        )
        router = RouterLayout(
            engine.backbone.width, config.router.hidden, alignment.experts, config.router.features
        )
        phi = router.initial(config.seed + 1).to(engine.device)
        if config.router.warm_start.enabled and alignment.experts > 1:
            pairs = [
                (c.data.features.to(engine.device), c.example_experts().to(engine.device)) for c in engine.clients
            ]
            phi = warm_start(router, phi, pairs, config.router.warm_start, config.seed)
        report = {
            "prototypes": len(prototypes),
            "experts": alignment.experts,
            "alignment_silhouettes": alignment.silhouettes,
            "alignment_note": alignment.note,
            "bucket_silhouettes": {c.name: b.silhouettes for c, b in zip(engine.clients, found, strict=True)},
            "signature_distance": distance.round(6).tolist(),
            "prototype_labels": alignment.labels.tolist(),
        }
        return ServerState(layout, router, theta.to(engine.device), phi, report)

    def _warm_up(
        self, engine: InProcessEngine, prototypes: list[tuple[Client, int]], start: torch.Tensor
    ) -> list[torch.Tensor]:
        """The warmup adapter of every bucket, [P of one expert] each, all buckets in lockstep."""
        discovery = self.config.discovery
        lanes = [
            warmup_lane(
                client.data,
                client.buckets[c],
                start,
                discovery.warmup_steps,
                discovery.warmup_batch,
                self.config.seed,
                client.index,
                c,
            )
            for client, c in prototypes
        ]
        layout = engine.layout(self.config.experts.rank, experts=1)
        return [start + result.delta_theta.cpu() for result in engine.train(layout, None, lanes, "warmup")]
