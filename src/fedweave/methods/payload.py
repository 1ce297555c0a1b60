"""What each method trains, sends and receives, in numbers: the one list that costs are counted from.

"Trainable" counts what the paper's Table 5 counts: all experts and all router copies of the federation, without
the frozen backbone, optimiser state or copies at clients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fedweave.experts.layout import AdapterLayout
from fedweave.router.mlp import RouterLayout


@dataclass(frozen=True)
class Sizes:
    """How many numbers each part has."""

    single: AdapterLayout  # the one adapter of FedIT and its kin
    experts: AdapterLayout
    router: RouterLayout
    served: int  # experts that a client has buckets for; a mixed client has them all

    @property
    def expert(self) -> int:
        return self.experts.size // self.experts.experts

    @property
    def all_experts(self) -> int:
        return self.experts.size


@dataclass(frozen=True)
class Payload:
    """One method's numbers: trainable in the federation, sent and received by one client in a round (at most)."""

    rank: int
    experts: int
    routers: int
    trainable: int
    up: int
    down: int


def _single(count: Callable[[AdapterLayout], tuple[int, int]]) -> Callable[[Sizes], Payload]:
    """A method with one adapter; ``count`` says how much of it is trained and how much travels each way."""

    def payload(sizes: Sizes) -> Payload:
        trainable, shared = count(sizes.single)
        return Payload(sizes.single.rank, 1, 0, trainable, shared, shared)

    return payload


def _mixture(sizes: Sizes, up_experts: int, routers: int = 1, trained_router: bool = True) -> Payload:
    router = sizes.router.size if trained_router else 0
    return Payload(
        rank=sizes.experts.rank,
        experts=sizes.experts.experts,
        routers=routers,
        trainable=sizes.all_experts + routers * router,
        up=up_experts * sizes.expert + router,
        down=sizes.all_experts + router,
    )


# A client of FedWeave sends an expert only where it has buckets for it. FedLEASE's trains its cluster's expert and
# router alone, beside the frozen others. The oracle's router is a fixed map.
PAYLOADS: dict[str, Callable[[Sizes], Payload]] = {
    "fedit": _single(lambda a: (a.size, a.size)),
    "ffa-lora": _single(lambda a: (a.signature_size, a.signature_size)),
    "fedsa-lora": _single(lambda a: (a.size, a.size - a.signature_size)),
    "fedlease": lambda s: _mixture(s, up_experts=1, routers=s.experts.experts),
    "fedweave": lambda s: _mixture(s, s.served),
    "without-prototype-expert": lambda s: _mixture(s, s.experts.experts),
    "without-client-router": lambda s: _mixture(s, s.served),
    "oracle": lambda s: _mixture(s, s.served, trained_router=False),
    "local-only": _single(lambda a: (a.size, 0)),
}


def payload_of(method: str, sizes: Sizes) -> Payload:
    """A method that has no line above is taken to train and send everything."""
    known = PAYLOADS.get(method)
    return known(sizes) if known else _mixture(sizes, sizes.experts.experts)


def trained_parameters(method: str, layout: AdapterLayout, router: RouterLayout | None) -> int:
    """Numbers that a method with this layout trains; what it freezes does not count."""
    router = router or RouterLayout(0, 0, layout.experts)  # one adapter: no router is counted
    return payload_of(method, Sizes(layout, layout, router, layout.experts)).trainable


SINGLE = ("fedit", "ffa-lora", "fedsa-lora", "local-only")  # one adapter, no discovery
