"""The Flower engine: clients are sites behind a Grid.

Every question goes to all sites at once and answers are used as they come. A site that is away, late, broken or
unknown costs its own answer and nothing else; each is one line for the operator.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from flwr.serverapp import Grid

from fedweave.config import BackboneConfig, Config
from fedweave.console import Console
from fedweave.errors import UserError
from fedweave.federation.client import Prototypes
from fedweave.federation.engine import Engine
from fedweave.federation.evaluate import Loss
from fedweave.federation.flower.post import POLL, Post, RemoteClient, is_lost
from fedweave.federation.intake import Refused, check_identity
from fedweave.federation.letters import Letter
from fedweave.federation.parcel import Courier, Parcel, array_bytes
from fedweave.federation.wire import (
    read_parcel,
    read_prototypes,
    read_router_update,
    read_starts,
    router_facts,
    state_letter,
    to_arrays,
)
from fedweave.methods.base import Method, ServerState
from fedweave.router.mlp import RouterLayout

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
        self.post = Post(grid, console, federation, settings, config.federation.deadline, self._miss)
        self.clients: list[RemoteClient] = []
        self.device = torch.device("cpu")
        self.fingerprint = ""
        self._online: set[int] = set()  # nodes at the last look
        self._greeted: dict[int, str] = {}  # node -> the site's name, or "" for one that was turned away
        self._again: dict[int, float] = {}  # node -> when to greet it again after an error
        self._hellos: dict[str, tuple[int, float]] = {}  # message -> node that has not answered, until when
        self._waiting: dict[str, RemoteClient] = {}  # sites that are here and take no part yet

    # ---------------------------------------------------------------------------------- who is there

    def enrol(self, sites: int) -> None:
        """Wait for the sites that alignment needs; their names in order give their indices."""
        self._wait(lambda: len(self._waiting) >= sites, f"{sites} sites")
        self.clients = [replace(self._waiting[name], index=i) for i, name in enumerate(sorted(self._waiting))]
        self._waiting = {}
        self.console.say(f"sites: {', '.join(client.name for client in self.clients)}")

    def meet(self) -> None:
        """Wait for anybody at all: the first site says what the backbone is."""
        self._wait(lambda: bool(self.fingerprint), "a site")

    def restore(self, records: Sequence[dict[str, Any]], tensors: Mapping[str, torch.Tensor]) -> None:
        """The sites of a checkpoint; each is found again when its node says hello."""
        self.clients = [RemoteClient(**record) for record in records]
        self._online = set(self.grid.get_node_ids())
        for client in self.clients:
            if (early := self._waiting.pop(client.name, None)) is not None:  # it was greeted before this was known
                assert early.node is not None
                self._greeted[early.node] = self._take_seat(early.node, client)
        end = time.monotonic() + min(_GRACE, self.config.federation.patience)
        self._wait(
            lambda: (
                len(self._here()) == len(self.clients)
                or (time.monotonic() > end and len(self._here()) >= self.needed)
            ),
            f"the run's {len(self.clients)} sites",
        )

    @property
    def needed(self) -> int:
        return min(self.config.federation.min_answers, len(self.clients))

    def _here(self) -> list[RemoteClient]:
        return [client for client in self.clients if client.node is not None]

    def present(self, method: Method, state: ServerState) -> list[RemoteClient]:
        """The sites that can be asked now. Newcomers are admitted first; too few sites are waited for."""
        self._look_around()
        for newcomer in list(self._waiting.values()):
            self._admit(method, state, self._waiting.pop(newcomer.name))
        self._wait(lambda: len(self._here()) >= self.needed, f"{self.needed} sites")
        return [client for client in self._here() if any(m >= 0 for m in client.assignment)]

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
                self.console.say(f"waiting for {what}; here: {', '.join(sorted(self._names())) or 'nobody'}")
                said = waited + 30
            time.sleep(4 * POLL)

    def _names(self) -> list[str]:
        return [client.name for client in [*self._here(), *self._waiting.values()]]

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
        strangers = [RemoteClient(-1, "", node) for node in fresh if self._again.get(node, 0.0) < now]
        self._hellos |= self.post.push(
            "hello", strangers, Letter(), lambda stranger: (stranger.node, now + _HELLO), _HELLO
        )
        for reply in self.post.pull(self._hellos):  # nobody is waited for: a silent node holds up no round
            node, _ = self._hellos.pop(reply.metadata.reply_to_message_id)
            if is_lost(reply):
                continue  # it is greeted again at the next look
            letter = self.post.opened(reply, f"node {node}")
            if letter is not None:
                self._greeted[node] = self._meet(node, letter)
            else:
                self._again[node] = now + _AGAIN

    def _miss(self, client: RemoteClient) -> None:
        """A site that missed a deadline holds up nobody else: it is asked again after its next hello."""
        self._greeted.pop(client.node or -1, None)
        client.node = None

    def _meet(self, node: int, letter: Letter) -> str:
        """A node says who it is; returns its name, or nothing when it is turned away."""
        name = str(letter.facts.get("name", ""))[:80]
        known = next((client for client in self.clients if client.name == name), None)
        try:
            if not name:
                raise Refused("it has no name")
            if name in self._waiting:
                raise Refused(_TAKEN)
            self._compare(letter)
        except Refused as reason:
            self.console.warn(f"site {name or node} is turned away: {reason}.")
            return ""
        if known is not None:
            return self._take_seat(node, known)
        self._waiting[name] = RemoteClient(-1, name, node, home=node)
        return name

    def _take_seat(self, node: int, client: RemoteClient) -> str:
        """A node that bears a site's name is that site, unless the one that was is still there, greeted or not."""
        if client.node is not None or (client.home != node and client.home in self._online):
            self.console.warn(f"site {client.name} is turned away: {_TAKEN}.")
            return ""
        client.node = client.home = node
        self.console.say(f"site {client.name} is here.")
        return client.name

    def _compare(self, letter: Letter) -> None:
        """The first site says what the backbone is; the others must have the same."""
        facts: dict[str, Any] = letter.facts
        if not self.fingerprint:
            self.identity = {part: str(facts.get(part, "")) for part in ("backbone", "tokenizer")}
            shapes = zip(facts["layers"], facts["inputs"], facts["outputs"], strict=True)
            self.layers = {n: SimpleNamespace(in_features=i, out_features=o) for n, i, o in shapes}
            self.fingerprint, self.width = str(facts["fingerprint"]), int(facts["width"])
        check_identity(facts, self.identity)

    def _admit(self, method: Method, state: ServerState, newcomer: RemoteClient) -> None:
        """A site that comes after alignment: its buckets go to the experts that they resemble."""
        newcomer.index = max((client.index for client in self.clients), default=-1) + 1
        for _, told in self._prototypes(method, [newcomer]):
            newcomer.sizes, newcomer.note = told.sizes, told.note
            lines = method.admit(self, state, newcomer, told)
            self.clients.append(newcomer)
            self.console.say(f"site {newcomer.name} joins with {len(told.sizes)} buckets: {lines}")

    # ---------------------------------------------------------------------------------- the questions

    def prototypes(self, method: Method) -> list[Prototypes]:
        found = {client.index: told for client, told in self._prototypes(method, self._here())}
        silent = [client for client in self.clients if client.index not in found]
        self.clients = [client for client in self.clients if client.index in found]
        if len(self.clients) < max(1, self.config.federation.min_answers):
            raise UserError("too few sites answered to align; look at the lines above and start again.")
        for client in silent:  # it may still join
            self._greeted.pop(client.node or -1, None)
            self.console.warn(f"site {client.name} takes no part in alignment; it joins when it is ready.")
        for client in self.clients:
            told = found[client.index]
            client.sizes, client.note, client.assignment = told.sizes, told.note, told.assignment
        return [found[client.index] for client in self.clients]

    def _prototypes(
        self, method: Method, clients: Sequence[RemoteClient]
    ) -> Iterator[tuple[RemoteClient, Prototypes]]:
        signer = method.signatures(self)
        width, dtype = (sum(signer.widths), signer.dtype) if signer else (0, torch.float32)
        for client, letter in self.post.ask("discover", clients, Letter()):
            try:
                yield client, read_prototypes(letter, width, dtype)
            except Refused as reason:
                self.console.warn(f"site {client.name}'s buckets are refused: {reason}.")

    def starts(self, method: Method) -> Iterator[tuple[int, torch.Tensor, float]]:
        size = self.layout(self.config.experts.rank, 1).size
        for client, letter in self.post.ask("start", self._here(), Letter()):
            try:
                found = read_starts(letter, size)
                if {m for m, _, _ in found} != set(client.assignment):
                    raise Refused("it sends other experts than its buckets have")
            except Refused as reason:
                self.console.warn(f"site {client.name}'s adapters are refused: {reason}.")
            else:
                yield from found

    def router_updates(
        self, method: Method, router: RouterLayout, phi: torch.Tensor, t: int, pupils: Sequence[Any], contrast: str
    ) -> Iterator[tuple[torch.Tensor, int]]:
        letter = Letter(to_arrays({"phi": phi}), {"t": t, "contrast": contrast, **router_facts(router)})
        here = [client for client in pupils if client.node is not None]
        for client, answer in self.post.ask("warm", here, letter):
            try:
                yield read_router_update(answer, router.size, len(client))
            except Refused as reason:
                self.console.warn(f"site {client.name}'s router is refused: {reason}.")

    def answers(
        self, method: Method, state: ServerState, participants: Sequence[RemoteClient], t: int, courier: Courier
    ) -> Iterator[Parcel]:
        for client, letter in self.post.ask("train", participants, state_letter(state, t)):
            yield read_parcel(letter, client.index)

    def broadcast_bytes(self, state: ServerState, courier: Courier) -> int:
        """The whole state travels, whatever the method shares of it."""
        return array_bytes([state.theta, *([state.phi] if state.phi is not None else [])])

    def losses(self, state: ServerState, t: int) -> dict[str, Loss]:
        """Every site's validation loss, by name."""
        found = {}
        for client, letter in self.post.ask("evaluate", self._here(), state_letter(state, t)):
            facts: dict[str, Any] = letter.facts
            try:
                loss = Loss(float(facts["total"]), float(facts["entropy"]), int(facts["count"]))
            except (KeyError, TypeError, ValueError):
                continue
            if 0 < loss.count <= self.config.federation.max_samples and math.isfinite(loss.mean):
                found[client.name] = loss
        return found


def public(config: Config) -> Config:
    """The settings that sites need: nothing of the server's folders, and no path of its model."""
    plain = BackboneConfig()
    backbone = replace(
        config.backbone, model=plain.model, revision=plain.revision, device=plain.device, dtype=plain.dtype
    )
    return replace(config, output=None, backbone=backbone, federation=replace(config.federation, test=None))
