"""A client's answer to a round, as it travels: named arrays and a few numbers, the same for every engine.

Only what the method shares is in it: ``expert.m`` where n(i,m) > 0, and ``router``. Sizes are therefore bytes on
the wire, whether a network lies between client and server or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from fedweave.experts.layout import AdapterLayout
from fedweave.federation.client import Update
from fedweave.router.mlp import RouterLayout

ROUTER = "router"


def expert_name(m: int) -> str:
    return f"expert.{m}"


@dataclass
class Parcel:
    """One answer. The server trusts none of it before :mod:`fedweave.federation.intake` has looked."""

    client: int
    round: int  # t, from 0
    identity: dict[str, str]  # Backbone.identity of the model it was trained on
    arrays: dict[str, torch.Tensor]
    counts: list[float]  # n(i,m), [M]
    samples: int  # |D_i|
    losses: list[float]  # of every local step
    tokens: int
    kept: torch.Tensor | None = None  # [P] a simulation's stand-in for what a client keeps; never sent

    @property
    def bytes(self) -> int:
        return array_bytes(self.arrays.values())


def array_bytes(arrays: Iterable[torch.Tensor]) -> int:
    return sum(array.numel() * array.element_size() for array in arrays)


class Courier:
    """Seals updates into parcels and opens them again; client and server build it from the same facts."""

    def __init__(
        self,
        layout: AdapterLayout,
        router: RouterLayout | None,
        shared: torch.Tensor | None,  # [P] bool, the columns that a client sends; None: all
        device: torch.device,
    ):
        self.layout, self.router, self.device = layout, router, device
        owner = layout.expert_of_column if shared is None else layout.expert_of_column.where(shared.cpu(), -1)
        owner = owner.to(device)
        self.columns = [(owner == m).nonzero()[:, 0] for m in range(layout.experts)]

    def expected(self, counts: Iterable[float]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name, shape and dtype of everything in a parcel with these counts n(i,·)."""
        sizes = {expert_name(m): len(self.columns[m]) for m, count in enumerate(counts) if count > 0}
        if self.router is not None:
            sizes[ROUTER] = self.router.size
        return {name: ((size,), torch.float32) for name, size in sizes.items() if size}

    def seal(self, update: Update, t: int, identity: dict[str, str]) -> Parcel:
        """Client side: what leaves."""
        counts = update.counts.tolist()
        arrays = {}
        for name in self.expected(counts):
            part = update.delta_phi if name == ROUTER else update.delta_theta[self.columns[_index(name)]]
            assert part is not None
            arrays[name] = part.float()
        return Parcel(
            update.client, t, identity, arrays, counts, update.samples, update.losses, update.tokens, update.kept
        )

    def open(self, parcel: Parcel, parts: Mapping[str, torch.Tensor]) -> Update:
        """Server side: checked ``parts`` back in their places; a column that did not travel is zero."""
        delta = torch.zeros(self.layout.size, device=self.device)
        for name, part in parts.items():
            if name != ROUTER:
                delta[self.columns[_index(name)]] = part
        return Update(
            parcel.client,
            delta,
            torch.tensor(parcel.counts, dtype=torch.float32),
            parts.get(ROUTER),
            parcel.samples,
            parcel.losses,
            parcel.tokens,
            parcel.kept,
        )


def _index(name: str) -> int:
    return int(name.removeprefix("expert."))
