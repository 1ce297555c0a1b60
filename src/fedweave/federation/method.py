"""What a federated method is: how it prepares, what a client trains and shares, how the server averages.

Everything a baseline or an ablation changes is one of these functions; the round loop, the trainer, the exit, the
door and the engines are the same for all. The defaults are FedAvg of whole updates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedweave.aggregation.robust import client_average, expert_average
from fedweave.aggregation.standing import Standing
from fedweave.config import Config
from fedweave.discovery.clusterers import Buckets
from fedweave.errors import UserError
from fedweave.experts.layout import AdapterLayout
from fedweave.federation.admission import Receipts
from fedweave.federation.client import Client, Member, examples_of
from fedweave.federation.compute import Compute
from fedweave.federation.evaluate import Evaluate
from fedweave.federation.message import Message
from fedweave.federation.news import Change, News, into_the_nearest
from fedweave.federation.private import shielded
from fedweave.federation.state import Broadcast, ServerState
from fedweave.federation.steps import Step
from fedweave.federation.train import Train, Update
from fedweave.privacy.budget import accounting
from fedweave.privacy.masking import require
from fedweave.router.mlp import RouterLayout
from fedweave.router.routed import RoutedExperts
from fedweave.training.batch import Lane
from fedweave.training.schedule import allot_steps, local_schedule, pace

if TYPE_CHECKING:
    from fedweave.federation.engines.base import Engine


@dataclass(frozen=True)
class Sizes:
    """The shapes that a method's costs follow from."""

    single: AdapterLayout  # the one adapter of FedIT and its kin
    experts: AdapterLayout
    router: RouterLayout
    served: int  # experts that a client has buckets for; a mixed client has them all
    trains_router: bool = True  # in the rounds


@dataclass(frozen=True)
class Payload:
    """One method's numbers: trainable in the federation, sent and received by one client in a round (at most)."""

    rank: int
    experts: int
    routers: int
    trainable: int
    up: int
    down: int


Units = Callable[[Compute, Sequence[Client]], list[Buckets]]  # what a client's units of specialisation are


def whole_clients(compute: Compute, clients: Sequence[Client]) -> list[Buckets]:
    """The unit is the client: everything in one bucket."""
    return [Buckets([np.arange(len(client.data))], {}) for client in clients]


class Method(ABC):
    """The steps and rules of a federated method; ``methods/fedweave.py`` is the fullest example."""

    summary = ""
    uses_labels = False  # True only for an upper bound that is told the tasks
    gathers = False  # True only for a reference that has everybody's data in one place
    continues = True  # whether init=BUNDLE can be its start
    own_routing = "sparse"  # how the method means its experts to be used at inference
    trains_router = True  # False: the router of a method with experts stays as it was prepared, and sends nothing
    discovers = False  # whether clients sign their units before round 1, so that experts can be aligned
    every_expert = False  # True: a client's examples count for every expert, and not for one of them each
    opens = False  # whether experts can open in mid-run, for kinds that come later
    units: Units = staticmethod(whole_clients)

    def __init__(self, config: Config):
        if config.living.notice != "off" and not self.opens:
            raise UserError(f"method={config.method} cannot open experts in mid-run; set living.notice=off.")
        if config.init and not self.continues:
            raise UserError(f"method={config.method} cannot start from a bundle; leave init empty.")
        self.config = config
        if config.privacy.level != "none":
            accounting()
        if config.federation.secure_aggregation and (config.data.source == "sites" or config.engine == "flower"):
            require()
        self.train, self.evaluate, self.news = Train(self), Evaluate(self), News(self)

    def steps(self) -> list[Step]:
        """Every question that this method asks."""
        return [self.train, self.evaluate, self.news]

    # ---------------------------------------------------------------------------------- once

    @abstractmethod
    def prepare(self, engine: Engine, start: RoutedExperts | None = None) -> ServerState:
        """Algorithm 1, lines 1 to 6: the clients' buckets and assignments, and the first state. With ``start``
        (``init=BUNDLE``) experts and router exist, and each bucket finds the one that it belongs to."""

    def admit(self, engine: Engine, state: ServerState, newcomer: Member) -> str:
        """Give a client that comes after alignment its experts, -1 where none fits; a line for the log, or nothing
        where it must wait. Unless a method says otherwise, it waits."""
        return ""

    # ---------------------------------------------------------------------------------- between rounds

    def live(self, engine: Engine, state: ServerState, t: int) -> tuple[ServerState, Change]:
        """Before round t: whose rows have changed, and what becomes of them. Nobody is asked where nothing can."""
        change, config = Change(t), self.config
        if t == 0 or not config.lives:
            return state, change
        question, heard = Message(facts={"t": t, "experts": state.layout.experts}), Receipts()
        for member, told in engine.ask(self.news, engine.members, question, heard):
            member.regroup(told.sizes, told.experts, told.version)
            change.came |= {member.name: told.came} if told.came else {}
            change.went |= {member.name: told.went} if told.went else {}
        change.heard(heard, question)
        for name in {**change.came, **change.went}:
            came, went = change.came.get(name, 0), change.went.get(name, 0)
            engine.console.say(f"before round {t + 1}: {came} new rows at {name}, {went} gone")
        return self.settle(engine, state, change), change

    def settle(self, engine: Engine, state: ServerState, change: Change) -> ServerState:
        """Experts for the buckets that have none (-1). Unless a method says otherwise there are no such buckets."""
        return state

    def rehearse(self, engine: Engine, state: ServerState) -> None:
        """Ask what otherwise only hostile clients lead to, for ``fedweave site check``. Unless a method says
        otherwise there is nothing of the kind."""
        return None

    def group(self, compute: Compute, client: Client) -> None:
        """Client side: rows that wait get a bucket. Unless a method says otherwise, one that is there."""
        into_the_nearest(client)

    # ---------------------------------------------------------------------------------- client side

    def form_buckets(self, compute: Compute, clients: Sequence[Client]) -> list[Buckets]:
        """Every client gets its buckets; the same ones whenever it is asked."""
        found = self.grouped(compute, clients)
        for client, buckets in zip(clients, found, strict=True):
            client.buckets, client.assignment, client.note = buckets.members, [], buckets.note
        return found

    def grouped(self, compute: Compute, clients: Sequence[Client]) -> list[Buckets]:
        """The units of every client, none of them smaller than it allows."""
        found = self.units(compute, clients)
        return [one.joined(c.enough, c.data.features.numpy()) for c, one in zip(clients, found, strict=True)]

    def labels(self, client: Client, state: RoutedExperts) -> torch.Tensor:
        """[n] the expert that each of client i's examples belongs to."""
        return client.example_experts()

    def pools(self, client: Client, state: RoutedExperts) -> list[np.ndarray]:
        """The examples that batches are drawn from: a batch has those of one pool, and pools take turns."""
        return client.served

    def local_steps(self, member: Member) -> int:
        """E: steps of client i in a round."""
        return self.config.training.local_steps

    def lane(self, client: Client, state: RoutedExperts, t: int) -> Lane:
        """Lines 10 and 11: what client i trains in round t."""
        pools, batch_size = self.pools(client, state), self.config.training.batch_size
        schedule = local_schedule(pools, self.local_steps(client), batch_size, self.config.seed, t, client.index)
        phi = state.router.forgetting(state.phi[0]) if state.router is not None and state.phi is not None else None
        even = self.config.training.weighting == "example"
        lane = Lane(client.data, schedule, state.theta, phi, (self.config.seed, t, client.index), even=even)
        return shielded(lane, self.config, client, self.train.name, batch_size)

    def counts(self, client: Client, state: RoutedExperts) -> torch.Tensor:
        """n(i,m), [M]: the examples with which client i speaks for each expert; a pool without steps is silent."""
        labels, pools = self.labels(client, state), self.pools(client, state)
        budget = allot_steps([len(pool) for pool in pools], self.local_steps(client))
        heard = [labels[pool] for pool, steps in zip(pools, budget, strict=True) if steps]
        return torch.bincount(torch.cat(heard), minlength=state.layout.experts).float()

    def claims(self, member: Member, experts: int) -> list[int]:
        """[M] the most examples with which a client may speak for each expert: what its buckets have, as it said
        before alignment."""
        return examples_of([member], experts)

    def pace(self, state: Broadcast, t: int) -> float:
        """Round t's share of the learning rates."""
        return state.pace * pace(self.config.training.schedule, t, self.config.training.rounds)

    def local_updates(
        self, compute: Compute, state: Broadcast, clients: Sequence[Client], t: int
    ) -> Iterator[Update]:
        """Lines 9 to 13: every client trains from the broadcast state; updates come one by one."""
        lanes = [self.lane(client, state, t) for client in clients]
        router = state.router if self.trains_router else None
        pace = self.pace(state, t)
        results = compute.train(state.layout, router, lanes, f"round {t + 1}", transient=True, pace=pace)
        for client, result in zip(clients, results, strict=True):
            counts = client.boast * self.counts(client, state)
            yield Update(client.index, counts=counts, samples=len(client), **vars(result))

    def shared(self, layout: AdapterLayout, t: int) -> torch.Tensor | None:
        """The columns of θ that travel in round t, [P] bool; None: all of them. What a client has of its own in the
        others it keeps in its memory."""
        return None

    def turn(self, t: int) -> str:
        """What travels in round t, where the columns take turns."""
        return ""

    def moved(self, layout: AdapterLayout, t: int) -> torch.Tensor | None:
        """The columns of θ that a participant of round t must be told anew, [P] bool; None: all of them."""
        return self.shared(layout, t)

    # ---------------------------------------------------------------------------------- server side

    def aggregate(self, engine: Engine, state: ServerState, updates: Iterable[Update]) -> ServerState:
        """Line 14: experts over matched prototypes, the router over whole clients."""
        standing = Standing(engine.members, self.config, state.standing)
        experts = expert_average(state.layout, state.theta.device, self.config, standing)
        device, router, phi = state.theta.device, None, state.phi
        if state.router is not None and self.trains_router:
            router = client_average(state.router.trained.size, device, self.config, standing)
        for update in updates:
            experts.add(update.delta_theta, update.counts, update.samples, update.client)
            if router is not None and update.delta_phi is not None:
                router.add(update.delta_phi, update.samples, update.client)
        theta = state.theta + experts.step()  # first: who is in good standing shows best by the experts
        standing.hear([router])
        if router is not None and phi is not None:
            moved = router.step()
            phi = torch.cat([phi[:, : len(moved)] + moved, phi[:, len(moved) :]], 1)
        return replace(state, theta=theta, phi=phi, standing=standing.evidence)

    def served(self, state: ServerState) -> list[RoutedExperts]:
        """The global model; a method without one names every client's, and figures are their mean. None at all
        where a part of the model stays at sites elsewhere."""
        return [state]

    @classmethod
    @abstractmethod
    def payload(cls, sizes: Sizes) -> Payload:
        """What a federation of these sizes trains and sends."""

    # ---------------------------------------------------------------------------------- inference

    @property
    def routing(self) -> str:
        """Routing of the test."""
        asked = self.config.evaluation.routing
        return self.own_routing if asked == "auto" else asked

    @property
    def selection(self) -> str:
        """Routing of the validation loss."""
        asked = self.config.evaluation.selection
        return self.routing if asked == "auto" else asked
