"""Everything together: load, bind, serve."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from fedweave.backbone.load import Backbone
from fedweave.console import Console
from fedweave.description.record import Experts
from fedweave.errors import UserError
from fedweave.inference.model import FedWeaveModel
from fedweave.serving.app import Api, build_app
from fedweave.serving.gateway import Gateway
from fedweave.serving.jobs import Limits
from fedweave.serving.local import LocalBackend


@dataclass(frozen=True)
class ServerSettings:
    host: str = "127.0.0.1"
    port: int = 8000
    key: str | None = None
    upstream: str | None = None
    upstream_key: str | None = None
    upstream_kind: str = "vllm"
    told: Experts | None = None  # what the page says of the experts


def serve(load: Callable[[], FedWeaveModel], settings: ServerSettings, limits: Limits, console: Console) -> None:
    """Load a model and answer until interrupted. The port is taken first: a clash shows at once."""
    listener = _listen(settings.host, settings.port)
    if settings.key is None and settings.host not in ("127.0.0.1", "localhost", "::1"):
        console.warn(f"anyone who reaches {settings.host} may use this server; --api-key would ask for a key.")
    model = load()
    limits = fitting(limits, model.backbone)
    with suppress(KeyboardInterrupt):  # Ctrl-C: uvicorn has let the answers under way come to their end
        asyncio.run(_serve(model, settings, limits, listener, console))


def uvicorn_config(app: FastAPI, grace: int) -> uvicorn.Config:
    """``grace``: seconds that answers under way get once the server is told to stop."""
    return uvicorn.Config(
        app, http=Patience, log_level="warning", access_log=False, ws="none", timeout_graceful_shutdown=grace
    )


class Patience(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """HTTP for clients that speak up: a connection whose request is not whole in time, or whose headers have no
    end, is closed; thousands of half-open ones would take all that there are."""

    patience = 30.0  # seconds
    longest = 65536  # bytes of headers

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._heard = 0  # bytes of headers that have not come to their end
        self._late: asyncio.TimerHandle | None = self.loop.call_later(self.patience, transport.close)

    def data_received(self, data: bytes) -> None:
        self._heard += len(data)
        super().data_received(data)
        if self.cycle is not None and (self.cycle.more_body or not self.cycle.response_complete):
            self._heard = 0
        if self._heard > self.longest:
            self.transport.close()
        whole = self._heard == 0 and not self.cycle.more_body
        if whole and self._late is not None:
            self._late.cancel()
            self._late = None
        elif not whole and self._late is None:
            self._late = self.loop.call_later(self.patience, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._late is not None:
            self._late.cancel()
        super().connection_lost(exc)


async def _serve(
    model: FedWeaveModel, settings: ServerSettings, limits: Limits, listener: socket.socket, console: Console
) -> None:
    experts = model.mixture.layout.experts
    backend: LocalBackend | Gateway = LocalBackend(model, limits)
    if settings.upstream:
        backend = Gateway(model, limits, settings.upstream, settings.upstream_key, settings.upstream_kind)
        if problem := await backend.problem():
            console.warn(f"{problem}; requests will fail until it does.")
        elif problem := await backend.unapplied():
            raise UserError(problem)
    app = build_app(Api(model.backbone, model.experts.choices, backend, limits, settings.told), settings.key)
    host, port = listener.getsockname()[:2]
    console.say(f"{experts} experts on {model.backbone.name}; http://{host}:{port} (API at /v1, Ctrl-C stops)")
    await uvicorn.Server(uvicorn_config(app, grace=10)).serve(sockets=[listener])


def fitting(limits: Limits, backbone: Backbone) -> Limits:
    """Prompt and answer together must fit what the backbone was made for."""
    longest, prompt = backbone.longest, limits.prompt(backbone)
    if not longest or prompt + limits.max_new_tokens <= longest:
        return limits
    if limits.yields and longest > prompt:
        return replace(limits, max_new_tokens=longest - prompt)
    raise UserError(
        f"--max-new-tokens {limits.max_new_tokens} does not fit: prompts may have {prompt} tokens and "
        f"{backbone.name} takes {longest} in all; use at most {longest - prompt}."
    )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"cannot listen on {host}:{port}: {reason}; choose another --host or --port.") from None
    return listener
