"""What stands before and behind every route: the API key, the size of a request, the shape of an error."""

from __future__ import annotations

import hmac

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedweave.errors import UserError
from fedweave.serving.jobs import Limits
from fedweave.serving.metrics import Metrics
from fedweave.serving.protocol import error_body

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/models")


class ApiError(Exception):
    def __init__(self, status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers


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
                endpoint = scope["path"] if scope["path"] in ENDPOINTS else "other"  # paths are anyone's to invent
                self.metrics.requests.labels(endpoint, str(message["status"])).inc()
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


def speak_openai(app: FastAPI) -> None:
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

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(error_body(500, "the server made a mistake; its log has the details."), 500)
