"""Tasks of Flower's runtime, run in this process.

With ``--isolation process`` a SuperLink or a SuperNode leaves its apps to somebody else; this is that somebody. So
the model stays loaded between messages, a site runs only code that is installed there, never code that came over
the network, and an operator's terminal is the server's terminal.

This is the only module that touches what Flower does not call its public interface; flwr is pinned for it.
"""

import json
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx
from flwr.app import Array, Context, Error, Message, Metadata
from flwr.app.message import make_message
from flwr.common.constant import ErrorCode, SubStatus
from flwr.common.serde import context_from_proto, run_from_proto
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
)
from flwr.serverapp import Grid
from flwr.supercore.constant import SYSTEM_MESSAGE_TYPE, TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import make_task_heartbeat_fn_http
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_head_values_from_object_content,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    inflate_object_from_contents,
    pull_objects,
)
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

from fedweave.errors import UserError, first_line

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
    def typed(self) -> str:
        """The options of `fedweave federate` that name it."""
        words = ["--superlink", self.address]
        words += ["--root-certificates", str(self.root_certificates)] if self.root_certificates else ["--insecure"]
        return shlex.join([*words, *(["--secret", str(self.secret)] if self.secret else [])])

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


class BoundedGrid(HttpGrid):
    """Flower's Grid, with an end to what it fetches of an answer and what it makes of it, where Flower's own trusts
    whoever sends. One that is larger, or cannot be put together, is an error of its sender and costs no other."""

    most = 2**24  # bytes

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        found = self._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=message_ids))
        trees = zip(found.messages_list, found.message_object_trees, strict=True)
        return [self._whole(message.metadata, tree) for message, tree in trees]

    def _whole(self, header: Any, tree: Any) -> Message:
        asked: dict[str, Any] = {"node": self.node, "run_id": self.run.run_id}
        fetch, held = make_pull_object_fn_protobuf(self._runtime_client.PullObject, **asked), [0]

        def counted(number: str) -> bytes:
            content = fetch(number)
            held[0] += len(content)
            if held[0] > self.most:
                raise ObjectPullError(number, "the answer is too large")
            return content

        try:
            numbers = [branch.object_id for branch in iterate_object_tree(tree)]
            contents = pull_objects(numbers, counted)
            confirmed = ConfirmMessageReceivedRequest(message_object_id=header.message_id, **asked)
            self._runtime_client.ConfirmMessageReceived(confirmed)
            check_repeats(contents, self.most)
            message = cast(Message, inflate_object_from_contents(header.message_id, contents))
            message.metadata.__dict__["_message_id"] = header.message_id
            return message
        except httpx.HTTPError:  # the SuperLink is away: nobody's fault
            raise
        except Exception as reason:  # a stranger's bytes
            return make_message(
                metadata=Metadata(
                    run_id=self.run.run_id, message_id="", src_node_id=self.node.node_id,
                    dst_node_id=self.node.node_id, reply_to_message_id=header.reply_to_message_id, group_id="",
                    created_at=time.time(), ttl=0, message_type=SYSTEM_MESSAGE_TYPE,
                ),
                error=Error(ErrorCode.UNKNOWN, f"its answer cannot be put together ({first_line(reason)})"),
            )  # fmt: skip


def check_repeats(contents: Mapping[str, bytes], most: int) -> None:
    """An array names its pieces, and may name one a million times: what it would become is counted before."""
    size = 0
    for content in contents.values():
        kind, pieces, _ = get_object_head_values_from_object_content(content)
        if kind == Array.__qualname__:
            body = json.loads(get_object_body(content, Array))
            size += sum(len(contents[pieces[i]]) for i in body["arraychunk_ids"])
            if size > most:
                raise ValueError(f"it would become more than {most / 1e6:.0f} MB")


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
    grid = BoundedGrid(runtime_api_address=runtime.address, token=token, **runtime.trust)
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
