"""A finished (or stopped) run loaded again for diagnosis: its data, its kept states, its labels if it has any."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from fedweave.console import Console
from fedweave.data.rows import UNLABELLED
from fedweave.errors import UserError
from fedweave.federation.client import Client
from fedweave.federation.method import Method
from fedweave.federation.state import ServerState
from fedweave.methods import build_method
from fedweave.runs.folder import RunFolder, elsewhere
from fedweave.runs.workspace import Workspace, prepare
from fedweave.training.schedule import allot_steps


@dataclass
class Sample:
    """What stands for the whole where the model itself is asked."""

    clients: list[Client]
    batches: int
    batch_size: int


@dataclass
class Subject:
    """What the diagnostics look at."""

    workspace: Workspace
    method: Method
    states: dict[int, ServerState]  # kept states with the experts of the one under diagnosis, by completed rounds
    round: int  # the one under diagnosis
    completed: int  # rounds that the run has made

    @property
    def state(self) -> ServerState:
        return self.states[self.round]

    @cached_property
    def clients(self) -> list[Client]:
        """Those that train, without rows that no expert serves."""
        return [_served(client) for client in self.workspace.engine.members if client.takes_part]

    # ---------------------------------------------------------------------------------- patterns

    @cached_property
    def patterns(self) -> list[str]:
        """Task labels as proxies of the latent patterns; fewer than two tell nothing."""
        return list(dict.fromkeys(label for c in self.clients for label in self.workspace.client_labels[c.index]))

    @property
    def labelled(self) -> bool:
        return len(self.patterns) > 1 and UNLABELLED not in self.patterns

    @cached_property
    def pattern(self) -> dict[int, np.ndarray]:
        """[n] pattern numbers of every client, by its index."""
        labels, found = self.workspace.client_labels, {}
        for client in self.workspace.engine.members:
            if client.takes_part:
                own = np.array([self.patterns.index(x) for x in labels[client.index]])
                found[client.index] = own[client.rows]
        return found

    def mixture(self, client: Client, members: np.ndarray | None = None) -> np.ndarray:
        """How many examples of every pattern a client (or a bucket of it) holds, [K]."""
        chosen = self.pattern[client.index]
        return np.bincount(chosen if members is None else chosen[members], minlength=len(self.patterns))

    # ---------------------------------------------------------------------------------- buckets

    @cached_property
    def units(self) -> list[tuple[Client, int]]:
        """Every bucket of every client."""
        return [(client, c) for client in self.clients for c in range(len(client.buckets))]

    @cached_property
    def anchor(self) -> np.ndarray:
        """[U] a(i,c)."""
        return np.array([client.assignment[c] for client, c in self.units])

    @cached_property
    def unit(self) -> dict[int, np.ndarray]:
        """[n] the unit that each example of a client lies in, by its index."""
        of = {client.index: np.zeros(len(client.data), dtype=int) for client in self.clients}
        for u, (client, c) in enumerate(self.units):
            of[client.index][client.buckets[c]] = u
        return of

    @cached_property
    def step_share(self) -> np.ndarray:
        """[U] share of its client's steps that a bucket gets."""
        return np.concatenate([np.array(self.step_budget(c)) / sum(self.step_budget(c)) for c in self.clients])

    def step_budget(self, client: Client) -> list[int]:
        return allot_steps([len(b) for b in client.buckets], self.workspace.config.training.local_steps)

    def upload(self, whole_clients: bool = False) -> np.ndarray:
        """[U, M] weight of a unit's client in every expert's average: as the method counts, or by client size."""
        experts = self.state.layout.experts
        rows = []
        for client in self.clients:
            counts = self.method.counts(client, self.state).numpy()
            rows.append(np.full(experts, float(len(client))) if whole_clients else counts)
        counted = np.stack(rows)  # [clients, M]
        weight = counted / counted.sum(0).clip(min=1e-12)
        return weight.repeat([len(client.buckets) for client in self.clients], axis=0)

    # ---------------------------------------------------------------------------------- routing

    def phi(self, client: Client, state: ServerState) -> torch.Tensor:
        """[Q] the router state that a client trains from."""
        phi = self.method.lane(client, state, 0).phi
        if phi is None:  # the router is not trained: it is everybody's
            assert state.router is not None and state.phi is not None
            return state.router.forgetting(state.phi[0])
        return phi

    def gates(self, client: Client, state: ServerState) -> np.ndarray:
        """[n, M] router weights of a client's training examples, as it trains."""
        assert state.router is not None
        if (given := self.method.lane(client, state, 0).gates) is not None:
            return given.double().numpy()
        with torch.no_grad():
            phi = self.phi(client, state)
            return state.router.trained.route(phi, client.data.features.to(phi)).double().cpu().numpy()


def _served(client: Client) -> Client:
    """The client with the rows alone that have an expert: others wait for one, or are kept apart."""
    if len(client.rows) == len(client.data):
        return client
    place = np.full(len(client.data), -1)
    place[client.rows] = np.arange(len(client.rows))
    return replace(
        client, data=client.data.part(client.rows), buckets=[place[bucket] for bucket in client.served],
        assignment=[m for m in client.assignment if m >= 0], waiting=client.waiting[:0],
    )  # fmt: skip


_MINUTE = {"cpu": 2.5e12, "cuda": 5e15}  # FLOP that leave room for loading; two cores do 1e11 a second
_MOST_CLIENTS = 4


def quick_sample(subject: Subject, batches: int, batch_size: int) -> Sample:
    """Up to four clients, as many as a minute allows; where one is too much, fewer examples of its buckets."""
    parameters = subject.workspace.backbone.parameters
    steps = subject.workspace.config.training.local_steps
    allowed = _MINUTE["cuda" if subject.workspace.backbone.device.type == "cuda" else "cpu"]

    def work(client: Client) -> float:
        """Gradients of each bucket at three states a step, and losses of every expert, each twice as cheap."""
        tokens = sum(len(e.ids) for e in client.data.examples) / len(client.data)
        rows = batches * batch_size * len(client.buckets)
        paths = 3 * steps if len(client.buckets) > 1 else 0
        return 4 * parameters * tokens * rows * (paths + (subject.state.layout.experts + 1) / 2 + 3)

    spent = 0.0
    chosen: list[Client] = []
    for client in subject.clients[:_MOST_CLIENTS]:
        spent += work(client)
        if chosen and spent > allowed:
            break
        chosen.append(client)
    fewer = max(2, int(batch_size * allowed / work(chosen[0])))
    return Sample(chosen, batches, min(batch_size, fewer))


def open_subject(folder: Path, which: str, console: Console, model: str | None = None) -> Subject:
    """Load a run without changing it; ``which`` of its states is under diagnosis: best, last or start. ``model`` is
    where the backbone lies, if elsewhere than trained."""
    run, config = RunFolder.open(folder, elsewhere(model))
    if config.engine == "flower":
        raise UserError(
            f"the clients of {folder} are sites, whose examples the server never saw, and a diagnosis needs them; "
            "simulate such a federation with engine=in-process."
        )
    found = run.snapshots()
    if not found:
        raise UserError(f"{folder} has no checkpoint yet; finish it with `fedweave resume {folder}`.")
    prepared = prepare(config, console)
    method = build_method(config)
    run.check_data(prepared.data.manifest, method.uses_labels)
    workspace = prepared.build(console)
    workspace.disclose(method)
    newest = found[0]
    newest.check(config, workspace.backbone)
    layers, device = workspace.engine.layers, workspace.backbone.device
    states = {s.meta["completed"]: s.state(layers, device) for s in found}
    states.setdefault(newest.meta["best_round"], newest.best(layers, device))
    chosen = {"best": newest.meta["best_round"], "last": newest.meta["completed"], "start": 0}[which]
    if chosen not in states:
        raise UserError(f"{folder} no longer has its checkpoint of round {chosen}.")
    # rows, buckets and experts may be others in other rounds
    own = next((s for s in found if s.meta["completed"] == chosen), newest)
    workspace.engine.restore(own.meta["clients"], own.tensors)
    alike = {t: state for t, state in states.items() if _experts(state) == _experts(states[chosen])}
    return Subject(workspace, method, alike, chosen, newest.meta["completed"])


def _experts(state: ServerState) -> tuple[int, object]:
    """Which experts a state has: how many, and in mid-run since when."""
    return state.layout.experts, state.report.get("born")
