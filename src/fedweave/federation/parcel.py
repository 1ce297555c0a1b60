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
from fedweave.federation.compression import Residuals, Spec, decode, encoded_specs
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
        dtype: str,  # federation.update_dtype
        device: torch.device,
    ):
        self.layout, self.router, self.dtype, self.device = layout, router, dtype, device
        owner = layout.expert_of_column if shared is None else layout.expert_of_column.where(shared.cpu(), -1)
        owner = owner.to(device)
        self.columns = [(owner == m).nonzero()[:, 0] for m in range(layout.experts)]

    @property
    def broadcast_bytes(self) -> int:
        """What a participant receives: the shared columns of all experts and one router, in float32."""
        return 4 * (sum(len(columns) for columns in self.columns) + (self.router.size if self.router else 0))

    def _sizes(self, counts: Iterable[float]) -> dict[str, int]:
        """Numbers in every part of an update with these counts n(i,·)."""
        sizes = {expert_name(m): len(self.columns[m]) for m, count in enumerate(counts) if count > 0}
        if self.router is not None:
            sizes[ROUTER] = self.router.size
        return {name: size for name, size in sizes.items() if size}

    def expected(self, counts: Iterable[float]) -> dict[str, Spec]:
        """Name, shape and dtype of every array of such an update."""
        specs: dict[str, Spec] = {}
        for name, size in self._sizes(counts).items():
            specs |= encoded_specs(name, size, self.dtype)
        return specs

    def seal(self, update: Update, t: int, identity: dict[str, str], residuals: Residuals) -> Parcel:
        """Client side: what leaves. ``residuals`` are the client's memory of what rounding took."""
        counts = update.counts.tolist()
        parts = {}
        for name in self._sizes(counts):
            part = update.delta_phi if name == ROUTER else update.delta_theta[self.columns[_index(name)]]
            assert part is not None
            parts[name] = part
        arrays = residuals.encode(t, parts, self.dtype)
        return Parcel(
            update.client, t, identity, arrays, counts, update.samples, update.losses, update.tokens, update.kept
        )

    def decode(self, parcel: Parcel) -> dict[str, torch.Tensor]:
        """The parts of a parcel whose arrays are the expected ones, in float32."""
        arrays = {name: array.to(self.device) for name, array in parcel.arrays.items()}
        return {name: decode(name, arrays, self.dtype) for name in self._sizes(parcel.counts)}

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
