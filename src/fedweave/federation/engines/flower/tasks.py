"""Tasks of Flower's runtime, run in this process.

With ``--isolation process`` a SuperLink or a SuperNode leaves its apps to somebody else; this is that somebody. So
the model stays loaded between messages, a site runs only code that is installed there, never code that came over
the network, and an operator's terminal is the server's terminal.

This is the only module that touches what Flower does not call its public interface; flwr is pinned for it.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Context, Message
from flwr.common.constant import SubStatus
from flwr.common.serde import context_from_proto, run_from_proto
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest, PushTaskOutputRequest
from flwr.serverapp import Grid
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import make_task_heartbeat_fn_http
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.retry import RetryInvoker, exponential
from flwr.supercore.run import Run
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from fedweave.errors import UserError

POLL = 0.2  # seconds between two looks for work
_HEARTBEAT = 15.0  # seconds; Flower expects one every 30
_ACQUIRE = frozenset({"/flwr.proto.Runtime/AcquireTask"})


@dataclass(frozen=True)
class Runtime:
    """Where a SuperLink's or a SuperNode's Runtime API is, and how to be let in."""

    address: str
    root_certificates: Path | None = None  # None: no TLS
    secret: Path | None = None  # shared with the SuperLink or SuperNode, so that nobody else takes its tasks

    @property
    def trust(self) -> dict[str, Any]:
        root = self.root_certificates
        return {"insecure": root is None, "root_certificates": root.read_bytes() if root else None}

    def client(self, token: str | None = None) -> RuntimeHttpClient:
        """Without a token one that looks for tasks, with one that works on a task."""
        interceptors: list = [RuntimeVersionHttpInterceptor(component_name="SuperExec")]
        if token is not None:
            interceptors.append(RuntimeTokenHttpInterceptor(token))
        elif self.secret is not None:
            interceptors.append(
                SuperExecAuthHttpInterceptor(master_secret=self.secret.read_bytes(), protected_methods=_ACQUIRE)
            )
        return RuntimeHttpClient.from_server_address(
            server_address=self.address, interceptors=interceptors, retry_invoker=_retrying(5.0), **self.trust
        )


def _retrying(seconds: float) -> RetryInvoker:
    """Bridge a short outage; after that the caller hears of it. (Flower's own retries never end.)"""
    return RetryInvoker(
        wait_gen_factory=lambda: exponential(max_delay=2),
        recoverable_exceptions=(httpx.TransportError,),
        max_tries=None,
        max_time=seconds,
    )


def _acquire(client: RuntimeHttpClient, kind: TaskType) -> str | None:
    """The token of a waiting task, now this process's."""
    found = client.AcquireTask(AcquireTaskRequest(supported_task_types=[kind]))
    return found.token if found.HasField("task") and found.token else None


@contextmanager
def _heartbeat(client: RuntimeHttpClient) -> Iterator[None]:
    """Tell Flower that a task is alive. (Flower's own sender does not stop once a heartbeat has failed.)"""
    beat, done = make_task_heartbeat_fn_http(client), threading.Event()

    def keep_beating() -> None:
        while not done.is_set():
            with suppress(Exception):  # the next one may reach it
                beat()
            done.wait(_HEARTBEAT)

    threading.Thread(target=keep_beating, daemon=True).start()
    try:
        yield
    finally:
        done.set()


# -------------------------------------------------------------------------------------- a site


def answer_messages(runtime: Runtime, answer: Callable[[Message], Message], alive: Callable[[], None]) -> None:
    """Answer a SuperNode's messages one after the other, for ever. ``alive`` is called between two looks and may
    raise to end it; a SuperNode that is away is waited for."""
    client, letter = runtime.client(), None
    while True:
        alive()
        try:
            token = _acquire(client, TaskType.CLIENT_APP)
            if token is not None:  # whatever has not come in by now never will: its run has ended
                letter = _Incoming(runtime.client(token))
            if letter is not None and letter.input is not None:
                letter.reply(answer)
                letter = None
                continue
        except (httpx.HTTPError, RuntimeError):  # the SuperNode is starting, or gone in the middle
            letter = None
        time.sleep(POLL)


class _Incoming:
    """A message on its way in. It is fetched in a thread, because Flower waits without end for the parts of a
    message whose run was ended in between."""

    def __init__(self, client: RuntimeHttpClient):
        self.client = client
        self.input: tuple[Message, Context, Run, Fab] | None = None
        threading.Thread(target=self._fetch, daemon=True).start()

    def _fetch(self) -> None:
        with suppress(Exception):  # it stays incomplete
            self.input = pull_task_input(self.client)

    def reply(self, answer: Callable[[Message], Message]) -> None:
        assert self.input is not None
        message, context, _, _ = self.input  # the app that came with it is not looked at
        with _heartbeat(self.client):
            push_message(self.client, answer(message), context)
            push_task_output(self.client, context, SubStatus.COMPLETED, "")
        self.client.close()


# -------------------------------------------------------------------------------------- the server


@contextmanager
def server_task(runtime: Runtime, run_id: int, outage: float) -> Iterator[Grid]:
    """The Grid of a submitted run whose ServerApp is this process. An outage of the SuperLink is bridged for
    ``outage`` seconds."""
    looking, token = runtime.client(), None
    started = time.monotonic()
    while token is None:
        token = _acquire(looking, TaskType.SERVER_APP)
        if token is None and time.monotonic() - started > 30:
            raise UserError(
                f"the SuperLink at {runtime.address} gives this process no task; start it with --isolation process."
            )
        time.sleep(POLL)
    grid = HttpGrid(runtime_api_address=runtime.address, token=token, **runtime.trust)
    grid._retry_invoker = _retrying(outage)
    client = grid._runtime_client
    status, details = SubStatus.FAILED, "the server stopped"
    try:
        with _heartbeat(client):
            task = client.PullTaskInput(PullTaskInputRequest())
            TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, task.run.run_id
            TaskIdentity.node_id = context_from_proto(task.context).node_id
            grid.set_run(run_from_proto(task.run))
            if task.run.run_id != run_id:
                raise UserError(f"the SuperLink handed out run {task.run.run_id} before this one; try again.")
            yield grid
        status, details = SubStatus.COMPLETED, ""
    finally:
        grid._retry_invoker.max_time = 2.0
        with suppress(httpx.HTTPError):  # the SuperLink may be gone; the run folder has everything
            client.PushTaskOutput(PushTaskOutputRequest(sub_status=status, details=details))
        grid.close()
