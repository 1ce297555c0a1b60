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
from fedweave.discovery.clusterers import Buckets, discover_buckets
from fedweave.experts.dropout import stream_key
from fedweave.experts.layout import AdapterLayout
from fedweave.experts.mixture import Mixture
from fedweave.federation.client import Client
from fedweave.router.mlp import RouterLayout
from fedweave.training.lockstep import Lane, LaneResult, LockstepTrainer, choose_lanes_per_step


class InProcessEngine:
    """Clients of one process, sharing one frozen backbone."""

    def __init__(self, backbone: Backbone, clients: list[Client], config: Config, console: Console):
        self.backbone, self.clients, self.config, self.console = backbone, clients, config, console
        self.layers = backbone.linear_layers(config.experts.target_modules)
        self._mixture: Mixture | None = None

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
        if self._mixture is not None:
            self._mixture.detach()
            self._mixture = None

    def discover(self) -> list[Buckets]:
        """Every client clusters its own features."""
        progress = self.console.progress("clustering", len(self.clients), "clients")
        found = []
        for client in self.clients:
            # scikit-learn takes 32-bit seeds
            seed = stream_key("clusters", self.config.seed, client.index) % 2**32
            found.append(discover_buckets(client.data.features.numpy(), self.config.discovery, seed))
            progress.advance()
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
        trainer = LockstepTrainer(
            self.backbone, self.mixture(layout), router, self.config.training, self.config.experts.dropout
        )
        group = choose_lanes_per_step(self.backbone, lanes, self.config.training.clients_per_step)
        steps = sum(len(lane.schedule) for lane in lanes)
        progress = self.console.progress(label, steps, "steps", transient)
        yield from trainer.train(lanes, group, progress.advance)
        progress.close()
