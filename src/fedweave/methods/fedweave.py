"""FedWeave: buckets within clients are the unit of expert specialisation, whole clients that of the router.

How the server averages is the default of :class:`fedweave.federation.method.Method`: the paper's asymmetric
aggregation, of which FedAvg is the case of one expert. What a client trains is the paper's, too, unless the config
asks for more (docs/method.md): a part that experts share, labels by the router, one expert an example. The paper's
two ablations of asymmetric aggregation stand below it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from fedweave.config import Config
from fedweave.errors import UserError
from fedweave.federation.admission import Receipts
from fedweave.federation.client import Client, Member
from fedweave.federation.compute import Compute
from fedweave.federation.engines.base import Engine
from fedweave.federation.engines.in_process import InProcessEngine
from fedweave.federation.message import Message
from fedweave.federation.method import Payload, Sizes, Units
from fedweave.federation.news import Change
from fedweave.federation.state import Broadcast, ServerState
from fedweave.federation.steps import Step
from fedweave.federation.train import Update
from fedweave.methods.contested import Contest
from fedweave.methods.familiar import Familiarity, familiar_share
from fedweave.methods.living import Living
from fedweave.methods.newcomers import apart
from fedweave.methods.preparation import Aligned, assign, mixture_payload
from fedweave.methods.relabel import Relabel
from fedweave.methods.warm_start import WarmRouter
from fedweave.router.routed import RoutedExperts
from fedweave.streams import stream_key
from fedweave.training.batch import Lane
from fedweave.training.schedule import allot_steps, local_schedule


class FedWeave(Aligned):
    summary = "prototype-level experts, one client-level router (the paper's method)"
    opens = True
    units: Units = staticmethod(Compute.cluster)  # clusters of a client's own prompt features

    def __init__(self, config: Config):
        super().__init__(config)
        self.warm = WarmRouter(config)
        self.start = self.start if config.experts.start == "warmup" else None
        self.relabel = Relabel(config) if config.experts.labels == "router" else None
        self.contest = Contest.of(config)
        self.familiar = Familiarity(config) if familiar_share(config) < 1 else None
        self.living = Living(config, self.discover, self.start)
        self.shared_rank = config.experts.shared_rank
        self.trains_router = config.trains_router

    def steps(self) -> list[Step]:
        return [*super().steps(), *(self.living.steps() if self.lives else [])]

    @property
    def lives(self) -> bool:
        return self.config.living.notice != "off"

    def continued(self, engine: Engine, start: RoutedExperts) -> ServerState:
        """As ever; where kinds are noticed, each bucket goes to the expert with the nearest signature instead, and
        one that is far from all opens its own."""
        if not self.lives or not isinstance(engine, InProcessEngine) or not isinstance(start, ServerState):
            return super().continued(engine, start)
        found = self.form_buckets(engine.compute, engine.members)
        report = assign(engine.members, found, start.layout.experts, [-1 for one in found for _ in one.members])
        state = self.living.place(engine, replace(start, report=report | start.report), Change(0))
        labels = [m for member in engine.members for m in member.assignment]
        state.report.update(experts=state.layout.experts, prototype_labels=labels)
        return state

    def group(self, compute: Compute, client: Client) -> None:
        """New rows form buckets of their own, without an expert, once there are enough of them, together with those
        that were like no expert before, and too few to open one."""
        least = self.config.living.least
        if not self.lives:
            return super().group(compute, client)
        few = [c for c in apart(client) if len(client.buckets[c]) < least]
        rows = np.sort(np.concatenate([client.waiting, *(client.buckets[c] for c in few)]))
        if len(rows) < least or not client.enough(rows):
            return None
        client.drop(few)
        if len(client.buckets) > self.config.discovery.max_buckets:
            client.join_buckets()
        (found,) = self.grouped(compute, [Client(client.index, client.data.part(rows), least=client.least)])
        client.buckets = [*client.buckets, *(rows[bucket] for bucket in found.members)]
        client.assignment = [*client.assignment, *[-1] * len(found.members)]
        client.waiting = client.waiting[:0]
        return None

    def settle(self, engine: Engine, state: ServerState, change: Change) -> ServerState:
        state = self.living.settle(engine, state, change) if self.lives else state
        gone = bool(change.went) or len(engine.present()) < len(engine.members) or state.report.get("gone", False)
        if self.familiar is not None and (change.placed if self.lives else change.came):  # what trains is familiar
            heard = Receipts()
            if gone and change.opened:
                engine.console.say(
                    f"before round {change.t + 1}: prompts of rows that are gone or away count as strange from now "
                    "on: nobody can tell them from the new kind"
                )
            state = self.familiar.taught(engine, state, heard, gone, forgets=gone and bool(change.opened))
            assert state.router is not None
            change.heard(heard, Message({"spans": torch.empty(2, state.router.axes + 2, state.router.width)}))
            gone = gone and not change.opened
        known = state.report.get("gone", False)
        return state if gone == known else replace(state, report=state.report | {"gone": gone})

    def labels(self, client: Client, state: RoutedExperts) -> torch.Tensor:
        """They follow from what was broadcast, so that no client needs to remember them."""
        if self.relabel is None or state.router is None or state.phi is None:
            return super().labels(client, state)
        return self.relabel.labels(state.router, state.phi, client)

    def claims(self, member: Member, experts: int) -> list[int]:
        """Where the router labels single examples, any of them may be any expert's."""
        return super().claims(member, experts) if self.relabel is None else [len(member)] * experts

    def pools(self, client: Client, state: RoutedExperts) -> list[np.ndarray]:
        if self.relabel is None:
            return [client.rows] if self.config.training.batches == "mixed" else client.served
        everything = client.rows
        labels = self.labels(client, state).numpy()[everything]
        pools = [everything[labels == m] for m in np.unique(labels)]
        pools = [pool for pool in pools if client.enough(pool)]
        if not pools:
            raise UserError(f"the router sends fewer than {client.least} of this client's examples to each expert.")
        return [np.sort(np.concatenate(pools))] if self.config.training.batches == "mixed" else pools

    def lane(self, client: Client, state: RoutedExperts, t: int) -> Lane:
        lane = super().lane(client, state, t)
        if self.trains_router:
            return lane
        labels, experts = self.labels(client, state), state.layout.experts
        served = torch.tensor([client.enough(np.flatnonzero(labels.numpy() == m)) for m in range(experts)])
        if self.relabel is None:
            gates = F.one_hot(labels, experts).float()
        else:  # an example trains as it would be served
            gates = state.gates(state.weights(client.data.features), "sparse")
            if self.config.experts.temperature:
                drawn = self._drawn(client, state, served, np.random.default_rng(stream_key("draw", *lane.key)))
                gates = F.one_hot(drawn, experts) * gates.sum(1, keepdim=True)
        rng = np.random.default_rng(stream_key("rest", *lane.key))
        gates[rng.random(len(gates)) < self.config.experts.rest] = 0.0
        return replace(lane, phi=None, gates=gates, opened=served)

    def _drawn(
        self, client: Client, state: RoutedExperts, served: torch.Tensor, rng: np.random.Generator
    ) -> torch.Tensor:
        """[n] experts drawn from what the router makes of the prompts. What lies between two of them trains both,
        so that it costs little where the router sends the next one of its kind to the wrong one."""
        assert state.router is not None and state.phi is not None
        features = client.data.features.to(state.phi)
        odds = state.router.odds(state.phi[0], features, served, self.config.experts.temperature)
        edges = odds.double().cumsum(1).cpu()  # [n, M]
        place = torch.from_numpy(rng.random((len(edges), 1))) * edges[:, -1:]
        return (edges <= place).sum(1)  # the first expert whose edge lies beyond

    @classmethod
    def payload(cls, sizes: Sizes) -> Payload:
        """A client sends an expert only where it has buckets for it."""
        return mixture_payload(sizes, sizes.served, trained_router=sizes.trains_router)


# -------------------------------------------------------------------------------------- ablations


class WithoutPrototypeExpert(FedWeave):
    summary = "ablation: experts averaged over whole clients, like the router (client/client)"
    every_expert = True

    def counts(self, client: Client, state: RoutedExperts) -> torch.Tensor:
        return torch.full((state.layout.experts,), float(len(client.rows)))

    def claims(self, member: Member, experts: int) -> list[int]:
        return [len(member)] * experts

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
        budgets = [
            allot_steps([len(b) for b in client.served], self.config.training.local_steps) for client in clients
        ]
        jobs = [(k, c) for k, budget in enumerate(budgets) for c, steps in enumerate(budget) if steps]
        lanes = [self._reset_lane(clients[k], c, state, trained[k], t) for k, c in jobs]
        ends: list[list[tuple[int, torch.Tensor]]] = [[] for _ in clients]
        results = compute.train(
            state.layout, state.router, lanes, f"router, round {t + 1}", transient=True, pace=self.pace(state, t)
        )
        for (k, c), result in zip(jobs, results, strict=True):
            assert result.delta_phi is not None
            ends[k].append((len(clients[k].served[c]), result.delta_phi))
        for client, update, parts in zip(clients, trained, ends, strict=True):
            total = sum(size for size, _ in parts)
            delta = torch.stack([size / total * phi for size, phi in parts]).sum(0)
            yield replace(update, delta_phi=delta, samples=client.boast * total)

    def _reset_lane(self, client: Client, c: int, state: RoutedExperts, update: Update, t: int) -> Lane:
        training, seed = self.config.training, self.config.seed
        steps = allot_steps([len(b) for b in client.served], training.local_steps)[c]
        schedule = local_schedule([client.served[c]], steps, training.batch_size, seed, t, client.index, "reset", c)
        assert state.router is not None and state.phi is not None
        frozen = torch.zeros(state.layout.size, dtype=torch.bool)
        key = (seed, t, client.index, "reset", c)
        phi = state.router.forgetting(state.phi[0])
        return Lane(client.data, schedule, state.theta + update.delta_theta, phi, key, frozen)
