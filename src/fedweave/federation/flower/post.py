"""The post between a server and its sites: letters out, answers in, over a Flower Grid."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from fedweave.config import Config, dump_config
from fedweave.console import Console
from fedweave.errors import first_line
from fedweave.federation.flower.records import from_records, to_record, to_records
from fedweave.federation.letters import Letter

POLL = 0.25  # seconds between two looks for answers
_EXPIRY = 10.0  # seconds after its deadline at which Flower forgets a question
_EXPIRED = {3, 4}  # Flower's codes for a message that it no longer has
_REASONS = {**dict.fromkeys(_EXPIRED, "its time was up"), 5: "its node went away"}
_TOGETHER = 16  # answers fetched at a time: what the server holds does not grow with the sites


@dataclass
class RemoteClient:
    """What the server knows of a site."""

    index: int
    name: str
    node: int | None = None  # its Flower node while it is there
    home: int | None = None  # the node that it last was: one key is one node as long as the SuperLink remembers it
    sizes: list[int] = field(default_factory=list)
    assignment: list[int] = field(default_factory=list)
    note: str = ""

    def __len__(self) -> int:
        """|D_i|: the examples that take part."""
        return sum(n for n, m in zip(self.sizes, self.assignment, strict=True) if m >= 0) or sum(self.sizes)

    def record(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "node"}


class Post:
    """Sends letters to sites and hands their answers out. ``settings`` is the config that sites are told, and
    ``silent`` hears of a site that missed a deadline."""

    def __init__(
        self,
        grid: Grid,
        console: Console,
        federation: str,
        settings: Config,
        deadline: float,
        silent: Callable[[RemoteClient], None],
    ):
        self.grid, self.console, self.federation, self.deadline = grid, console, federation, deadline
        self.silent = silent
        self._settings = dump_config(settings)

    def ask(
        self, step: str, clients: Sequence[RemoteClient], letter: Letter
    ) -> Iterator[tuple[RemoteClient, Letter]]:
        """Ask these sites and hand their answers out as they come, until all have answered or time is up."""
        if not clients:
            return
        waiting = self.push(step, clients, letter, lambda client: client, self.deadline + _EXPIRY)
        end = time.monotonic() + self.deadline
        while waiting and time.monotonic() < end:
            for reply in self.pull(waiting):
                client = waiting.pop(reply.metadata.reply_to_message_id)
                if (answer := self.opened(reply, client.name)) is not None:
                    yield client, answer
            if waiting:
                time.sleep(POLL)
        for client in waiting.values():
            self.console.warn(f"site {client.name} did not answer within {self.deadline:g} s; the rest goes on.")
            self.silent(client)

    def push(
        self,
        step: str,
        clients: Sequence[RemoteClient],
        letter: Letter,
        who: Callable[[RemoteClient], Any],
        valid: float,
    ) -> dict[str, Any]:
        """Send a letter to each, ``valid`` for so many seconds; returns ``who`` by the message's number."""
        if not clients:
            return {}
        arrays = to_record(letter.arrays)
        numbers = self.grid.push_messages([
            Message(
                to_records(self._addressed(letter, step, client), arrays), client.node or 0, _kind(step),
                ttl=valid,
            )
            for client in clients
        ])  # fmt: skip
        return {str(number): who(client) for number, client in zip(numbers, clients, strict=True) if number}

    def pull(self, waiting: dict[str, Any]) -> Iterator[Message]:
        """What has come in, each answer once, a few at a time."""
        numbers = list(waiting)
        for start in range(0, len(numbers), _TOGETHER):
            for reply in list(self.grid.pull_messages(numbers[start : start + _TOGETHER])):
                if reply.metadata.reply_to_message_id in waiting:
                    yield reply

    def _addressed(self, letter: Letter, step: str, client: RemoteClient) -> Letter:
        return Letter(letter.arrays, {
            **letter.facts, "step": step, "config": self._settings, "federation": self.federation,
            "index": client.index, "sizes": client.sizes, "assignment": client.assignment,
        })  # fmt: skip

    def opened(self, reply: Message, name: str) -> Letter | None:
        """The letter in a reply; an error inside, of Flower or of the site, is told to the operator."""
        try:
            if reply.has_error():
                reason = _REASONS.get(reply.error.code) or reply.error.reason or f"Flower error {reply.error.code}"
            else:
                letter = from_records(reply.content)
                if "error" not in letter.facts:
                    return letter
                reason = str(letter.facts["error"])[:300]
        except (TypeError, ValueError) as error:  # a stranger's bytes
            reason = f"its answer cannot be read ({first_line(error)})"
        self.console.warn(f"site {name} gave no answer: {reason.rstrip('.')}.")
        return None


def is_lost(reply: Message) -> bool:
    """Whether Flower lost the question or the node, so that asking again is all there is to do."""
    return reply.has_error() and reply.error.code in _REASONS


def _kind(step: str) -> str:
    """Flower's type of a message, which its logs show."""
    return step if step in ("train", "evaluate") else f"query.{step}"
