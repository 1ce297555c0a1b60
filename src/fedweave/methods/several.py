"""Baselines with several adapters: one per cluster of clients (FedLEASE), per choice of clients (IFCA), and per
cluster of their prompts' mean features (FedRouter).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from fedweave.aggregation.robust import client_average, expert_average
from fedweave.aggregation.standing import Standing
from fedweave.config import Config
from fedweave.federation.admission import Receipts
from fedweave.federation.client import Client, Member
from fedweave.federation.compute import Compute
from fedweave.federation.engines.base import Engine
from fedweave.federation.message import Facts, Message
from fedweave.federation.method import Payload, Sizes
from fedweave.federation.state import Broadcast, ServerState
from fedweave.federation.steps import Answer, Asked, Part
from fedweave.federation.train import Update
from fedweave.methods.fedweave import FedWeave
from fedweave.methods.preparation import Aligned, assign, discover_units, mixture_payload, preparation_bytes
from fedweave.methods.prototypes import Discover
from fedweave.methods.single import SingleAdapter
from fedweave.router.mlp import RouterLayout
from fedweave.router.routed import RoutedExperts
from fedweave.streams import stream_key
from fedweave.training.batch import Lane
from fedweave.training.schedule import local_schedule

_LOOKED_AT = 32  # examples that a client judges the adapters by


class FedLEASE(Aligned):
    """Client clusters are the unit. One expert and one router per cluster of clients: a client trains its cluster's
    expert, beside the other, frozen ones, and its cluster's router, and both are averaged within the cluster. For
    global evaluation the cluster routers vote, weighted by their clients' sample share. (The original's per-token,
    per-layer router with 2M-1 outputs is replaced by the paper's per-prompt router, so that granularity is all that
    differs.)"""

    summary = "baseline: one expert and one router per cluster of clients"
    own_routing = "soft"  # experts are trained side by side with the frozen others, and used so

    def prepare(self, engine: Engine, start: RoutedExperts | None = None) -> ServerState:
        state = super().prepare(engine, start)  # no warm start: within a cluster there is only one label to learn
        if start is not None:
            return state
        assert state.phi is not None
        sizes = [0.0] * state.layout.experts
        for member in engine.members:
            sizes[member.assignment[0]] += len(member)
        shares = [size / sum(sizes) for size in sizes]
        return replace(state, phi=state.phi.repeat(state.layout.experts, 1), shares=shares)

    def lane(self, client: Client, state: RoutedExperts, t: int) -> Lane:
        assert state.phi is not None
        cluster = client.assignment[0]
        lane = super().lane(client, state, t)
        return replace(lane, phi=state.phi[cluster], trainable=state.layout.expert_of_column == cluster)

    def aggregate(self, engine: Engine, state: ServerState, updates: Iterable[Update]) -> ServerState:
        assert state.phi is not None and state.router is not None
        device = state.theta.device
        standing = Standing(engine.members, self.config, state.standing)
        experts = expert_average(state.layout, device, self.config, standing)
        routers = [client_average(state.router.size, device, self.config, standing) for _ in state.shares]
        for update in updates:
            experts.add(update.delta_theta, update.counts, update.samples, update.client)
            assert update.delta_phi is not None
            if update.counts.any():  # else its cluster is in quarantine
                routers[int(update.counts.argmax())].add(update.delta_phi, update.samples, update.client)
        theta = state.theta + experts.step()
        standing.hear(routers)
        phi = torch.stack([old + average.step() for old, average in zip(state.phi, routers, strict=True)])
        return replace(state, theta=theta, phi=phi, standing=standing.evidence)

    @classmethod
    def payload(cls, sizes: Sizes) -> Payload:
        """A client trains and sends its cluster's expert and router alone."""
        plain = replace(sizes, experts=sizes.experts.with_experts(sizes.experts.experts))
        return mixture_payload(plain, up_experts=1, routers=sizes.experts.experts)


class IFCA(SingleAdapter):
    """In every round a client takes the adapter with the lowest loss on its data and trains it; it is averaged over
    the clients that took it. The number M is ``alignment.max_experts``; the original is given it, too. All start
    alike (B = 0), so that in the first round every client draws one. IFCA has no router: a prompt that is no
    client's gets all adapters, weighted by the data of those who took them in the last round."""

    summary = "baseline: each client trains the one of M adapters with the lowest loss on its data"
    own_routing = "soft"
    trains_router = False
    continues = False

    def claims(self, member: Member, experts: int) -> list[int]:
        return [len(member)] * experts  # it chooses anew in every round

    def prepare(self, engine: Engine, start: RoutedExperts | None = None) -> ServerState:
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
        for client, choice in zip(clients, self.choices(compute, state, clients, t), strict=True):
            client.assignment = [choice]
        return super().local_updates(compute, state, clients, t)

    def choices(self, compute: Compute, state: RoutedExperts, clients: Sequence[Client], t: int) -> list[int]:
        """Each client's adapter: the one with the lowest mean loss on a sample of its examples."""
        experts = state.layout.experts
        rngs = [np.random.default_rng(stream_key("ifca", self.config.seed, t, c.index)) for c in clients]
        if not state.theta[state.layout.is_b.to(state.theta.device)].any():
            return [int(rng.integers(experts)) for rng in rngs]
        samples = [
            [client.data.examples[i] for i in rng.permutation(len(client.data))[:_LOOKED_AT]]
            for client, rng in zip(clients, rngs, strict=True)
        ]
        every = [example for sample in samples for example in sample]  # one pass for all clients
        one, gates = state.layout.with_experts(1), torch.ones(len(every), 1)
        losses = [compute.losses(one, theta, every, gates) for theta in state.layout.unstack(state.theta)]
        by_client = torch.stack(losses).split([len(sample) for sample in samples], 1)  # each [M, sample]
        return [int(part.mean(1).argmin()) for part in by_client]

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
    shares = taken / taken.sum().clamp(min=1e-12)  # nobody has taken any where all are in quarantine
    router.views(phi)["linear2.bias"].copy_(shares.clamp(min=1e-12).log())
    return phi


class DiscoverCentroids(Discover):
    """As ever, but a bucket is signed by the mean of its prompts' features."""

    def answer(self, compute: Compute, clients: Sequence[Client], question: Message) -> Iterator[Answer]:
        for client, answer in zip(clients, super().answer(compute, clients, question), strict=True):
            means = torch.stack([client.data.features[bucket].mean(0) for bucket in client.buckets])
            yield replace(answer, parts={"signatures": means})

    def parts(self, asked: Asked, figures: Facts) -> dict[str, Part]:
        super().parts(asked, figures)
        return {"signatures": Part((len(figures["sizes"]), asked.width), summed=False)}


class FedRouter(FedWeave):
    """Clients cluster their prompts as in FedWeave and send the buckets' mean features; the server clusters those
    into M (``alignment.max_experts``). In a round a client trains one of its buckets, in turns, with that bucket's
    adapter. At inference the nearest centroid decides. So there is neither a signature nor a router to train."""

    summary = "baseline: buckets meet by their mean features, prompts go to the nearest; one bucket a round"
    continues = opens = False

    def __init__(self, config: Config):
        super().__init__(config)
        self.discover = DiscoverCentroids(self, signed=False)
        self.start = self.contest = self.relabel = None
        self.trains_router = False

    def steps(self) -> list:
        return [step for step in super().steps() if step is not self.warm]

    def prepare(self, engine: Engine, start: RoutedExperts | None = None) -> ServerState:
        heard = Receipts()
        found = discover_units(engine, self.discover, heard)
        centroids = torch.cat([told.signatures for told in found])  # [P, d]
        labels, centres = nearest_centres(centroids, self.config.alignment.max_experts, self.config.seed)
        layout = engine.layout(self.config.experts.rank, len(centres))
        router, phi = nearest_router(centres)
        report = assign(engine.members, found, layout.experts, labels)
        report["preparation_bytes"] = preparation_bytes(engine.members, (heard, 0))
        theta = layout.initial(self.config.seed).to(engine.device)
        return ServerState(layout, router, theta, phi[None].to(engine.device), report=report)

    def admit(self, engine: Engine, state: ServerState, newcomer: Member) -> str:
        """The nearest centre, as at inference."""
        assert state.phi is not None
        for _, told in engine.ask(self.discover, [newcomer], Message()):
            newcomer.learn(told.sizes, told.note)
            newcomer.assignment = state.weights(told.signatures).argmax(1).tolist()
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
            counts[client.assignment[c]] = client.boast * len(client.buckets[c])
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
