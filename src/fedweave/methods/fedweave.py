"""FedWeave: buckets within clients are the unit of expert specialisation, whole clients that of the router.

What a client trains and how the server averages are the defaults of :class:`fedweave.federation.method.Method`: the
paper's asymmetric aggregation, of which FedAvg is the case of one expert.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedweave.alignment.align import align
from fedweave.config import Config
from fedweave.discovery.clusterers import Buckets
from fedweave.federation.client import Client, Member
from fedweave.federation.compute import Compute
from fedweave.federation.engines.base import Engine
from fedweave.federation.method import Method, Payload, Sizes
from fedweave.federation.state import ServerState
from fedweave.federation.steps import Step
from fedweave.methods.preparation import (
    Align,
    admit_by_signature,
    continue_experts,
    mixture_payload,
    prepare_experts,
)
from fedweave.methods.prototypes import Discover, StartExperts
from fedweave.methods.warm_start import WarmRouter
from fedweave.router.routed import RoutedExperts


def clusters(compute: Compute, clients: Sequence[Client]) -> list[Buckets]:
    """The unit is a cluster of a client's own prompt features."""
    return compute.cluster(clients)


class FedWeave(Method):
    summary = "prototype-level experts, one client-level router (the paper's method)"
    discovers = True
    units = staticmethod(clusters)

    def __init__(self, config: Config):
        super().__init__(config)
        self.discover = Discover(self)
        self.start, self.warm = StartExperts(self.discover), WarmRouter(config)
        self.align: Align = align

    def steps(self) -> list[Step]:
        return [self.discover, self.start, self.warm, *super().steps()]

    def prepare(self, engine: Engine, start: RoutedExperts | None = None) -> ServerState:
        if start is not None:
            return continue_experts(engine, self.discover, start)
        return prepare_experts(engine, self.discover, self.start, self.align, self.warm)

    def admit(self, engine: Engine, state: ServerState, newcomer: Member) -> str:
        return admit_by_signature(engine, self.discover, state, newcomer)

    @classmethod
    def payload(cls, sizes: Sizes) -> Payload:
        """A client sends an expert only where it has buckets for it."""
        return mixture_payload(sizes, sizes.served)
