"""What stands before and behind every route: the API key, the size of a request, what is counted, the shape of an
error.
"""

import hmac

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedweave.errors import UserError
from fedweave.serving.jobs import Backend, Limits
from fedweave.serving.protocol import ApiError

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/models")


class Metrics:
    """What /metrics shows, in Prometheus' words. Every server has a registry of its own."""

    def __init__(self, backend: Backend):
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "fedweave_requests", "Finished requests.", ["endpoint", "status"], registry=self.registry
        )
        self.tokens = Counter("fedweave_tokens", "Tokens read and written.", ["kind"], registry=self.registry)
        self.answers = Counter("fedweave_answers", "Answers by expert.", ["expert"], registry=self.registry)
        self.unfamiliar = Counter(
            "fedweave_unfamiliar", "Prompts like none before, which no expert answered.", registry=self.registry
        )
        self.first = Histogram(
            "fedweave_first_token_seconds", "From request to first text.", registry=self.registry, buckets=_SECONDS
        )
        self.whole = Histogram(
            "fedweave_request_seconds", "From request to last text.", registry=self.registry, buckets=_SECONDS
        )
        running = Gauge("fedweave_running", "Answers under way.", registry=self.registry)
        waiting = Gauge("fedweave_waiting", "Requests in the queue.", registry=self.registry)
        running.set_function(lambda: backend.running)
        waiting.set_function(lambda: backend.waiting)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class Guard:
    """Before any route: the API key and the size of the body. After it: the count of responses."""

    def __init__(self, app: ASGIApp, key: str | None, limits: Limits, metrics: Metrics):
        self.app, self.key, self.limits, self.metrics = app, key, limits, metrics
        self.too_large = f"the request is larger than {limits.max_body} bytes."

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            return await self.app(scope, receive, send)
        request, size = Request(scope), 0

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                endpoint = scope["path"] if scope["path"] in ENDPOINTS else "other"  # paths are anyone's to invent
                self.metrics.requests.labels(endpoint, str(message["status"])).inc()
            await send(message)

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.limits.max_body:
                raise HTTPException(413, self.too_large)  # FastAPI makes a 400 of any other
            return message

        given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        refusal: ApiError | None = None
        if self.key is not None and not hmac.compare_digest(given.encode(), self.key.encode()):
            headers = {"WWW-Authenticate": "Bearer"}
            refusal = ApiError(401, "the API key is missing or wrong.", "invalid_api_key", headers=headers)
        elif int(request.headers.get("content-length") or 0) > self.limits.max_body:
            refusal = ApiError(413, self.too_large)
        await (respond(refusal) if refusal else self.app)(scope, limited, counted)


def respond(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, error.status, error.headers)


def speak_openai(app: FastAPI) -> None:
    """Every error in the shape that OpenAI clients read."""

    @app.exception_handler(ApiError)
    async def ours(request: Request, error: ApiError) -> JSONResponse:
        return respond(error)

    @app.exception_handler(UserError)
    async def user(request: Request, error: UserError) -> JSONResponse:
        return respond(ApiError(400, str(error)))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return respond(ApiError(400, "the body is not valid JSON."))
        param = ".".join(str(part) for part in first["loc"][1:]) or None
        return respond(ApiError(400, f"{param or 'body'}: {first['msg']}.", param=param))

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> JSONResponse:
        where = "" if error.status_code == 413 else f"{request.method} {request.url.path}: "
        return respond(ApiError(error.status_code, f"{where}{error.detail.rstrip('.')}.", headers=error.headers))

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> JSONResponse:
        return respond(ApiError(500, "the server made a mistake; its log has the details."))
