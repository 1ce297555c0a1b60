"""The HTTP side: requests to jobs, and the routes. It knows of models only how a prompt becomes tokens."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.concurrency import run_in_threadpool

from fedweave.backbone.catalog import public_name
from fedweave.backbone.load import Backbone
from fedweave.backbone.prompts import EncodedPrompt, LongAnswer
from fedweave.description.record import Experts
from fedweave.errors import UserError
from fedweave.serving.answers import Answers, EventStream, Gone, unless_gone
from fedweave.serving.guard import Guard, Metrics, speak_openai
from fedweave.serving.jobs import Backend, Job, Limits
from fedweave.serving.protocol import ApiError, ChatRequest, CommonRequest, CompletionRequest, Json, Reply

ROUTED = "fedweave"  # the model name that leaves the choice to the router


class Api:
    def __init__(
        self, backbone: Backbone, adapters: list[str], backend: Backend, limits: Limits, told: Experts | None = None
    ):
        self.backbone, self.backend, self.limits = backbone, backend, limits
        self.told = {
            f"expert_{m}": {"fedweave": expert} for m, expert in enumerate(told["experts"] if told else [])
        }
        self.names = [ROUTED, *adapters]
        self.max_prompt = limits.prompt(backbone)
        self.metrics = Metrics(backend)
        self.started = int(time.time())

    # ---------------------------------------------------------------------------------- requests

    def adapter(self, name: str) -> str | None:
        """The adapter that a model name forces; None: the router's choice."""
        if name not in self.names:
            known = ", ".join(self.names)
            raise ApiError(404, f"model {name!r} is not served here; there are {known}.", "model_not_found")
        return None if name == ROUTED else name

    def encode(self, body: CommonRequest) -> list[EncodedPrompt]:
        """Prompts as tokens. One that is too long is refused: a server must not answer half of a question."""
        prompts = self.backbone.prompts
        too_long = f"the prompt is longer than {self.max_prompt} tokens."
        try:
            if isinstance(body, ChatRequest):
                encoded = prompts.encode_prompts([body.prompt()], self.max_prompt)
            else:
                assert isinstance(body, CompletionRequest)
                encoded = [prompts.encode_raw(text, self.max_prompt) for text in body.prompts()]
        except LongAnswer:
            raise ApiError(400, too_long, "context_length_exceeded") from None
        if not encoded or not all(len(prompt.ids) for prompt in encoded):
            raise UserError("prompt: there is nothing to continue.")
        if any(prompt.truncated for prompt in encoded):
            raise ApiError(400, too_long, "context_length_exceeded")
        return encoded

    def decode(self, ids: list[int]) -> str:
        """Tokens as they stand, the marks of a template too."""
        return str(self.backbone.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    async def respond(self, request: Request, kind: Literal["chat", "text"], body: CommonRequest) -> Response:
        started = time.monotonic()
        adapter = self.adapter(body.model)
        passed = body.passed(await self.backend.passes())
        sampling = body.sampling(self.limits.max_new_tokens, passed)
        prompts = await run_in_threadpool(self.encode, body)
        copies = body.n or 1
        if len(prompts) * copies > self.limits.max_batch:
            raise UserError(f"prompt, n: at most {self.limits.max_batch} answers to one request.")
        trim = kind == "chat"
        jobs = [
            Job(p, sampling, adapter, body.routing, trim, number, passed)
            for p in prompts
            for number in range(copies)
        ]
        answerings = self.backend.submit(jobs)
        echo = isinstance(body, CompletionRequest) and bool(body.echo)
        answer = Answers(
            self.metrics,
            Reply(kind, body.model),
            answerings,
            body.routing,
            started,
            self.decode,
            echo,
            bool(body.return_tokens_as_token_ids),
        )
        try:
            await unless_gone(request, answer.begin())
            if body.stream:
                include = bool(body.stream_options and body.stream_options.include_usage)
                return EventStream(answer, include)
            return JSONResponse(await unless_gone(request, answer.whole()))
        except BaseException as end:
            answer.cancel()
            if isinstance(end, Gone):
                return Response(status_code=499)  # nobody reads it
            raise

    # ---------------------------------------------------------------------------------- the rest

    def models(self) -> list[Json]:
        common: Json = {
            "object": "model",
            "created": self.started,
            "owned_by": "fedweave",
            "root": public_name(self.backbone.name),
        }
        return [{"id": name, **common, **self.told.get(name, {})} for name in self.names]

    async def health(self) -> JSONResponse:
        problem = await self.backend.problem()
        experts = sum(name.startswith("expert_") for name in self.names)
        facts: Json = {"model": public_name(self.backbone.name), "experts": experts}  # no path of this machine
        facts |= {"max_prompt_tokens": self.max_prompt, "max_tokens": self.limits.max_new_tokens}
        load = {"running": self.backend.running, "waiting": self.backend.waiting}
        status = {"status": "ok"} if not problem else {"status": "unavailable", "reason": problem}
        return JSONResponse({**status, **facts, **load}, 503 if problem else 200)


def build_app(api: Api, key: str | None = None) -> FastAPI:
    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        api.backend.start()
        yield
        await api.backend.stop()

    app = FastAPI(title="fedweave", lifespan=life, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, key=key, limits=api.limits, metrics=api.metrics)

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatRequest) -> Response:
        return await api.respond(request, "chat", body)

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        return await api.respond(request, "text", body)

    @app.get("/v1/models")
    async def models() -> Json:
        return {"object": "list", "data": api.models()}

    @app.get("/v1/models/{name}")
    async def model(name: str) -> Json:
        api.adapter(name)
        return next(m for m in api.models() if m["id"] == name)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(api.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/")
    async def page() -> FileResponse:
        return FileResponse(Path(__file__).parent / "page.html")

    app.get("/health")(api.health)
    speak_openai(app)
    return app
