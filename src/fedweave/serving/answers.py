"""Events to responses: the answers to one request, whole or as a stream, for as long as its client is there."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from fedweave.inference.rows import TokenScore
from fedweave.serving.guard import Metrics
from fedweave.serving.jobs import Answering, Ended, Event, Piece, Routed
from fedweave.serving.protocol import ApiError, Json, Reply, event, usage
from fedweave.serving.scores import logprobs

T = TypeVar("T")


class Answers:
    """The answers to one request, one or several prompts, whole or in pieces."""

    def __init__(
        self,
        metrics: Metrics,
        reply: Reply,
        answerings: list[Answering],
        routing: str,
        started: float,
        decode: Callable[[list[int]], str],
        echo: bool = False,
        numbered: bool = False,
    ):
        """``decode`` makes text of tokens, where the prompt or single tokens are asked back. ``numbered``: single
        ones are told by their ids, as vLLM does when asked to, for a text may belong to several."""
        self.metrics, self.reply, self.answerings, self.started = metrics, reply, answerings, started
        self.routing, self.decode, self.echo = routing, decode, echo
        self.token_text = (lambda token: f"token_id:{token}") if numbered else (lambda token: decode([token]))
        self.routed: list[Routed] = []
        self.prompt_tokens = sum(len(a.job.prompt.ids) for a in answerings if a.job.number == 0)

    async def begin(self) -> None:
        """Wait until every prompt has its expert; until then a failure is still a proper status."""
        for answering in self.answerings:
            first = await answering.next()
            if isinstance(first, ApiError):
                raise first
            assert isinstance(first, Routed)
            self.routed.append(first)

    @property
    def fedweave(self) -> object:
        """Who answers: an object, or a list of them where several prompts were sent."""
        told = [asdict(r) | {"routing": self.routing} for r in self.routed]
        return told[0] if len(told) == 1 else told

    async def whole(self) -> Json:
        count, tokens = len(self.answerings), 0
        texts, reasons = [""] * count, [""] * count
        scores: list[list[TokenScore]] = [[] for _ in range(count)]
        for i, answering in enumerate(self.answerings):
            if self.echo:
                texts[i] = self.decode(answering.job.prompt.ids.tolist())
            async for told in answering.events():
                if isinstance(told, Piece):
                    texts[i] += told.text
                    scores[i] += told.scores
                elif isinstance(told, Ended):
                    reasons[i], tokens = told.reason, tokens + told.tokens
                elif isinstance(told, ApiError):
                    raise told
        self._count(tokens)
        told_scores = [self._logprobs(i, scored) for i, scored in enumerate(scores)]
        return self.reply.whole(texts, reasons, told_scores, usage(self.prompt_tokens, tokens), self.fedweave)

    async def chunks(self, include_usage: bool) -> AsyncIterator[str]:
        """Server-sent events; several prompts take turns as their text comes."""
        tokens, waiting_for_text, lengths = 0, True, [0] * len(self.answerings)
        for index in range(len(self.answerings)):
            routed: Json = {"fedweave": self.fedweave} if index == 0 else {}
            yield self.reply.chunk(index, "", first=True, extra=routed)
        async for index, told in merged(self.answerings):
            if isinstance(told, Piece):
                if waiting_for_text:
                    self.metrics.first.observe(time.monotonic() - self.started)
                    waiting_for_text = False
                scores = self._logprobs(index, told.scores, lengths[index]) if told.scores else None
                lengths[index] += sum(len(self.token_text(score.token)) for score in told.scores)
                yield self.reply.chunk(index, told.text, logprobs=scores)
            elif isinstance(told, Ended):
                tokens += told.tokens
                yield self.reply.chunk(index, "", told.reason)
            elif isinstance(told, ApiError):
                yield event(told.body)
                return
        self._count(tokens)
        if include_usage:
            yield self.reply.usage_chunk(usage(self.prompt_tokens, tokens))
        yield "data: [DONE]\n\n"

    def _logprobs(self, index: int, scores: Sequence[TokenScore], start: int = 0) -> Json | None:
        """Of an answer's tokens from the letter ``start`` on; None where nobody asked."""
        if self.answerings[index].job.sampling.logprobs is None:
            return None
        return logprobs(self.reply.kind, scores, self.token_text, start)

    def cancel(self) -> None:
        for answering in self.answerings:
            answering.cancel()

    def _count(self, tokens: int) -> None:
        self.metrics.whole.observe(time.monotonic() - self.started)
        self.metrics.tokens.labels("prompt").inc(self.prompt_tokens)
        self.metrics.tokens.labels("completion").inc(tokens)
        for routed in self.routed:
            self.metrics.answers.labels(routed.adapter).inc()
            if routed.doubt is not None and routed.doubt > 1:
                self.metrics.unfamiliar.inc()


class EventStream(StreamingResponse):
    """A stream that frees its rows however it ends."""

    def __init__(self, answer: Answers, include_usage: bool):
        super().__init__(answer.chunks(include_usage), media_type="text/event-stream")
        self.headers["Cache-Control"] = "no-store"
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.cancel()


async def merged(answerings: list[Answering]) -> AsyncIterator[tuple[int, Event]]:
    """Events of several answers in the order in which they come."""
    pending = {asyncio.ensure_future(a.next()): i for i, a in enumerate(answerings)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index, told = pending.pop(task), task.result()
                yield index, told
                if not isinstance(told, Ended | ApiError):
                    pending[asyncio.ensure_future(answerings[index].next())] = index
    finally:
        for task in pending:
            task.cancel()


class Gone(Exception):
    """The client has hung up."""


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Wait for ``work``, but no longer than the client does."""

    async def hung_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(hung_up())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Gone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
