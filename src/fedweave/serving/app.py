"""The HTTP side: routes, limits, errors. It knows nothing of models beyond how a prompt becomes tokens."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedweave.backbone.load import Backbone
from fedweave.backbone.prompts import EncodedPrompt
from fedweave.errors import UserError
from fedweave.serving.jobs import Answering, Backend, Busy, Ended, Failed, Job, Limits, Piece, Routed
from fedweave.serving.metrics import Metrics
from fedweave.serving.protocol import (
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    Reply,
    error_body,
    event,
    usage,
)

ROUTED = "fedweave"  # the model name that leaves the choice to the router
T = TypeVar("T")


class ApiError(Exception):
    def __init__(self, status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers


class Api:
    """Requests to jobs, events to responses."""

    def __init__(self, backbone: Backbone, experts: int, backend: Backend, limits: Limits):
        self.backbone, self.backend, self.limits = backbone, backend, limits
        self.names = [ROUTED, *(f"expert_{m}" for m in range(experts))]
        self.metrics = Metrics(backend)
        self.started = int(time.time())

    # ---------------------------------------------------------------------------------- requests

    def expert(self, name: str) -> int | None:
        """The expert that a model name forces; None: the router's choice."""
        if name not in self.names:
            known = ", ".join(self.names)
            raise ApiError(404, f"model {name!r} is not served here; there are {known}.", "model_not_found")
        return None if name == ROUTED else self.names.index(name) - 1

    def encode(self, body: CommonRequest) -> list[EncodedPrompt]:
        """Prompts as tokens. One that is too long is refused: a server must not answer half of a question."""
        prompts = self.backbone.prompts
        if isinstance(body, ChatRequest):
            encoded = prompts.encode_prompts([body.prompt()])
        else:
            assert isinstance(body, CompletionRequest)
            encoded = [prompts.encode_raw(text) for text in body.prompts()]
        if not encoded or not all(len(prompt.ids) for prompt in encoded):
            raise UserError("prompt: there is nothing to continue.")
        if any(prompt.truncated for prompt in encoded):
            raise ApiError(
                400, f"the prompt is longer than {prompts.max_length} tokens.", "context_length_exceeded"
            )
        return encoded

    async def respond(self, request: Request, kind: Literal["chat", "text"], body: CommonRequest) -> Response:
        started = time.monotonic()
        expert = self.expert(body.model)
        sampling = body.sampling(self.limits.max_new_tokens)
        prompts = await run_in_threadpool(self.encode, body)
        if len(prompts) > self.limits.max_batch:
            raise UserError(f"prompt: at most {self.limits.max_batch} prompts in one request.")
        jobs = [Job(prompt, sampling, expert, body.routing, trim=kind == "chat") for prompt in prompts]
        try:
            answerings = self.backend.submit(jobs)
        except Busy as busy:
            raise ApiError(429, str(busy), "queue_full", {"Retry-After": str(busy.retry_after)}) from None
        answer = _Answer(self, Reply(kind, body.model), answerings, body.routing, started)
        try:
            await _unless_gone(request, answer.begin())
            if body.stream:
                include = bool(body.stream_options and body.stream_options.include_usage)
                return _EventStream(answer, include)
            return JSONResponse(await _unless_gone(request, answer.whole()))
        except _Gone:
            answer.cancel()
            return Response(status_code=499)  # nobody reads it
        except BaseException:
            answer.cancel()
            raise

    # ---------------------------------------------------------------------------------- the rest

    def models(self) -> list[dict[str, Any]]:
        return [
            {
                "id": name,
                "object": "model",
                "created": self.started,
                "owned_by": "fedweave",
                "root": self.backbone.name,
            }
            for name in self.names
        ]

    async def health(self) -> JSONResponse:
        problem = await self.backend.problem()
        facts = {"model": self.backbone.name, "experts": len(self.names) - 1}
        facts |= {"max_prompt_tokens": self.backbone.prompts.max_length, "max_tokens": self.limits.max_new_tokens}
        load = {"running": self.backend.running, "waiting": self.backend.waiting}
        status = {"status": "ok"} if not problem else {"status": "unavailable", "reason": problem}
        return JSONResponse({**status, **facts, **load}, 503 if problem else 200)


class _Answer:
    """The answers to one request, one or several prompts, whole or in pieces."""

    def __init__(self, api: Api, reply: Reply, answerings: list[Answering], routing: str, started: float):
        self.metrics, self.reply, self.answerings, self.started = api.metrics, reply, answerings, started
        self.routing = routing
        self.routed: list[Routed] = []
        self.prompt_tokens = sum(len(a.job.prompt.ids) for a in answerings)

    async def begin(self) -> None:
        """Wait until every prompt has its expert; until then a failure is still a proper status."""
        for answering in self.answerings:
            first = await answering.next()
            if isinstance(first, Failed):
                raise ApiError(first.status, first.message)
            assert isinstance(first, Routed)
            self.routed.append(first)

    @property
    def fedweave(self) -> Any:
        """Who answers: an object, or a list of them where several prompts were sent."""
        told = [{"expert": r.expert, "weights": r.weights, "routing": self.routing} for r in self.routed]
        return told[0] if len(told) == 1 else told

    async def whole(self) -> dict[str, Any]:
        texts, reasons, tokens = [""] * len(self.answerings), [""] * len(self.answerings), 0
        for i, answering in enumerate(self.answerings):
            async for told in answering.events():
                if isinstance(told, Piece):
                    texts[i] += told.text
                elif isinstance(told, Ended):
                    reasons[i], tokens = told.reason, tokens + told.tokens
                elif isinstance(told, Failed):
                    raise ApiError(told.status, told.message)
        self._count(tokens)
        return self.reply.whole(texts, reasons, usage(self.prompt_tokens, tokens), self.fedweave)

    async def chunks(self, include_usage: bool) -> AsyncIterator[str]:
        """Server-sent events; several prompts take turns as their text comes."""
        tokens, waiting_for_text = 0, True
        for index in range(len(self.answerings)):
            yield self.reply.chunk(index, "", first=True, **({"fedweave": self.fedweave} if index == 0 else {}))
        async for index, told in _merged(self.answerings):
            if isinstance(told, Piece):
                if waiting_for_text:
                    self.metrics.first.observe(time.monotonic() - self.started)
                    waiting_for_text = False
                yield self.reply.chunk(index, told.text)
            elif isinstance(told, Ended):
                tokens += told.tokens
                yield self.reply.chunk(index, "", told.reason)
            elif isinstance(told, Failed):
                yield event(error_body(told.status, told.message))
                return
        self._count(tokens)
        if include_usage:
            yield self.reply.usage_chunk(usage(self.prompt_tokens, tokens))
        yield "data: [DONE]\n\n"

    def cancel(self) -> None:
        for answering in self.answerings:
            answering.cancel()

    def _count(self, tokens: int) -> None:
        self.metrics.whole.observe(time.monotonic() - self.started)
        self.metrics.tokens.labels("prompt").inc(self.prompt_tokens)
        self.metrics.tokens.labels("completion").inc(tokens)
        for routed in self.routed:
            self.metrics.answers.labels(f"expert_{routed.expert}").inc()


class _EventStream(StreamingResponse):
    """A stream that frees its rows however it ends."""

    def __init__(self, answer: _Answer, include_usage: bool):
        super().__init__(answer.chunks(include_usage), media_type="text/event-stream")
        self.headers["Cache-Control"] = "no-store"
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.cancel()


async def _merged(answerings: list[Answering]) -> AsyncIterator[tuple[int, Any]]:
    """Events of several answers in the order in which they come."""
    pending = {asyncio.ensure_future(a.next()): i for i, a in enumerate(answerings)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index, told = pending.pop(task), task.result()
                yield index, told
                if not isinstance(told, Ended | Failed):
                    pending[asyncio.ensure_future(answerings[index].next())] = index
    finally:
        for task in pending:
            task.cancel()


class _Gone(Exception):
    """The client has hung up."""


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Wait for ``work``, but no longer than the client does."""

    async def hung_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(hung_up())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _Gone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


class Guard:
    """Before any route: the API key and the size of the body. After it: the count of responses."""

    def __init__(self, app: ASGIApp, key: str | None, limits: Limits, metrics: Metrics):
        self.app, self.key, self.limits, self.metrics = app, key, limits, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            return await self.app(scope, receive, send)
        request, size = Request(scope), 0

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.metrics.requests.labels(scope["path"], str(message["status"])).inc()
            await send(message)

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.limits.max_body:
                raise HTTPException(413, f"the request is larger than {self.limits.max_body} bytes.")
            return message

        given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        refusal: JSONResponse | None = None
        if self.key is not None and not hmac.compare_digest(given.encode(), self.key.encode()):
            body = error_body(401, "the API key is missing or wrong.", "invalid_api_key")
            refusal = JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})
        elif int(request.headers.get("content-length") or 0) > self.limits.max_body:
            refusal = JSONResponse(
                error_body(413, f"the request is larger than {self.limits.max_body} bytes."), 413
            )
        await (refusal or self.app)(scope, limited, counted)


def build_app(api: Api, key: str | None = None) -> FastAPI:
    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        api.backend.start()
        yield
        await api.backend.stop()

    app = FastAPI(title="fedweave", lifespan=life, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, key=key, limits=api.limits, metrics=api.metrics)
    page = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatRequest) -> Response:
        return await api.respond(request, "chat", body)

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        return await api.respond(request, "text", body)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": api.models()}

    @app.get("/v1/models/{name}")
    async def model(name: str) -> dict[str, Any]:
        api.expert(name)
        return next(m for m in api.models() if m["id"] == name)

    @app.get("/health")
    async def health() -> JSONResponse:
        return await api.health()

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(api.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/")
    async def root() -> HTMLResponse:
        return HTMLResponse(page)

    _speak_openai(app)
    return app


def _speak_openai(app: FastAPI) -> None:
    """Every error in the shape that OpenAI clients read."""

    @app.exception_handler(ApiError)
    async def ours(request: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error_body(error.status, str(error), error.code), error.status, error.headers)

    @app.exception_handler(UserError)
    async def user(request: Request, error: UserError) -> JSONResponse:
        return JSONResponse(error_body(400, str(error)), 400)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return JSONResponse(error_body(400, "the body is not valid JSON."), 400)
        param = ".".join(str(part) for part in first["loc"][1:]) or None
        return JSONResponse(error_body(400, f"{param or 'body'}: {first['msg']}.", param=param), 400)

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> JSONResponse:
        message = (
            error.detail if error.status_code == 413 else f"{request.method} {request.url.path}: {error.detail}."
        )
        return JSONResponse(error_body(error.status_code, message), error.status_code, error.headers)
