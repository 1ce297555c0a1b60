"""The in-process engine: all clients on one device, trained in lockstep.

An engine knows where clients run and nothing about methods; a method knows what clients compute and nothing
about where. That keeps method × engine a free product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from fedweave.backbone.load import Backbone
from fedweave.config import Config
from fedweave.console import Console
from fedweave.discovery.clusterers import Buckets, discover_all
from fedweave.experts.dropout import stream_key
from fedweave.experts.layout import AdapterLayout
from fedweave.experts.mixture import Mixture
from fedweave.federation.client import Client
from fedweave.router.mlp import RouterLayout
from fedweave.training.batch import Lane
from fedweave.training.lockstep import LaneResult, LockstepTrainer, choose_lanes_per_step


class InProcessEngine:
    """Clients of one process, sharing one frozen backbone."""

    def __init__(self, backbone: Backbone, clients: list[Client], config: Config, console: Console):
        self.backbone, self.clients, self.config, self.console = backbone, clients, config, console
        self.layers = backbone.linear_layers(config.experts.target_modules)
        self._mixture: Mixture | None = None
        self._trainer: LockstepTrainer | None = None

    @property
    def device(self) -> torch.device:
        return self.backbone.device

    def layout(self, rank: int, experts: int) -> AdapterLayout:
        return AdapterLayout.of(self.layers, rank, experts)

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

    def discover(self) -> list[Buckets]:
        """Every client clusters its own features."""
        progress = self.console.progress("clustering", len(self.clients), "clients")
        # scikit-learn takes 32-bit seeds
        seeds = [stream_key("clusters", self.config.seed, client.index) % 2**32 for client in self.clients]
        features = [client.data.features.numpy() for client in self.clients]
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
    ) -> Iterator[LaneResult]:
        """Train lanes and hand their results out one by one, in order."""
        trainer = self._trainer_for(layout, router)
        group = choose_lanes_per_step(self.backbone, lanes, self.config.training.clients_per_step)
        steps = sum(len(lane.schedule) for lane in lanes)
        progress = self.console.progress(label, steps, "steps", transient)
        yield from trainer.train(lanes, group, progress.advance)
        progress.close()

    def _trainer_for(self, layout: AdapterLayout, router: RouterLayout | None) -> LockstepTrainer:
        """The trainer of this layout, kept over rounds together with what it has recorded."""
        mixture = self.mixture(layout)
        if self._trainer is None or self._trainer.mixture is not mixture or self._trainer.router != router:
            config = self.config
            self._trainer = LockstepTrainer(
                self.backbone, mixture, router, config.training, config.experts.dropout, config.router.lr
            )
        return self._trainer
