"""The Flower engine: clients are sites behind a Grid.

Every question goes to all sites at once and answers are used as they come. A site that is away, late, broken or
unknown costs its own answer and nothing else; each is one line for the operator.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from flwr.serverapp import Grid

from fedweave.config import BackboneConfig, Config
from fedweave.console import Console
from fedweave.errors import UserError
from fedweave.experts.layout import Shaped
from fedweave.federation.admission import Door, Receipts, Sealed, check_identity
from fedweave.federation.client import Member
from fedweave.federation.engines.base import Engine
from fedweave.federation.engines.flower.transport import POLL, RemoteSite, Transport, is_lost, opened
from fedweave.federation.hello import Hello, Introduction
from fedweave.federation.message import Message, Refused
from fedweave.federation.site.settings import own_files
from fedweave.federation.steps import Asked, Reply

_GRACE = 30.0  # seconds that a resumed run gives its sites to come back before it goes on with enough of them
_HELLO = 30.0  # seconds after which an unanswered hello is said again: a busy site answers the last one
_TAKEN = "another node has this name; stop one of the two, or rename it"
_AGAIN = 60.0  # seconds before a node that gave an error is greeted again


class FlowerEngine(Engine):
    """Sites behind a Grid. ``federation`` names this federation to the sites, over all sessions of the run;
    ``settings`` is the config that they are told."""

    grows = True

    def __init__(self, grid: Grid, config: Config, console: Console, federation: str, settings: Config):
        self.grid, self.config, self.console = grid, config, console
        self.transport = Transport(grid, console, federation, settings, config.federation.deadline, self._miss)
        self.members: list[RemoteSite] = []
        self.device = torch.device("cpu")
        self.layers: Mapping[str, Shaped] = {}
        self.identity: Mapping[str, str] = {}
        self.width = 0
        self.fingerprint = ""
        self._online: set[int] = set()  # nodes at the last look
        self._greeted: dict[int, str] = {}  # node -> the site's name, or "" for one that was turned away
        self._again: dict[int, float] = {}  # node -> when to greet it again after an error
        self._hellos: dict[str, tuple[int, float]] = {}  # message -> node that has not answered, until when
        self._waiting: dict[str, RemoteSite] = {}  # sites that are here and take no part yet

    # ---------------------------------------------------------------------------------- who is there

    def enrol(self, sites: int) -> None:
        """Wait for the sites that alignment needs; their names in order give their indices."""
        self._wait(lambda: len(self._waiting) >= sites, f"{sites} sites")
        self.members = [replace(self._waiting[name], index=i) for i, name in enumerate(sorted(self._waiting))]
        self._waiting = {}
        self.console.say(f"sites: {', '.join(client.name for client in self.members)}")

    def meet(self) -> None:
        """Wait for anybody at all: the first site says what the backbone is."""
        self._wait(lambda: bool(self.fingerprint), "a site")

    def restore(self, records: Sequence[dict[str, Any]], tensors: Mapping[str, torch.Tensor]) -> None:
        """The sites of a checkpoint; each is found again when its node says hello."""
        self.members = [RemoteSite(**record) for record in records]
        self._online = set(self.grid.get_node_ids())
        for client in self.members:
            if (early := self._waiting.pop(client.name, None)) is not None:  # it was greeted before this was known
                assert early.node is not None
                self._greeted[early.node] = self._take_seat(early.node, client)
        end = time.monotonic() + min(_GRACE, self.config.federation.patience)
        self._wait(
            lambda: (
                len(self._here()) == len(self.members)
                or (time.monotonic() > end and len(self._here()) >= self.needed)
            ),
            f"the run's {len(self.members)} sites",
        )

    @property
    def needed(self) -> int:
        return min(self.config.federation.min_answers, len(self.members))

    def _here(self) -> list[RemoteSite]:
        return [client for client in self.members if client.node is not None]

    def newcomers(self) -> list[RemoteSite]:
        """Sites that are here and take no part yet; each is given the number that it would have."""
        self._look_around()
        newcomers = list(self._waiting.values())
        for index, site in enumerate(newcomers, max((site.index for site in self.members), default=-1) + 1):
            site.index = index
        return newcomers

    def welcome(self, newcomer: RemoteSite) -> None:
        self._waiting.pop(newcomer.name)
        self.members.append(newcomer)

    def only(self, answered: set[int]) -> None:
        silent = [site for site in self.members if site.index not in answered]
        if len(self.members) - len(silent) < max(1, self.config.federation.min_answers):
            raise UserError("too few sites answered to align; look at the lines above and start again.")
        super().only(answered)
        for site in silent:  # it may still join
            self._greeted.pop(site.node or -1, None)
            self.console.warn(f"site {site.name} takes no part in alignment; it joins when it is ready.")

    def present(self) -> list[RemoteSite]:
        """The sites that can be asked now; too few are waited for."""
        self._look_around()
        self._wait(lambda: len(self._here()) >= self.needed, f"{self.needed} sites")
        return [site for site in self._here() if site.takes_part]

    def _wait(self, enough: Callable[[], bool], what: str) -> None:
        started, said = time.monotonic(), 0.0
        while True:
            self._look_around()
            if enough():
                return
            waited = time.monotonic() - started
            if waited > self.config.federation.patience:
                raise UserError(
                    f"the server has waited {waited:.0f} s for {what}; connect them and resume the run, or raise "
                    "federation.patience."
                )
            if waited >= said:
                here = sorted(site.name for site in [*self._here(), *self._waiting.values()])
                self.console.say(f"waiting for {what}; here: {', '.join(here) or 'nobody'}")
                said = waited + 30
            time.sleep(4 * POLL)

    def _look_around(self) -> None:
        """Greet new nodes and notice those that went away."""
        nodes = set(self.grid.get_node_ids())
        if self._online - nodes:  # who was turned away may have a place now
            self._greeted = {node: name for node, name in self._greeted.items() if name}
        self._online = nodes
        for client in self._here():
            if client.node not in nodes:
                self.console.warn(f"site {client.name} is away.")
                client.node = None
        for name in [name for name, client in self._waiting.items() if client.node not in nodes]:
            del self._waiting[name]
        self._greeted = {node: name for node, name in self._greeted.items() if node in nodes}
        now = time.monotonic()
        self._hellos = {k: (node, end) for k, (node, end) in self._hellos.items() if node in nodes and end > now}
        fresh = sorted(nodes - set(self._greeted) - {node for node, _ in self._hellos.values()})
        strangers = [
            RemoteSite(-1, f"node {node}", node=node) for node in fresh if self._again.get(node, 0.0) < now
        ]
        greeted = self.transport.push(Hello.name, strangers, Message(), _HELLO)
        self._hellos |= {number: (stranger.node or 0, now + _HELLO) for number, stranger in greeted.items()}
        for reply in self.transport.pull(self._hellos):  # nobody is waited for: a silent node holds up no round
            node, _ = self._hellos.pop(reply.metadata.reply_to_message_id)
            if is_lost(reply):
                continue  # it is greeted again at the next look
            stranger = RemoteSite(-1, f"node {node}", node=node)
            asked = Asked(stranger, Message(facts={"t": 0}), self.layers, self.width)
            door = Door(self.config, Hello(), [asked], {}, self.device, Receipts())
            told = door.admit(stranger, partial(opened, reply), self.console.warn)
            if told is not None:
                self._greeted[node] = self._meet(node, told)
            else:
                self._again[node] = now + _AGAIN

    def _miss(self, client: RemoteSite) -> None:
        """A site that missed a deadline holds up nobody else: it is asked again after its next hello."""
        self._greeted.pop(client.node or -1, None)
        client.node = None

    def _meet(self, node: int, told: Introduction) -> str:
        """A node says who it is; returns its name, or nothing when it is turned away. The first site says what the
        backbone is; the others must have the same."""
        name = told.name
        known = next((site for site in self.members if site.name == name), None)
        try:
            if name in self._waiting:
                raise Refused(_TAKEN)
            if not self.fingerprint:
                self.identity, self.layers, self.width = told.identity, told.layers, told.width
                self.fingerprint = told.fingerprint
            check_identity(told.identity, self.identity)
        except Refused as reason:
            self.console.warn(f"site {name} is turned away: {reason}.")
            return ""
        if known is not None:
            return self._take_seat(node, known)
        self._waiting[name] = RemoteSite(-1, name, node=node, home=node)
        return name

    def _take_seat(self, node: int, client: RemoteSite) -> str:
        """A node that bears a site's name is that site, unless the one that was is still there, greeted or not."""
        if client.node is not None or (client.home != node and client.home in self._online):
            self.console.warn(f"site {client.name} is turned away: {_TAKEN}.")
            return ""
        client.node = client.home = node
        self.console.say(f"site {client.name} is here.")
        return client.name

    # ---------------------------------------------------------------------------------- the one question

    def replies(self, step: Reply, asked: Sequence[Asked], question: Message) -> Iterator[tuple[Member, Sealed]]:
        here: list[RemoteSite] = [one.member for one in asked if one.member.node is not None]  # type: ignore
        for site, reply in self.transport.ask(step.name, here, question):
            yield site, partial(opened, reply)


def public(config: Config) -> Config:
    """The settings that sites need: nothing of the server's folders, and no path of its model."""
    backbone = replace(config.backbone, **own_files(BackboneConfig()))
    return replace(config, output=None, backbone=backbone, federation=replace(config.federation, test=None))
