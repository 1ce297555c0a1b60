"""Engines: where clients run. The in-process one has all clients on one device and trains them in lockstep.

An engine knows where clients run and nothing about methods; a method knows what clients compute and nothing
about where. That keeps method × engine a free product.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fedweave.backbone.load import Backbone
from fedweave.config import Config, TrainingConfig
from fedweave.console import Console
from fedweave.discovery.clusterers import Buckets, discover_all
from fedweave.experts.layout import AdapterLayout
from fedweave.experts.mixture import Mixture
from fedweave.federation.client import Client, Prototypes
from fedweave.federation.parcel import Courier, Parcel
from fedweave.federation.spool import Spool
from fedweave.router.mlp import RouterLayout
from fedweave.streams import stream_key
from fedweave.training.batch import Lane
from fedweave.training.lockstep import LaneResult, LockstepTrainer
from fedweave.training.memory import lanes_that_fit

if TYPE_CHECKING:
    from fedweave.methods.base import Method, ServerState


_CLIENTS_AT_ONCE = 128
_RESIDUAL = "residual."


def _groups(clients: Sequence[Client]) -> Iterator[Sequence[Client]]:
    """Some clients at a time, so that memory does not grow with their number."""
    for start in range(0, len(clients), _CLIENTS_AT_ONCE):
        yield clients[start : start + _CLIENTS_AT_ONCE]


def _residuals(client: Client) -> str:
    return f"{_RESIDUAL}{client.index}."


class Engine(ABC):
    """The server's view of its clients: who they are, and the questions that it asks them."""

    clients: Sequence[Any]  # each a Member
    config: Config
    console: Console
    layers: dict[str, Any]  # the backbone's adapted layers, or just their shapes
    device: torch.device  # where the server computes
    identity: dict[str, str]  # Backbone.identity of the federation
    width: int  # d of the router's features
    grows = False  # whether clients may come after alignment

    def layout(self, rank: int, experts: int) -> AdapterLayout:
        return AdapterLayout.of(self.layers, rank, experts)

    @abstractmethod
    def prototypes(self, method: Method) -> list[Prototypes]:
        """Lines 1 to 4: what every client tells of its buckets, in the order of ``clients``."""

    @abstractmethod
    def starts(self, method: Method) -> Iterator[tuple[int, torch.Tensor, float]]:
        """Line 6: (expert, mean of warmup adapters [P of one expert], how many buckets) from all clients."""

    @abstractmethod
    def router_updates(
        self, method: Method, router: RouterLayout, phi: torch.Tensor, t: int, pupils: Sequence[Any], contrast: str
    ) -> Iterator[tuple[torch.Tensor, int]]:
        """(Δφ, |D_i|) of some clients after one round of the router's warm start."""

    @abstractmethod
    def answers(
        self, method: Method, state: ServerState, participants: Sequence[Any], t: int, courier: Courier
    ) -> Iterator[Parcel]:
        """Lines 9 to 13: what the participants send back in round t, one by one."""

    @abstractmethod
    def restore(self, records: Sequence[dict[str, Any]], tensors: Mapping[str, torch.Tensor]) -> None:
        """The clients as a checkpoint recorded them; their :meth:`memories` are among its tensors."""

    def broadcast_bytes(self, state: ServerState, courier: Courier) -> int:
        """What each participant of a round receives."""
        return courier.broadcast_bytes

    def memories(self) -> dict[str, torch.Tensor]:
        """What clients must not forget when the server resumes, where the server plays the clients."""
        return {}

    def present(self, method: Method, state: ServerState) -> Sequence[Any]:
        """The clients that can be asked now; whoever is new has been given experts."""
        return self.clients

    def private(self, theta: torch.Tensor) -> torch.Tensor | None:
        """Rows for what clients keep to themselves, where the server plays the clients; None where they do."""
        return None


class InProcessEngine(Engine):
    """Clients of one process, sharing one frozen backbone. A site of a real federation is one with one client."""

    def __init__(self, backbone: Backbone, clients: list[Client], config: Config, console: Console):
        self.backbone, self.clients, self.config, self.console = backbone, clients, config, console
        self.layers = backbone.linear_layers(config.experts.target_modules)
        self.spool: Spool | None = None  # warmup adapters of all buckets, until the server asks for them
        self._mixture: Mixture | None = None
        self._trainer: LockstepTrainer | None = None

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.backbone.device

    @property
    def identity(self) -> dict[str, str]:  # type: ignore[override]
        return self.backbone.identity

    @property
    def width(self) -> int:  # type: ignore[override]
        return self.clients[0].data.features.shape[1]

    def prototypes(self, method: Method) -> list[Prototypes]:
        return list(method.discover(self, self.clients))

    def starts(self, method: Method) -> Iterator[tuple[int, torch.Tensor, float]]:
        assert self.spool is not None
        labels = [m for client in self.clients for m in client.assignment]
        for m, adapter in zip(labels, self.spool, strict=True):
            yield m, adapter, 1.0

    def router_updates(
        self, method: Method, router: RouterLayout, phi: torch.Tensor, t: int, pupils: Sequence[Any], contrast: str
    ) -> Iterator[tuple[torch.Tensor, int]]:
        for group in _groups(pupils):
            yield from method.warm_router(self, group, router, phi, t, contrast)

    def answers(
        self, method: Method, state: ServerState, participants: Sequence[Client], t: int, courier: Courier
    ) -> Iterator[Parcel]:
        for group in _groups(participants):
            for client, update in zip(group, method.local_updates(self, state, group, t), strict=True):
                yield courier.seal(update, t, self.identity, client.residuals)

    def restore(self, records: Sequence[dict[str, Any]], tensors: Mapping[str, torch.Tensor]) -> None:
        owed = {name: tensor for name, tensor in tensors.items() if name.startswith(_RESIDUAL)}
        for client, record in zip(self.clients, records, strict=True):
            client.restore(record)
            prefix = _residuals(client)
            client.residuals.restore({n.removeprefix(prefix): t for n, t in owed.items() if n.startswith(prefix)})

    def memories(self) -> dict[str, torch.Tensor]:
        return {
            f"{_residuals(client)}{part}": owed
            for client in self.clients
            for part, owed in client.residuals.after.items()
        }

    def private(self, theta: torch.Tensor) -> torch.Tensor:
        return theta.repeat(len(self.clients), 1)

    def mixture(self, layout: AdapterLayout) -> Mixture:
        """Experts of this layout on the backbone, in place of any other."""
        if self._mixture is None or self._mixture.layout != layout:
            self.detach()
            self._mixture = Mixture(self.layers, layout, self.config.experts.alpha)
        return self._mixture

    def detach(self) -> None:
        if self._trainer is not None:
            self._trainer.release()
        if self._mixture is not None:
            self._mixture.detach()
            self._mixture = self._trainer = None

    def cluster(self, clients: Sequence[Client]) -> list[Buckets]:
        """Every client clusters its own features."""
        progress = self.console.progress("clustering", len(clients), "clients")
        # scikit-learn takes 32-bit seeds
        seeds = [stream_key("clusters", self.config.seed, client.index) % 2**32 for client in clients]
        features = [client.data.features.numpy() for client in clients]
        found = discover_all(features, self.config.discovery, seeds, progress.advance, self.device)
        progress.close()
        return found

    def train(
        self,
        layout: AdapterLayout,
        router: RouterLayout | None,
        lanes: Sequence[Lane],
        label: str,
        transient: bool = False,
        training: TrainingConfig | None = None,
    ) -> Iterator[LaneResult]:
        """Train lanes and hand their results out one by one, in order; with ``training`` in place of the run's."""
        trainer = self._trainer_for(layout, router, training or self.config.training)
        fit = trainer.fits.get(len(lanes))
        if fit is None:  # once: what the trainer keeps for the next round is not free then
            fit = trainer.fits[len(lanes)] = lanes_that_fit(
                self.backbone, lanes, self.config.training.clients_per_step
            )
            if len(lanes) > 1 and self.config.training.clients_per_step == "auto":
                self.console.say(f"{label}: {min(fit.lanes, len(lanes))} of {len(lanes)} at a time ({fit.why})")
        steps = sum(len(lane.schedule) for lane in lanes)
        progress = self.console.progress(label, steps, "steps", transient)
        for done, result in enumerate(trainer.train(lanes, fit.lanes, progress.advance), 1):
            if done == len(lanes):  # before the last: whoever takes as many as there are never comes back
                progress.close()
            yield result

    def _trainer_for(
        self, layout: AdapterLayout, router: RouterLayout | None, training: TrainingConfig
    ) -> LockstepTrainer:
        """The trainer of this layout, kept over rounds together with what it has recorded."""
        mixture, last, config = self.mixture(layout), self._trainer, self.config
        if last is None or last.mixture is not mixture or last.router != router or last.config != training:
            if last is not None:
                last.release()
            last = LockstepTrainer(
                self.backbone, mixture, router, training, config.experts.dropout, config.router.lr
            )
            last.warn = self.console.warn
            self._trainer = last
        return last
