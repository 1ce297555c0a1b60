"""One prompt to answer, and what happens to it: the words in which the app and its backends talk."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fedweave.backbone.load import Backbone
from fedweave.backbone.prompts import EncodedPrompt
from fedweave.inference.rows import TokenScore
from fedweave.inference.sampling import Sampling
from fedweave.serving.protocol import ApiError

MAX_PROMPT = 8192  # tokens that nobody has to ask for; attention and cache grow with them


@dataclass(frozen=True)
class Limits:
    """What a server takes on."""

    max_batch: int  # answers under way at a time
    max_queue: int  # requests that may wait besides
    max_new_tokens: int  # longest answer
    max_body: int  # bytes of a request
    max_prompt: int | None = None  # tokens of a prompt; None: as many as the model takes, up to MAX_PROMPT
    yields: bool = False  # whether answers are shorter where the model has room for shorter ones alone

    def prompt(self, backbone: Backbone) -> int:
        """Tokens that a prompt may have."""
        longest = backbone.longest_prompt(self.max_new_tokens)
        return self.max_prompt or max(backbone.prompts.max_length, min(longest, MAX_PROMPT))


@dataclass(frozen=True)
class Job:
    """One prompt with its options; ``adapter`` forces one by name, None lets the router choose."""

    prompt: EncodedPrompt
    sampling: Sampling
    adapter: str | None = None
    routing: str = "sparse"
    trim: bool = True  # drop blanks around the answer
    number: int = 0  # tells the answers to one prompt apart, and their draws
    passed: Mapping[str, object] = field(default_factory=dict)  # fields for an upstream alone


@dataclass(frozen=True)
class Routed:
    """The answer begins: which expert has the largest weight (-1: none), the adapter that answers, and what the
    router said (None when it was not asked)."""

    expert: int
    adapter: str
    weights: list[float] | None = None
    doubt: float | None = None


@dataclass(frozen=True)
class Piece:
    text: str
    scores: Sequence[TokenScore] = ()  # of the tokens since the last piece, where they were asked for


@dataclass(frozen=True)
class Ended:
    reason: str  # stop or length
    tokens: int  # of the answer


Event = Routed | Piece | Ended | ApiError  # the last: no answer, or no more of it


class Answering:
    """A job under way, as its client sees it. Events may come from any thread; they are read on the event loop."""

    def __init__(self, job: Job, on_cancel: Callable[[], object] = lambda: None):
        self.job = job
        self.cancelled = False
        self._on_cancel = on_cancel
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    def tell(self, event: Event) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def cancel(self) -> None:
        """The client has gone, or has its answer: whatever is still held for it is freed."""
        self.cancelled = True
        self._on_cancel()

    async def next(self) -> Event:
        return await self._events.get()

    async def events(self) -> AsyncIterator[Event]:
        """Up to and including the last one."""
        while True:
            event = await self.next()
            yield event
            if isinstance(event, Ended | ApiError):
                return


class Backend(Protocol):
    def start(self) -> None: ...

    async def stop(self) -> None: ...

    def submit(self, jobs: Sequence[Job]) -> list[Answering]:
        """Take all of them on, or raise :func:`fedweave.serving.protocol.busy`."""

    @property
    def running(self) -> int: ...

    @property
    def waiting(self) -> int: ...

    async def problem(self) -> str:
        """Why it cannot answer now; empty when it can."""

    async def passes(self) -> Collection[str]:
        """Names of fields that it hands on to another server, which knows what they mean."""
