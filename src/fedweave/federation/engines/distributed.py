"""Many GPUs: processes that ``torchrun`` started share the clients of one run.

Every process holds the same server state and trains its own clients in lockstep; their answers pass from process
to process as messages, one at a time and in the clients' order. All of them therefore add up the same numbers in
the same order as a single process would, and only the first writes the run folder.
"""

import atexit
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache

import numpy as np
import torch
import torch.distributed as dist

from fedweave.backbone.load import Backbone
from fedweave.config import Config
from fedweave.console import Console
from fedweave.federation.admission import Sealed
from fedweave.federation.client import Client, Member
from fedweave.federation.engines.in_process import InProcessEngine
from fedweave.federation.message import Message
from fedweave.federation.recent import Recent
from fedweave.federation.steps import Asked, Reply
from fedweave.settings import environment_number

PATIENCE = timedelta(hours=12)  # the first process tests while the others wait


class World:
    """The processes of this run.

    Their group is their own, not torch's default: modules of torch keep the default one in their functions'
    arguments, and a group must end before Python does. A thread of gloo that lets go of its last message
    afterwards aborts the process.
    """

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self.group: dist.ProcessGroup | None = dist.new_group(timeout=PATIENCE)

    def pass_on(self, owner: int, message: Message | None) -> Message:
        """A message of process ``owner``, known to all afterwards. It is bytes: nothing is unpickled."""
        if self.rank == owner:
            assert message is not None
            content = torch.from_numpy(np.frombuffer(message.to_bytes(), dtype=np.uint8).copy())
        length = torch.tensor([len(content) if self.rank == owner else 0])
        dist.broadcast(length, owner, self.group)
        if self.rank != owner:
            content = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(content, owner, self.group)
        if self.rank == owner and message is not None:
            return message
        return Message.from_bytes(content.numpy().tobytes())

    def wait(self) -> None:
        dist.barrier(self.group)

    def leave(self) -> None:
        """The end of the group, once nobody holds it."""
        self.group = None
        dist.destroy_process_group()


@lru_cache(maxsize=1)
def world() -> World | None:
    """The processes that torchrun started with this one; None when it is alone. Messages travel over gloo: they
    come from the host, and must not take a GPU's memory."""
    size, rank = environment_number("WORLD_SIZE", 1), environment_number("RANK", 0)
    if size == 1 or "MASTER_ADDR" not in os.environ:
        return None
    dist.init_process_group("gloo", timeout=PATIENCE)
    joined = World(rank, size)
    atexit.register(joined.leave)
    return joined


class ShardedEngine(InProcessEngine):
    """An in-process engine that trains every ``size``-th client; the others' answers come as messages."""

    def __init__(
        self,
        backbone: Backbone,
        clients: list[Client],
        config: Config,
        console: Console,
        processes: World,
        recent: Recent | None = None,
    ):
        super().__init__(backbone, clients, config, console, recent=recent)
        self.world = processes

    def _owner(self, member: Member) -> int:
        return member.index % self.world.size

    def replies(self, step: Reply, asked: Sequence[Asked], question: Message) -> Iterator[tuple[Member, Sealed]]:
        asked = self.speaking(asked)
        mine = [one for one in asked if self._owner(one.member) == self.world.rank]
        own = (message for _, message in self.answers(step, mine, question))
        for one in asked:
            owner = self._owner(one.member)
            yield one.member, self.world.pass_on(owner, next(own) if owner == self.world.rank else None)

    def shared(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What any process has of the clients that it owns, known to all."""
        everything: dict[str, torch.Tensor] = {}
        for rank in range(self.world.size):
            everything |= self.world.pass_on(rank, Message(dict(tensors))).tensors
        return everything

    def only(self, answered: set[int]) -> None:
        """Buckets are where their clients are; the run folder of a simulation records them all."""
        super().only(answered)
        own = {
            f"{client.index}.{c}": torch.from_numpy(bucket)
            for client in self.members
            if self._owner(client) == self.world.rank
            for c, bucket in enumerate(client.buckets)
        }
        everything = self.shared(own)
        for client in self.members:
            found = [name for name in everything if name.startswith(f"{client.index}.")]
            client.buckets = [everything[f"{client.index}.{c}"].numpy() for c in range(len(found))]

    def memories(self) -> dict[str, torch.Tensor]:
        """Memories are where their clients are; a checkpoint has them all."""
        if self.config.federation.update_dtype == "float32":
            return {}
        return self.shared(super().memories())

    def kept(self, name: str) -> torch.Tensor | None:
        own = {str(c.index): c.memory.after[name] for c in self.members if self._owner(c) == self.world.rank}
        everything = self.shared(own)
        return torch.stack([everything[str(client.index)].to(self.device) for client in self.members])
