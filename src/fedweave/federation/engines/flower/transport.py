"""Between a server and its sites: questions out, replies in, over a Flower Grid."""

import hashlib
import io
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.serverapp import Grid

from fedweave.config import Config, dump_config
from fedweave.console import Console
from fedweave.federation.client import Distant
from fedweave.federation.message import Facts, Message, NoAnswer, Refused

POLL = 0.25  # seconds between two looks for answers
_EXPIRY = 10.0  # seconds after its deadline at which Flower forgets a question
_EXPIRED = {3, 4}  # Flower's codes for a message that it no longer has
_GONE = 5  # and for one whose node is offline
_REASONS = {**dict.fromkeys(_EXPIRED, "its time was up"), _GONE: "its node went away"}
SMALL = 2**24  # bytes of an answer that holds no experts
_TOGETHER = 16  # answers fetched at a time: what the server holds does not grow with the sites


@dataclass
class RemoteSite(Distant):
    """A site and its Flower node."""

    node: int | None = None  # while it is there
    key: str = ""  # of its node: nobody without it takes this site's place

    def record(self) -> dict[str, Any]:
        return {key: value for key, value in super().record().items() if key != "node"}


@dataclass(frozen=True)
class Badge:
    """What the SuperLink knows of a node, and the node cannot choose."""

    key: str  # a hash of its public key
    name: str  # that the operator registered it under, if any


def badges(grid: Grid) -> dict[int, Badge]:
    """The nodes that are there."""
    return {
        node.node_id: Badge(hashlib.sha256(node.public_key or b"%d" % node.node_id).hexdigest()[:32], node.name)
        for node in grid.get_nodes()
    }


class Transport:
    """Carries questions to sites and hands their replies out, unopened. ``settings`` is the config that sites are
    told, and ``silent`` hears of a site that missed a deadline."""

    def __init__(
        self,
        grid: Grid,
        console: Console,
        federation: str,
        settings: Config,
        deadline: float,
        silent: Callable[[RemoteSite], None],
    ):
        self.grid, self.console, self.federation, self.deadline = grid, console, federation, deadline
        self.silent = silent
        self.most = SMALL  # bytes of an answer
        self._settings = dump_config(settings)

    def ask(
        self, step: str, sites: Sequence[RemoteSite], question: Message
    ) -> Iterator[tuple[RemoteSite, FlowerMessage]]:
        """Ask these sites and hand their replies out as they come, until all have answered or time is up."""
        waiting = self.push(step, sites, question, self.deadline + _EXPIRY)
        end = time.monotonic() + self.deadline
        while waiting and time.monotonic() < end:
            for reply in self.pull(waiting):
                yield waiting.pop(reply.metadata.reply_to_message_id), reply
            if waiting:
                time.sleep(POLL)
        for site in waiting.values():
            self.console.warn(f"site {site.name} did not answer within {self.deadline:g} s; the rest goes on.")
            self.silent(site)

    def push(
        self, step: str, sites: Sequence[RemoteSite], question: Message, valid: float
    ) -> dict[str, RemoteSite]:
        """Send a question to each, ``valid`` for so many seconds; returns who was asked by the message's number."""
        if not sites:
            return {}
        arrays = to_record(question.tensors)
        numbers = self.grid.push_messages([
            FlowerMessage(
                to_records(site.addressed(question, step, self._settings, self.federation), arrays),
                site.node or 0,
                "query",
                ttl=valid,
            )
            for site in sites
        ])  # fmt: skip
        return {str(number): site for number, site in zip(numbers, sites, strict=True) if number}

    def pull(self, waiting: Collection[str]) -> Iterator[FlowerMessage]:
        """What has come in, each reply once, a few at a time."""
        numbers = list(waiting)
        if isinstance(self.grid, Bounded):
            self.grid.most = self.most
        for start in range(0, len(numbers), _TOGETHER):
            for reply in list(self.grid.pull_messages(numbers[start : start + _TOGETHER])):
                if reply.metadata.reply_to_message_id in waiting:
                    yield reply


@runtime_checkable
class Bounded(Protocol):
    """A Grid that fetches no more of an answer than that."""

    most: int


def opened(reply: FlowerMessage, most: int) -> Message:
    """The message in a reply, or :class:`NoAnswer` with Flower's error."""
    if reply.has_error():
        raise NoAnswer(_REASONS.get(reply.error.code) or reply.error.reason or f"Flower error {reply.error.code}")
    return from_records(reply.content, most)


def is_gone(reply: FlowerMessage) -> bool:
    return reply.has_error() and reply.error.code == _GONE


def is_lost(reply: FlowerMessage) -> bool:
    """Whether Flower lost the question or the node, so that asking again is all there is to do."""
    return reply.has_error() and reply.error.code in _REASONS


# -------------------------------------------------------------------------------------- messages as Flower records
# Tensors in an ArrayRecord, numbers in a MetricRecord, texts in a ConfigRecord.

ARRAYS, NUMBERS, TEXTS = "arrays", "numbers", "texts"
_HEADER = 4096  # bytes of an array's header: dtype and shape
_BF16 = ":bf16"  # numpy has no bfloat16; its bits travel as int16 under a marked name


def to_record(tensors: Mapping[str, torch.Tensor]) -> ArrayRecord:
    arrays = {}
    for name, tensor in tensors.items():
        flat = tensor.detach().cpu().contiguous()
        if flat.dtype == torch.bfloat16:
            name, flat = name + _BF16, flat.view(torch.int16)
        arrays[name] = Array(flat.numpy())
    return ArrayRecord(arrays)


def to_records(message: Message, arrays: ArrayRecord | None = None) -> RecordDict:
    """``arrays`` may be given ready made: a broadcast is written out once for all sites."""
    numbers = {name: fact for name, fact in message.facts.items() if _is_numeric(fact)}
    texts = {name: fact for name, fact in message.facts.items() if name not in numbers}
    arrays = arrays if arrays is not None else to_record(message.tensors)
    return RecordDict({ARRAYS: arrays, NUMBERS: MetricRecord(numbers), TEXTS: ConfigRecord(texts)})


def from_records(records: RecordDict, most: float = math.inf) -> Message:
    """The message inside; a record that is missing counts as empty, and one of another name is not read. More than
    ``most`` bytes of arrays are refused before any of them is."""
    arrays: Mapping[str, Array] = records.array_records.get(ARRAYS, {})
    if (size := sum(len(array.data) for array in arrays.values())) > most:
        raise Refused(f"it holds {size / 1e6:.0f} MB, where {most / 1e6:.0f} are possible")
    tensors = {}
    for name, array in arrays.items():
        tensor = torch.from_numpy(_array(array.data).copy())  # what came over the network may be read-only
        if name.endswith(_BF16) and tensor.dtype == torch.int16:
            name, tensor = name.removesuffix(_BF16), tensor.view(torch.bfloat16)
        tensors[name] = tensor
    facts: Facts = dict(records.metric_records.get(NUMBERS, {}))
    return Message(tensors, facts | dict(records.config_records.get(TEXTS, {})))


def _array(data: bytes) -> np.ndarray:
    """numpy's own format; what the header announces must be there, and no room is made for anything else."""
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    if version != (1, 0):
        raise Refused("an array of it has a header that is not numpy's usual one")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(file, max_header_size=_HEADER)
    body = memoryview(data)[file.tell() :]
    if dtype.hasobject or (fortran and len(shape) > 1) or math.prod(shape) * dtype.itemsize != len(body):
        raise Refused("an array of it is not what its header announces")
    return np.frombuffer(body, dtype).reshape(shape)


def _is_numeric(fact: Any) -> bool:
    """Flower's metrics are numbers and lists of them; a bool is a text there."""
    items = fact if isinstance(fact, list) else [fact]
    return bool(items) and all(isinstance(x, int | float) and not isinstance(x, bool) for x in items)
