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
from fedweave.experts.layout import AdapterLayout, Shaped
from fedweave.federation.admission import Door, Receipts, Sealed, check_identity
from fedweave.federation.client import Member
from fedweave.federation.engines.base import Engine
from fedweave.federation.engines.flower.transport import (
    POLL,
    SMALL,
    Badge,
    RemoteSite,
    Transport,
    badges,
    is_gone,
    is_lost,
    opened,
)
from fedweave.federation.hello import Anatomy, Hello, Introduction
from fedweave.federation.message import Message, Refused
from fedweave.federation.site.settings import own_files
from fedweave.federation.steps import Asked, Reply

_GRACE = 30.0  # seconds that a resumed run gives its sites to come back before it goes on with enough of them
_HELLO = 30.0  # seconds after which an unanswered hello is said again: a busy site answers the last one
_TAKEN = "another node has this name; stop one of the two, or rename it"
_BOUND = "its name belongs to another key; use the key that it had, or another name"
_AGAIN = 60.0  # seconds before a node that gave an error is greeted again


class FlowerEngine(Engine):
    """Sites behind a Grid. ``federation`` names this federation to the sites, over all sessions of the run;
    ``settings`` is the config that they are told."""

    grows = True
    bound = True  # whether a name belongs to the key of its node: a simulation's nodes have new keys every time

    def __init__(self, grid: Grid, config: Config, console: Console, federation: str, settings: Config):
        self.grid, self.config, self.console = grid, config, console
        self.transport = Transport(grid, console, federation, settings, config.federation.deadline, self._miss)
        self.members: list[RemoteSite] = []
        self.device = torch.device("cpu")
        self.layers: Mapping[str, Shaped] = {}
        self.identity: Mapping[str, str] = {}
        self.width = 0
        self.model: Anatomy | None = None  # once it is decided
        self._online: dict[int, Badge] = {}  # nodes at the last look
        self._greeted: dict[int, str] = {}  # node -> the site's name, or "" for one that was turned away
        self._again: dict[int, float] = {}  # node -> when to greet it again after an error
        self._hellos: dict[str, tuple[int, float]] = {}  # message -> node that has not answered, until when
        self._gone: set[str] = set()  # sites whose node was gone when they were last asked: said once is enough
        self._waiting: dict[str, RemoteSite] = {}  # sites that are here and take no part yet
        self._models: dict[str, Anatomy] = {}  # what each of them says of its model

    # ---------------------------------------------------------------------------------- who is there

    def know(self, model: Anatomy) -> None:
        """The backbone of this federation; whoever has another one is turned away."""
        self.model, self.identity, self.layers, self.width = model, model.identity, model.layers, model.width
        for name in [name for name in self._waiting if self._models[name] != model]:
            del self._waiting[name]
            self.console.warn(f"site {name} is turned away: {_other_model(self._models[name], model)}.")

    def enrol(self, sites: int) -> None:
        """Wait for the sites that alignment needs; their names in order give their indices. Where the server knows
        no model of its own, it is the one that as many sites have: a single one cannot keep the others out."""
        self._wait(lambda: self._agreed(sites) and len(self._waiting) >= sites, f"{sites} sites", sites)
        self.members = [replace(self._waiting[name], index=i) for i, name in enumerate(sorted(self._waiting))]
        self._waiting = {}
        self.console.say(f"sites: {', '.join(client.name for client in self.members)}")

    def meet(self) -> None:
        """Wait for anybody at all, where the run does not remember the model."""
        self._wait(lambda: self._agreed(1), "a site", 1)

    def _agreed(self, sites: int) -> bool:
        """Whether the model is known, or so many sites have the same."""
        if self.model is None:
            said = [self._models[name] for name in self._waiting]
            shared = next((model for model in said if said.count(model) >= sites), None)
            if shared is not None:
                self.know(shared)
        return self.model is not None

    def restore(self, records: Sequence[dict[str, Any]], tensors: Mapping[str, torch.Tensor]) -> None:
        """The sites of a checkpoint; each is found again when its node says hello."""
        self.members = [RemoteSite(**record) for record in records]
        self._online = badges(self.grid)
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
            len(self.members),
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
        self._wait(lambda: len(self._here()) >= self.needed, f"{self.needed} sites", self.needed)
        return [site for site in self._here() if site.takes_part and site.name not in self.quarantined]

    def _wait(self, enough: Callable[[], bool], what: str, sites: int) -> None:
        """For so many sites, which whoever watches the run sees come."""
        started, said = time.monotonic(), 0.0
        while True:
            self._look_around()
            self.console.on_progress("sites here", len(self._here() or self._waiting), sites)
            if enough():
                return
            waited = time.monotonic() - started
            if waited > self.config.federation.patience:
                raise UserError(
                    f"the server has waited {waited:.0f} s for {what} ({self._who()}); connect them and resume the "
                    "run, or raise federation.patience."
                )
            if waited >= said:
                self.console.say(f"waiting for {what}; {self._who()}")
                said = waited + 30
            time.sleep(4 * POLL)

    def _who(self) -> str:
        """Who is here, and, while nobody has said which model it is, who has another one than most."""
        here = sorted(site.name for site in [*self._here(), *self._waiting.values()])
        said = [self._models[name] for name in self._waiting] if self.model is None else []
        usual = max(said, key=said.count, default=None)
        others = [name for name in here if said and self._models[name] != usual]
        odd = f"; with another model than most: {', '.join(others)}" if others else ""
        return f"here: {', '.join(here) or 'nobody'}{odd}"

    def _look_around(self) -> None:
        """Greet new nodes and notice those that went away."""
        nodes = badges(self.grid)
        if set(self._online) - set(nodes):  # who was turned away may have a place now
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
        fresh = sorted(set(nodes) - set(self._greeted) - {node for node, _ in self._hellos.values()})
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
            told = door.admit(stranger, partial(opened, reply, SMALL), self.console.warn)
            if told is not None:
                self._greeted[node] = self._meet(node, told)
            else:
                self._again[node] = now + _AGAIN

    def _miss(self, client: RemoteSite) -> None:
        """A site that missed a deadline holds up nobody else: it is asked again after its next hello."""
        self._greeted.pop(client.node or -1, None)
        client.node = None

    def _meet(self, node: int, told: Introduction) -> str:
        """A node says who it is; returns its name, or nothing when it is turned away."""
        name, badge = told.name, self._online[node]
        wanted = self.config.federation.fingerprint
        try:
            if badge.name and badge.name != name:
                raise Refused(f"its node is registered as {badge.name}")
            if name in self._waiting:
                raise Refused(_TAKEN)
            if wanted and told.model.fingerprint != wanted:
                raise Refused("its backbone is not the one of federation.fingerprint")
            if self.model is not None and told.model != self.model:
                raise Refused(_other_model(told.model, self.model))
        except Refused as reason:
            self.console.warn(f"site {name} is turned away: {reason}.")
            return ""
        if known := next((site for site in self.members if site.name == name), None):
            return self._take_seat(node, known)
        self._waiting[name] = RemoteSite(-1, name, node=node, key=badge.key)
        self._models[name] = told.model
        return name

    def _take_seat(self, node: int, client: RemoteSite) -> str:
        """A node that bears a site's name is that site if it has its key, and no other is there."""
        key = self._online[node].key
        if client.node is not None or (self.bound and client.key != key):
            self.console.warn(f"site {client.name} is turned away: {_BOUND if client.node is None else _TAKEN}.")
            return ""
        client.node, client.key = node, key
        self.console.say(f"site {client.name} is here.")
        return client.name

    # ---------------------------------------------------------------------------------- the one question

    def replies(self, step: Reply, asked: Sequence[Asked], question: Message) -> Iterator[tuple[Member, Sealed]]:
        self.transport.most = SMALL + self._largest(question)
        here: list[RemoteSite] = [one.member for one in asked if one.member.node is not None]  # type: ignore
        for site, reply in self.transport.ask(step.name, here, question):
            gone = is_gone(reply)
            if not (gone and site.name in self._gone):
                yield site, partial(opened, reply, self.transport.most)
            self._gone = self._gone | {site.name} if gone else self._gone - {site.name}

    def _largest(self, question: Message) -> int:
        """Bytes of the largest answer to it, with room to spare: as much as the question holds, masked in twice as
        many; an adapter or a signature of every bucket and every expert; or the moments of features."""
        rank = max(self.config.experts.rank, self.config.experts.single_rank, self.config.experts.shared_rank)
        units = max(self.config.discovery.max_buckets, self.config.alignment.max_experts)
        adapter = 4 * AdapterLayout.of(self.layers, rank, 1).size if self.layers else 0
        return 2 * (question.size + units * adapter + 8 * self.width * (self.width + 2))


def _other_model(given: Anatomy, own: Anatomy) -> str:
    try:
        check_identity(given.identity, own.identity)
    except Refused as reason:
        return str(reason)
    return "its layers are not those of this federation; give the site the same model files"


def public(config: Config) -> Config:
    """The settings that sites need: nothing of the server's folders, and no path of its model."""
    backbone = replace(config.backbone, **own_files(BackboneConfig()))
    return replace(config, output=None, backbone=backbone, federation=replace(config.federation, test=None))
