"""FedRouter: prompts are routed to the nearest of M centroids, which come from the clients' own centroids.

Clients cluster their prompts as in FedWeave and send the buckets' mean features; the server clusters those into M
(``alignment.max_experts``). In a round a client trains one of its buckets, in turns, with that bucket's adapter. At
inference the nearest centroid decides. So there is neither a signature nor a router to train.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedweave.config import Config
from fedweave.errors import UserError
from fedweave.federation.admission import Receipts
from fedweave.federation.client import Client, Member
from fedweave.federation.compute import Compute
from fedweave.federation.engines.base import Engine
from fedweave.federation.message import Facts, Message
from fedweave.federation.method import Payload, Sizes
from fedweave.federation.state import Broadcast, ServerState
from fedweave.federation.steps import Answer, Asked, Part
from fedweave.methods.fedweave import FedWeave
from fedweave.methods.preparation import discover_units, mixture_payload, preparation_bytes
from fedweave.methods.prototypes import Discover, Prototypes
from fedweave.router.mlp import RouterLayout
from fedweave.router.routed import RoutedExperts
from fedweave.training.batch import Lane
from fedweave.training.schedule import local_schedule


@dataclass
class Centred(Prototypes):
    centroids: torch.Tensor | None = None  # [buckets, d]


class DiscoverCentroids(Discover):
    """As ever, but a bucket is signed by the mean of its prompts' features."""

    def answer(self, compute: Compute, clients: Sequence[Client], question: Message) -> Iterator[Answer]:
        for client, answer in zip(clients, super().answer(compute, clients, question), strict=True):
            means = torch.stack([client.data.features[bucket].mean(0) for bucket in client.buckets])
            yield replace(answer, parts={"centroids": means})

    def parts(self, asked: Asked, figures: Facts) -> dict[str, Part]:
        super().parts(asked, figures)
        return {"centroids": Part((len(figures["sizes"]), asked.width), summed=False)}

    def read(self, asked: Asked, parts: dict[str, torch.Tensor], figures: Facts) -> Centred:
        told = super().read(asked, {}, figures)
        return Centred(told.sizes, told.signatures, told.note, told.silhouettes, parts["centroids"])


class FedRouter(FedWeave):
    summary = "baseline: buckets meet by their mean features, prompts go to the nearest; one bucket a round"

    def __init__(self, config: Config):
        super().__init__(config)
        self.discover = DiscoverCentroids(self, signed=False)
        self.start = self.relabel = None
        self.trains_router = False

    def steps(self) -> list:
        return [step for step in super().steps() if step is not self.warm]

    def prepare(self, engine: Engine, start: RoutedExperts | None = None) -> ServerState:
        if start is not None:
            raise UserError(f"method={self.config.method} cannot start from a bundle; leave init empty.")
        heard = Receipts()
        found = discover_units(engine, self.discover, heard)
        told = [t.centroids for t in found if isinstance(t, Centred) and t.centroids is not None]
        labels, centres = nearest_centres(torch.cat(told), self.config.alignment.max_experts, self.config.seed)
        place = iter(labels)
        for member in engine.members:
            member.assignment = [next(place) for _ in member.sizes]
        layout = engine.layout(self.config.experts.rank, len(centres))
        router, phi = nearest_router(centres)
        report = {
            "bucket_silhouettes": {m.name: t.silhouettes for m, t in zip(engine.members, found, strict=True)},
            "prototypes": len(labels),
            "experts": layout.experts,
            "prototype_labels": labels,
            "preparation_bytes": preparation_bytes(engine.members, (heard, 0)),
        }
        theta = layout.initial(self.config.seed).to(engine.device)
        return ServerState(layout, router, theta, phi[None].to(engine.device), report=report)

    def admit(self, engine: Engine, state: ServerState, newcomer: Member) -> str:
        """The nearest centre, as at inference."""
        assert state.phi is not None
        for _, told in engine.ask(self.discover, [newcomer], Message()):
            assert isinstance(told, Centred) and told.centroids is not None
            newcomer.learn(told.sizes, told.note)
            newcomer.assignment = state.weights(told.centroids).argmax(1).tolist()
            return "; ".join(f"bucket {c} → expert {m}" for c, m in enumerate(newcomer.assignment))
        return ""

    def lane(self, client: Client, state: RoutedExperts, t: int) -> Lane:
        """One bucket a round, in turns."""
        training = self.config.training
        chosen = [client.buckets[t % len(client.buckets)]]
        schedule = local_schedule(
            chosen, training.local_steps, training.batch_size, self.config.seed, t, client.index
        )
        return replace(super().lane(client, state, t), schedule=schedule)

    def local_updates(self, compute: Compute, state: Broadcast, clients: Sequence[Client], t: int) -> Iterator:
        for client, update in zip(clients, super().local_updates(compute, state, clients, t), strict=True):
            c = t % len(client.buckets)
            counts = torch.zeros(state.layout.experts)
            counts[client.assignment[c]] = len(client.buckets[c])
            yield replace(update, counts=counts)

    @classmethod
    def payload(cls, sizes: Sizes) -> Payload:
        plain = replace(sizes, experts=sizes.experts.with_experts(sizes.experts.experts))
        return mixture_payload(plain, up_experts=1, trained_router=False)


def nearest_centres(centroids: torch.Tensor, most: int, seed: int) -> tuple[list[int], torch.Tensor]:
    """(the centre of every bucket, centres [M, d]) by k-means of the clients' centroids [P, d]."""
    from sklearn.cluster import KMeans

    points = centroids.double().cpu().numpy()
    count = min(most, len(np.unique(points.round(6), axis=0)))
    found = KMeans(count, n_init=10, random_state=seed % 2**32).fit(points)
    return found.labels_.tolist(), torch.from_numpy(found.cluster_centers_).float()


def nearest_router(centres: torch.Tensor) -> tuple[RouterLayout, torch.Tensor]:
    """A router whose logits are f·c - ‖c‖²/2, largest for the nearest centre. It is linear, which an MLP can be,
    since gelu(x) - gelu(-x) = x."""
    m, d = centres.shape
    router = RouterLayout(d, 2 * m, m)
    phi = torch.zeros(router.size)
    views = router.views(phi)
    views["linear1.weight"].copy_(torch.cat([centres, -centres]))
    views["linear2.weight"].copy_(torch.cat([torch.eye(m), -torch.eye(m)], 1))
    views["linear2.bias"].copy_(-centres.square().sum(1) / 2)
    return router, phi
