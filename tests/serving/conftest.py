"""Real servers on real ports: in a thread for most tests, as a process where that matters."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import openai
import psutil
import pytest
import uvicorn

from fedweave.description.record import Experts
from fedweave.inference.model import FedWeaveModel
from fedweave.runs.use import load
from fedweave.serving.app import Api, build_app
from fedweave.serving.gateway import Gateway
from fedweave.serving.jobs import Limits
from fedweave.serving.local import LocalBackend
from fedweave.serving.server import _listen, uvicorn_config
from tests.helpers import command

LIMITS = Limits(max_batch=4, max_queue=80, max_new_tokens=48, max_body=20_000)


@dataclass
class Running:
    url: str
    backend: LocalBackend | Gateway

    def client(self, key: str = "any", **options) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=300, **options)


@contextmanager
def running(
    model: FedWeaveModel,
    limits: Limits = LIMITS,
    key: str | None = None,
    upstream: str | None = None,
    told: Experts | None = None,
    kind: str = "vllm",
) -> Iterator[Running]:
    """A server in a thread, on a free port."""
    listener = _listen("127.0.0.1", 0)
    ready: list[tuple[uvicorn.Server, LocalBackend | Gateway]] = []

    async def main() -> None:
        backend = Gateway(model, limits, upstream, kind=kind) if upstream else LocalBackend(model, limits)
        app = build_app(Api(model.backbone, model.experts.choices, backend, limits, told), key)
        server = uvicorn.Server(uvicorn_config(app, grace=2))
        ready.append((server, backend))
        await server.serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    while not (ready and ready[0][0].started):
        assert thread.is_alive()
        thread.join(0.02)
    yield Running(f"http://127.0.0.1:{listener.getsockname()[1]}", ready[0][1])
    ready[0][0].should_exit = True
    thread.join(120)
    assert not thread.is_alive()


@contextmanager
def process(folder, environment=None, *options: str):
    """(address, process) of `fedweave serve`."""
    serve = command("serve", folder, "--port", "0", *options)
    server = subprocess.Popen(serve, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        line = server.stderr.readline()
        assert "http://" in line, line + server.stderr.read()
        yield "http://" + line.split("http://")[1].split()[0], psutil.Process(server.pid)
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(120) == 0
        assert "Traceback" not in server.stderr.read()


@pytest.fixture(scope="session")
def served(exported):
    """(address, process) of a server with the tiny model, as a user starts it."""
    with process(exported, None, "--max-batch", "24", "--max-new-tokens", "200") as one:
        yield one


@pytest.fixture(scope="session")
def model(exported) -> FedWeaveModel:
    """The model as served."""
    return load(exported, device="cpu")


@pytest.fixture(scope="session")
def twin(exported) -> FedWeaveModel:
    """The same model for direct questions: the served one belongs to its backend's thread."""
    return load(exported, device="cpu")


@pytest.fixture(scope="module")
def server(model):
    with running(model) as one:
        yield one


def ask(prompt: str, **options) -> dict:
    return {"model": "fedweave", "messages": [{"role": "user", "content": prompt}], **options}
