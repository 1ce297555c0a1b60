"""Many GPUs: processes that ``torchrun`` started share the clients of one run.

Every process holds the same server state and trains its own clients in lockstep; their answers pass from process
to process as letters, one at a time and in the clients' order. All of them therefore add up the same numbers in
the same order as a single process would, and only the first writes the run folder.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from fedweave.backbone.load import Backbone
from fedweave.config import Config
from fedweave.console import Console
from fedweave.federation.client import Client, Prototypes
from fedweave.federation.engine import InProcessEngine
from fedweave.federation.letters import Letter
from fedweave.federation.parcel import Courier, Parcel
from fedweave.federation.wire import parcel_letter, read_parcel, to_arrays, to_tensors
from fedweave.router.mlp import RouterLayout

if TYPE_CHECKING:
    from fedweave.methods.base import Method, ServerState

_KEPT = "kept"
PATIENCE = timedelta(hours=12)  # the first process tests while the others wait


class World:
    """The processes of this run.

    Their group is their own, not torch's default: modules of torch keep the default one in their functions'
    arguments, and a group must end before Python does. A thread of gloo that lets go of its last letter
    afterwards aborts the process.
    """

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self.group: dist.ProcessGroup | None = dist.new_group(timeout=PATIENCE)

    def pass_on(self, owner: int, letter: Letter | None) -> Letter:
        """A letter of process ``owner``, known to all afterwards. It is bytes: nothing is unpickled."""
        if self.rank == owner:
            assert letter is not None
            content = torch.from_numpy(np.frombuffer(letter.to_bytes(), dtype=np.uint8).copy())
        length = torch.tensor([len(content) if self.rank == owner else 0])
        dist.broadcast(length, owner, self.group)
        if self.rank != owner:
            content = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(content, owner, self.group)
        return letter if self.rank == owner and letter is not None else Letter.from_bytes(content.numpy().tobytes())

    def wait(self) -> None:
        dist.barrier(self.group)

    def leave(self) -> None:
        """The end of the group, once nobody holds it."""
        self.group = None
        dist.destroy_process_group()


@lru_cache(maxsize=1)
def world() -> World | None:
    """The processes that torchrun started with this one; None when it is alone. Letters travel over gloo: they come
    from the host, and must not take a GPU's memory."""
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if size == 1 or "MASTER_ADDR" not in os.environ:
        return None
    dist.init_process_group("gloo", timeout=PATIENCE)
    joined = World(rank, size)
    atexit.register(joined.leave)
    return joined


class ShardedEngine(InProcessEngine):
    """An in-process engine that trains every ``size``-th client; the others' answers come as letters."""

    def __init__(
        self, backbone: Backbone, clients: list[Client], config: Config, console: Console, processes: World
    ):
        super().__init__(backbone, clients, config, console)
        self.world = processes

    def _mine(self, clients: Sequence[Client]) -> list[Client]:
        return [client for client in clients if self._owner(client) == self.world.rank]

    def _owner(self, client: Client) -> int:
        return client.index % self.world.size

    def _all(self, clients: Sequence[Client], own: Iterator[Letter]) -> Iterator[tuple[Client, Letter]]:
        """The letters of all clients in order, given those of mine."""
        for client in clients:
            owner = self._owner(client)
            yield client, self.world.pass_on(owner, next(own) if owner == self.world.rank else None)

    def prototypes(self, method: Method) -> list[Prototypes]:
        mine = self._mine(self.clients)
        told = (
            _discovery_letter(client, found)
            for client, found in zip(mine, method.discover(self, mine), strict=True)
        )
        return [_read_discovery(client, letter) for client, letter in self._all(self.clients, told)]

    def starts(self, method: Method) -> Iterator[tuple[int, torch.Tensor, float]]:
        assert self.spool is not None
        adapters = iter(self.spool)
        own = (
            Letter(to_arrays({str(c): next(adapters) for c in range(len(client.buckets))}))
            for client in self._mine(self.clients)
        )
        for client, letter in self._all(self.clients, own):
            tensors = to_tensors(letter.arrays)
            for c, m in enumerate(client.assignment):
                yield m, tensors[str(c)], 1.0

    def router_updates(
        self, method: Method, router: RouterLayout, phi: torch.Tensor, t: int, pupils: Sequence[Any], contrast: str
    ) -> Iterator[tuple[torch.Tensor, int]]:
        mine = self._mine(pupils)
        own = (
            Letter(to_arrays({"delta": delta}))
            for delta, _ in (method.warm_router(self, mine, router, phi, t, contrast) if mine else ())
        )
        for client, letter in self._all(pupils, own):
            yield to_tensors(letter.arrays)["delta"].to(phi.device), len(client)

    def answers(
        self, method: Method, state: ServerState, participants: Sequence[Client], t: int, courier: Courier
    ) -> Iterator[Parcel]:
        own = map(_answer_letter, super().answers(method, state, self._mine(participants), t, courier))
        for client, letter in self._all(participants, own):
            kept = letter.arrays.pop(_KEPT, None)
            parcel = read_parcel(letter, client.index)
            parcel.kept = None if kept is None else torch.from_numpy(np.array(kept)).to(self.device)
            yield parcel

    def memories(self) -> dict[str, torch.Tensor]:
        """Residuals are where their clients are; a checkpoint has them all."""
        if self.config.federation.update_dtype == "float32":
            return {}
        own = super().memories()
        everything: dict[str, torch.Tensor] = {}
        for rank in range(self.world.size):
            everything |= to_tensors(self.world.pass_on(rank, Letter(to_arrays(own))).arrays)
        return everything


def _discovery_letter(client: Client, told: Prototypes) -> Letter:
    """What a client tells, and the buckets themselves: a run folder records them in a simulation."""
    arrays: dict[str, Any] = {f"bucket.{c}": bucket for c, bucket in enumerate(client.buckets)}
    if told.signatures.numel():
        arrays |= to_arrays({"signatures": told.signatures})
    return Letter(arrays, {
        "note": told.note, "tried": list(told.silhouettes), "silhouettes": list(told.silhouettes.values()),
        "assignment": told.assignment,
    })  # fmt: skip


def _read_discovery(client: Client, letter: Letter) -> Prototypes:
    facts: dict[str, Any] = letter.facts
    buckets = sum(name.startswith("bucket.") for name in letter.arrays)
    client.buckets = [np.array(letter.arrays[f"bucket.{c}"]) for c in range(buckets)]
    client.note, client.assignment = facts["note"], list(facts["assignment"]) or client.assignment
    signatures = to_tensors(letter.arrays).get("signatures", torch.empty(0, 0))
    silhouettes = dict(zip(facts["tried"], facts["silhouettes"], strict=True))
    return Prototypes(client.sizes, signatures, client.note, silhouettes, list(facts["assignment"]))


def _answer_letter(parcel: Parcel) -> Letter:
    letter = parcel_letter(parcel)
    if parcel.kept is not None:  # a simulation keeps it for its client
        letter.arrays |= to_arrays({_KEPT: parcel.kept})
    return letter
