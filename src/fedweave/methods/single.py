"""Single-adapter baselines: one LoRA for everyone, of the rank that four experts have together.

FedIT averages all of it. FFA-LoRA freezes A at its random start and trains B alone. RoLoRA trains B and A in turns.
FedSVD is FFA-LoRA with an A that follows what was learned. FedSA-LoRA averages A and leaves each client its own B.
Local-only shares nothing, centralised everything.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch

from fedweave.aggregation.robust import client_average
from fedweave.aggregation.standing import Standing
from fedweave.config import Config
from fedweave.errors import UserError
from fedweave.experts.layout import AdapterLayout
from fedweave.federation.admission import Receipts
from fedweave.federation.client import OWN, Client, Member
from fedweave.federation.engines.base import Engine
from fedweave.federation.message import Message
from fedweave.federation.method import Method, Payload, Sizes
from fedweave.federation.state import ServerState
from fedweave.federation.steps import Step
from fedweave.federation.train import Update
from fedweave.methods.preparation import discover_units
from fedweave.methods.prototypes import Discover
from fedweave.router.routed import RoutedExperts
from fedweave.training.batch import Lane


class SingleAdapter(Method):
    """One adapter, no router; a client is one bucket, and tells only how many examples it has."""

    trains = "AB"  # the factors that a client trains
    sends = "AB"  # those that travel; "B|A": one in every round, in turns

    def __init__(self, config: Config):
        super().__init__(config)
        self.discover = Discover(self, signed=False)

    def steps(self) -> list[Step]:
        return [self.discover, *super().steps()]

    def prepare(self, engine: Engine, start: RoutedExperts | None = None) -> ServerState:
        layout = start.layout if start else engine.layout(self.config.experts.single_rank, experts=1)
        theta = start.theta if start else layout.initial(self.config.seed)
        discover_units(engine, self.discover, Receipts())
        for member in engine.members:
            member.assignment = [0]
        report = {"experts": 1, "client_samples": [len(member) for member in engine.members]}
        return ServerState(layout, None, theta.to(engine.device), None, report=report)

    def admit(self, engine: Engine, state: ServerState, newcomer: Member) -> str:
        for _, told in engine.ask(self.discover, [newcomer], Message()):
            newcomer.learn(told.sizes, told.note)
            newcomer.assignment = [0]
            return "bucket 0 → expert 0"
        return ""

    def shared(self, layout: AdapterLayout, t: int) -> torch.Tensor | None:
        factors = self._factors(t)
        if factors in ("AB", ""):
            return None if factors else torch.zeros_like(layout.is_b)
        return layout.is_b if factors == "B" else ~layout.is_b

    def turn(self, t: int) -> str:
        return self._factors(t) if "|" in self.sends else ""

    def _factors(self, t: int) -> str:
        """Those that travel in round t."""
        turns = self.sends.split("|")
        return turns[t % len(turns)]

    @classmethod
    def payload(cls, sizes: Sizes) -> Payload:
        layout, b = sizes.single, sizes.single.signature_size
        count = {"AB": layout.size, "A": layout.size - b, "B": b, "": 0}
        sent = max(count[factors] for factors in cls.sends.split("|"))
        return Payload(layout.rank, experts=1, routers=0, trainable=count[cls.trains], up=sent, down=sent)


class FedIT(SingleAdapter):
    summary = "baseline: one shared LoRA, both factors averaged by sample count"


class FFALoRA(SingleAdapter):
    summary = "baseline: A frozen at a common random start, B trained and averaged"
    trains = sends = "B"

    def lane(self, client: Client, state: RoutedExperts, t: int) -> Lane:
        return replace(super().lane(client, state, t), trainable=state.layout.is_b)


class RoLoRA(SingleAdapter):
    """While one factor rests the mean of products is the product of means, which FedIT's averaging misses. B comes
    first, because A has no gradient while B is zero."""

    summary = "baseline: B trained and averaged in one round, A in the next, and so on"
    sends = "B|A"

    def moved(self, layout: AdapterLayout, t: int) -> torch.Tensor | None:
        return self.shared(layout, t - 1)

    def lane(self, client: Client, state: RoutedExperts, t: int) -> Lane:
        return replace(super().lane(client, state, t), trainable=self.shared(state.layout, t))


class FedSVD(FFALoRA):
    """After every round the product of B and A is factored anew by its singular vectors: the same model, with an A
    whose rows are orthonormal and span what has been learned. Only B goes up; A comes down again."""

    summary = "baseline: B trained and averaged, A taken from the SVD of the averaged product"

    def prepare(self, engine: Engine, start: RoutedExperts | None = None) -> ServerState:
        state = super().prepare(engine, start)
        return replace(state, theta=refactored(state.layout, state.theta))

    def aggregate(self, engine: Engine, state: ServerState, updates: Iterable[Update]) -> ServerState:
        state = super().aggregate(engine, state, updates)
        return replace(state, theta=refactored(state.layout, state.theta))

    def moved(self, layout: AdapterLayout, t: int) -> torch.Tensor | None:
        return None

    @classmethod
    def payload(cls, sizes: Sizes) -> Payload:
        return replace(super().payload(sizes), down=sizes.single.size)


def refactored(layout: AdapterLayout, theta: torch.Tensor) -> torch.Tensor:
    """θ [P] of one adapter with the same products, A = Vᵀ and B = UΣ of each. The SVD is that of a small core
    between two orthonormal bases, never of the dense product; where B has no direction, A keeps its own."""
    new = torch.zeros_like(theta)
    for old, layer in zip(layout.views(theta), layout.views(new), strict=True):
        basis_a, small_a = torch.linalg.qr(old["A"].T.double())  # [in, r], [r, r]
        basis_b, small_b = torch.linalg.qr(old["B"].T.double())  # [out, r], [r, r]
        u, sigma, vh = torch.linalg.svd(small_b @ small_a.T)  # the product is basis_b (u Σ vh) basis_aᵀ
        count, rows = len(sigma), len(vh)
        layer["A"][:rows] = (vh @ basis_a.T).to(theta)
        layer["B"][:count] = (basis_b @ u[:, :count] * sigma).T.to(theta)
    return new


class Centralised(SingleAdapter):
    """What federation costs: FedIT with one client that has everybody's data and takes everybody's steps."""

    summary = "reference: everybody's data in one place, one adapter, as many steps as all clients together"
    gathers = True

    def local_steps(self, member: Member) -> int:
        assert isinstance(member, Client)  # it runs in simulations only
        return self.config.training.local_steps * member.data.gathered

    @classmethod
    def payload(cls, sizes: Sizes) -> Payload:
        return replace(super().payload(sizes), up=0, down=0)


class _OwnParameters(SingleAdapter):
    """Clients keep some columns in their memory. Where the server plays the clients, ``ServerState.private`` has a
    row of each, for evaluation; in a real federation nobody but the site has them."""

    def __init__(self, config: Config):
        super().__init__(config)
        if config.training.patience and config.engine == "flower":
            raise UserError(
                f"method={config.method} keeps parameters at its sites, where they cannot go back; set "
                "training.patience=0."
            )

    def prepare(self, engine: Engine, start: RoutedExperts | None = None) -> ServerState:
        state = super().prepare(engine, start)
        engine.entrust(OWN, state.theta)
        return replace(state, private=engine.kept(OWN))

    def own(self, client: Client, state: RoutedExperts) -> torch.Tensor:
        """[P] what the client has kept so far."""
        if client.memory.get(OWN) is None:
            client.memory.start(OWN, state.layout.initial(self.config.seed).to(state.theta))
        own = client.memory.get(OWN)
        assert own is not None
        return own

    def served(self, state: ServerState) -> list[RoutedExperts]:
        return [] if state.private is None else super().served(state)


class FedSALoRA(_OwnParameters):
    summary = "baseline: A averaged, every client keeps its own B"
    sends = "A"

    def lane(self, client: Client, state: RoutedExperts, t: int) -> Lane:
        own = torch.where(state.layout.is_b.to(state.theta.device), self.own(client, state), state.theta)
        return replace(super().lane(client, state, t), theta=own)

    def aggregate(self, engine: Engine, state: ServerState, updates: Iterable[Update]) -> ServerState:
        """A moves by the weighted mean; B moves at home. For global evaluation θ carries the mean of all B, where
        the server has them."""
        standing = Standing(engine.members, self.config, state.standing)
        shared = client_average(state.layout.size, state.theta.device, self.config, standing)
        for update in updates:
            shared.add(update.delta_theta, update.samples, update.client)
        standing.hear([shared])
        state = replace(state, standing=standing.evidence)
        theta, private = state.theta + shared.step(), engine.kept(OWN)
        if private is None:
            return replace(state, theta=theta)
        weights = torch.tensor([len(member) for member in engine.members]).to(private)  # rows come and go
        mean_b = (weights[:, None] * private).sum(0) / weights.sum()
        is_b = state.layout.is_b.to(theta.device)
        return replace(state, theta=torch.where(is_b, mean_b, theta), private=private)


class LocalOnly(_OwnParameters):
    summary = "reference: every client trains alone; figures are the mean over clients"
    sends = ""

    def lane(self, client: Client, state: RoutedExperts, t: int) -> Lane:
        return replace(super().lane(client, state, t), theta=self.own(client, state))

    def aggregate(self, engine: Engine, state: ServerState, updates: Iterable[Update]) -> ServerState:
        """Nothing is communicated: each client keeps what it learned."""
        for _ in updates:
            pass
        return replace(state, private=engine.kept(OWN))

    def served(self, state: ServerState) -> list[RoutedExperts]:
        own = [] if state.private is None else list(state.private)
        return [RoutedExperts(state.layout, None, theta, None) for theta in own]
