"""FedWeave: buckets within clients are the unit of expert specialisation, whole clients that of the router."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from fedweave.aggregation.rules import ClientAverage
from fedweave.alignment.align import align, signature_distance
from fedweave.alignment.join import expert_distances, expert_means, joining_limit
from fedweave.discovery.clusterers import Buckets
from fedweave.discovery.signatures import Signatures, warmup_lane
from fedweave.errors import UserError
from fedweave.experts.layout import AdapterLayout
from fedweave.federation.client import Client, Member, Prototypes
from fedweave.federation.engine import Engine, InProcessEngine
from fedweave.federation.spool import Spool
from fedweave.methods.base import Method, ServerState
from fedweave.router.mlp import RouterLayout, vote
from fedweave.router.warmstart import contrast_of, warm_start

_SHOWN_PROTOTYPES = 512  # more distances than that are nothing to read, and a large file


class FedWeave(Method):
    summary = "prototype-level experts, one client-level router (the paper's method)"

    def restart(self, engine: InProcessEngine, start: ServerState) -> ServerState:
        """Buckets are found as ever; each goes to the expert that the given router prefers for its prompts, because
        that is the expert it would get at inference. No warmup, no signatures, and M stays what it is."""
        found = self.form_buckets(engine, engine.clients)
        for client in engine.clients:
            votes = vote(start.router, start.phi, start.shares, client.data.features)  # [n, M]
            client.assignment = [int(votes[bucket].mean(0).argmax()) for bucket in client.buckets]
        labels = [m for client in engine.clients for m in client.assignment]
        report = {
            "bucket_silhouettes": {c.name: b.silhouettes for c, b in zip(engine.clients, found, strict=True)},
            "prototypes": len(labels),
            "experts": start.layout.experts,
            "prototype_labels": labels,
        }
        return replace(start, report=report)

    def signatures(self, engine: Engine) -> Signatures:
        """What clients and server agree on."""
        layout = engine.layout(self.config.experts.rank, experts=1)
        return Signatures(layout, self.config.discovery.sketch, self.config.seed)

    # ---------------------------------------------------------------------------------- client side

    def find_buckets(self, bench: InProcessEngine, clients: Sequence[Client]) -> list[Buckets]:
        """Each client clusters its own prompt features."""
        return bench.cluster(clients)

    def discover(self, bench: InProcessEngine, clients: Sequence[Client]) -> Iterator[Prototypes]:
        """Lines 1-4: every client forms buckets, warms up one LoRA per bucket and sends its signature."""
        found = self.form_buckets(bench, clients)
        signatures = self.warm_up(bench, clients)
        for client, buckets in zip(clients, found, strict=True):
            own = torch.stack(list(islice(signatures, len(client.buckets))))
            yield Prototypes(client.sizes, own, client.note, buckets.silhouettes)

    def warm_up(self, bench: InProcessEngine, clients: Sequence[Client]) -> Iterator[torch.Tensor]:
        """Signature of every bucket, client by client, all in lockstep. Adapters stay with their clients until they
        are asked for."""
        discovery = self.config.discovery
        signer = self.signatures(bench)
        start = signer.layout.initial(self.config.seed)
        lanes = [
            warmup_lane(
                client.data, bucket, start, discovery.warmup_steps, discovery.warmup_batch, self.config.seed,
                client.index, c,
            )
            for client in clients
            for c, bucket in enumerate(client.buckets)
        ]  # fmt: skip
        bench.spool = Spool(signer.layout.size)
        rate = self.config.training.lr if discovery.warmup_lr == "auto" else discovery.warmup_lr
        # a few steps, once: to record them would take longer than to run them
        training = replace(self.config.training, lr=rate, cuda_graphs=False)
        trained = bench.train(signer.layout, None, lanes, "warmup", training=training)
        for lane, result in zip(lanes, trained, strict=True):
            adapter = start + result.delta_theta.cpu()
            if not torch.isfinite(adapter).all():
                raise UserError(
                    f"the warmup of {lane.data.name!r} gave NaN or infinity; lower discovery.warmup_lr."
                )
            bench.spool.append(adapter)
            yield signer.of(adapter)

    # ---------------------------------------------------------------------------------- server side

    def prepare(self, engine: Engine) -> ServerState:
        found = engine.prototypes(self)
        report: dict[str, Any] = {
            "bucket_silhouettes": {c.name: p.silhouettes for c, p in zip(engine.clients, found, strict=True)}
        }
        # Line 5: the server clusters the signatures into M experts.
        report |= self.align_buckets(engine, found)
        # Line 6: an expert starts as the mean of its buckets' warmup adapters; the router starts at random.
        layout = engine.layout(self.config.experts.rank, report["experts"])
        theta = self.start_experts(engine, layout)
        router = self.router_layout(engine, layout.experts)
        phi = self.start_router(engine, router, router.initial(self.config.seed + 1).to(engine.device))
        report["preparation_bytes"] = self.preparation_bytes(engine, layout, router)
        means = self.remember(engine, found, report) if engine.grows else None
        return ServerState(layout, router, theta.to(engine.device), phi[None], signatures=means, report=report)

    def align_buckets(self, engine: Engine, found: list[Prototypes]) -> dict[str, Any]:
        """Decide M and a(i,c) from the signatures."""
        signatures = [signature for told in found for signature in told.signatures]
        distance = signature_distance(self.signatures(engine).blocks(signatures))
        alignment = align(distance, self.config.alignment.max_experts)
        labels = iter(alignment.labels.tolist())
        for client, told in zip(engine.clients, found, strict=True):
            client.assignment = [next(labels) for _ in told.sizes]
        shown = distance.astype(float).round(6).tolist() if len(distance) <= _SHOWN_PROTOTYPES else None
        return {
            "prototypes": len(signatures),
            "experts": alignment.experts,
            "prototype_labels": alignment.labels.tolist(),
            "alignment_silhouettes": alignment.silhouettes,
            "alignment_note": alignment.note,
            "signature_distance": shown,
        }

    def remember(self, engine: Engine, found: list[Prototypes], report: dict[str, Any]) -> torch.Tensor:
        """[M, D] what admitting a newcomer needs of the aligned buckets."""
        blocks = self.signatures(engine).blocks([s for told in found for s in told.signatures])
        labels = report["prototype_labels"]
        asked = self.config.federation.join_distance
        report["join_distance"] = joining_limit(signature_distance(blocks), labels) if asked == "auto" else asked
        return torch.from_numpy(expert_means(blocks, labels, report["experts"]))

    def admit(self, engine: Engine, state: ServerState, newcomer: Member, told: Prototypes) -> str:
        """Each bucket goes to its nearest expert, or is kept apart when that is too far."""
        assert state.signatures is not None
        blocks = self.signatures(engine).blocks(list(told.signatures))
        distances = expert_distances(blocks, state.signatures.cpu().numpy())  # [buckets, M]
        limit, lines = state.report["join_distance"], []
        newcomer.assignment = []
        for c, row in enumerate(distances):
            m, near = int(row.argmin()), bool(row.min() <= limit)
            newcomer.assignment.append(m if near else -1)
            place = f"expert {m}" if near else f"kept apart, the nearest expert {m} is farther than {limit:.2f}"
            lines.append(f"bucket {c} ({told.sizes[c]} examples, distance {row[m]:.2f}) → {place}")
        return "; ".join(lines)

    def start_experts(self, engine: Engine, layout: AdapterLayout) -> torch.Tensor:
        """θ⁰ [P]: means of warmup adapters as a stream; an expert without any starts where all of them did."""
        single = layout.with_experts(1)
        means = [ClientAverage(single.size, torch.device("cpu")) for _ in range(layout.experts)]
        for m, adapter, buckets in engine.starts(self):
            means[m].add(adapter, buckets)
        start = single.initial(self.config.seed)
        return layout.stack([mean.step() if mean.weight else start for mean in means])

    def router_layout(self, engine: Engine, experts: int) -> RouterLayout:
        return RouterLayout(engine.width, self.config.router.hidden, experts, self.config.router.features)

    def warm_start_rounds(self, experts: int) -> int:
        """How often the router travels before round 1."""
        settings = self.config.router.warm_start
        return settings.rounds if settings.enabled and experts > 1 else 0

    def pupils(self, engine: Engine, experts: int) -> tuple[str, list[Any]]:
        """Over which experts the router's warm start runs, and the clients that have something to tell apart."""
        clients, asked = engine.clients, self.config.router.warm_start.contrast
        contrast = contrast_of([client.assignment for client in clients], experts, asked)
        return contrast, [c for c in clients if contrast == "all" or len(set(c.assignment)) > 1]

    def start_router(self, engine: Engine, router: RouterLayout, phi: torch.Tensor) -> torch.Tensor:
        """φ⁰ [Q]: random, or warmed up on the labels a(i,c)."""
        settings = self.config.router.warm_start
        if not self.warm_start_rounds(router.experts):
            return phi
        contrast, pupils = self.pupils(engine, router.experts)
        total = settings.rounds * len(pupils)
        progress = engine.console.progress("router warm start", total, "client rounds")

        def updates(phi: torch.Tensor, t: int) -> Iterator[tuple[torch.Tensor, int]]:
            for update in engine.router_updates(self, router, phi, t, pupils, contrast):
                yield update
                progress.advance()

        phi = warm_start(router, phi, settings.rounds, updates)
        progress.close()
        return phi

    def preparation_bytes(
        self, engine: Engine, layout: AdapterLayout, router: RouterLayout
    ) -> dict[str, dict[str, int]]:
        """What each client sends and receives before round 1: a signature per bucket, its warmup adapters summed
        for every expert that it serves, and the router of the warm start back and forth."""
        signer = self.signatures(engine)
        warm = 4 * router.size * self.warm_start_rounds(layout.experts)
        warmed = {client.name: warm for client in self.pupils(engine, layout.experts)[1]}
        signature = sum(signer.widths) * signer.dtype.itemsize
        adapter = 4 * signer.layout.size
        return {
            client.name: {
                "up": signature * len(client.sizes)
                + adapter * len(set(client.assignment))
                + warmed.get(client.name, 0),
                "down": warmed.get(client.name, 0),
            }
            for client in engine.clients
        }
