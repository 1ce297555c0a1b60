"""Experts and their routers: the one form of a model, from the trainer to checkpoints, bundles and servers."""

from dataclasses import dataclass, field

import torch

from fedweave.experts.layout import AdapterLayout
from fedweave.router.mlp import RouterLayout


@dataclass
class RoutedExperts:
    """M experts θ and the routers φ that choose among them; one adapter has no router."""

    layout: AdapterLayout
    router: RouterLayout | None
    theta: torch.Tensor  # [P] the experts
    phi: torch.Tensor | None  # [R, Q] the routers, one for all or one per cluster
    shares: list[float] = field(default_factory=lambda: [1.0])  # [R] how much each router counts at inference

    def tensors(self) -> dict[str, torch.Tensor]:
        """What must be kept or sent of it."""
        return {"theta": self.theta} | ({"phi": self.phi} if self.phi is not None else {})

    def weights(self, features: torch.Tensor) -> torch.Tensor:
        """Soft weights of prompts, by the vote of all routers: features [n, d] to [n, M] on the CPU."""
        if self.router is None or self.phi is None:
            return torch.ones(len(features), 1)
        with torch.no_grad():
            inputs = features.to(self.phi)
            votes = [
                share * self.router.route(phi, inputs) for phi, share in zip(self.phi, self.shares, strict=True)
            ]
            return torch.stack(votes).sum(0).cpu()
