"""A Grid without a network: real Flower messages, through Flower's own bytes, answered by real sites."""

from __future__ import annotations

import io

import pytest
from flwr.app import Error, Message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedweave.config import Config
from fedweave.console import Console
from fedweave.federation.engines.flower.engine import FlowerEngine
from fedweave.federation.engines.flower.transport import from_records, to_records
from fedweave.federation.rounds import federate
from fedweave.federation.site.site import Models, Site
from fedweave.federation.site.source import Share
from fedweave.methods import build_method


def carried(message: Message) -> Message:
    """What arrives at the other end of a wire."""
    proto = message_to_proto(message)
    return message_from_proto(type(proto).FromString(proto.SerializeToString()))


class LoopbackGrid(Grid):
    """Nodes are functions from question to answer. ``sent`` keeps every message of both directions."""

    def __init__(self, nodes):
        self.nodes, self.replies, self.sent = dict(nodes), {}, []
        self.registered = {}  # node -> the operator's name for it
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
        self.fate = lambda step, node, t: "answers"  # or: dies, late, twice

    def set_run(self, run): ...

    @property
    def run(self): ...

    def create_message(self, *_args, **_kwargs):
        raise NotImplementedError

    def get_node_ids(self):
        return list(self.nodes)

    def get_nodes(self):
        return [
            NodeInfo(node_id=node, public_key=getattr(site, "key", b""), name=self.registered.get(node, ""))
            for node, site in self.nodes.items()
        ]

    def push_messages(self, messages):
        numbers = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = message.object_id
            node = message.metadata.dst_node_id
            arrived = carried(message)
            question = from_records(arrived.content)
            self.sent.append(("down", node, question))
            fate = self.fate(question.facts["step"], node, question.facts.get("t"))
            number = f"{len(self.sent)}-{message.object_id}"
            numbers.append(number)
            arrived.metadata.__dict__["_message_id"] = number
            if fate == "late":
                continue
            if fate == "dies" or node not in self.nodes:
                reply = Message(Error(5, "Node Unavailable"), reply_to=arrived)
            else:
                answer = self.nodes[node](question)
                self.sent.append(("up", node, answer))
                reply = Message(to_records(answer), reply_to=arrived)
            self.replies[number] = [carried(reply)] * (2 if fate == "twice" else 1)
        return numbers

    def pull_messages(self, message_ids):
        return [reply for number in message_ids for reply in self.replies.pop(number, [])]

    def send_and_receive(self, messages, *, timeout=None):
        raise NotImplementedError


class Federation:
    """A server and its sites, in one process but with nothing in common except messages."""

    def __init__(self, config: Config, models: Models, sites: list[Site] | None = None):
        self.config = config
        names = range(config.data.clients)
        self.sites = sites or [Site(Share(config, i), models, build_method, Console(quiet=True)) for i in names]
        self.grid = LoopbackGrid({100 + i: self.answering(site) for i, site in enumerate(self.sites)})
        self.console = Console(stream=io.StringIO())
        self.engine = FlowerEngine(self.grid, config, self.console, "test", config)

    @staticmethod
    def answering(site: Site):
        def answer(question):
            try:
                return site.answer(question)
            finally:
                site.rest()

        answer.key = str(id(site)).encode()  # a site has one, whichever node it is
        return answer

    @property
    def said(self) -> str:
        return self.console.stream.getvalue()

    def run(self, sites: int | None = None):
        """(first state, final state, reports)"""
        method, reports = build_method(self.config), []
        self.engine.enrol(sites or len(self.grid.nodes))
        state = method.prepare(self.engine)
        rounds = range(self.config.training.rounds)
        final = federate(method, self.engine, state, rounds, lambda _, report: reports.append(report))
        return state, final, reports


@pytest.fixture(scope="session")
def models() -> Models:
    return Models()
