"""Experts and their routers: the one form of a model, from the trainer to checkpoints, bundles and servers."""

from dataclasses import dataclass, field

import torch

from fedweave.experts.layout import AdapterLayout
from fedweave.router.mlp import RouterLayout, sparsify

SHARED = "shared"  # as an adapter: what all experts share, alone


def foremost(weights: torch.Tensor) -> int:
    """The expert with the largest of a prompt's weights [M]; -1 where none has any."""
    return int(weights.argmax()) if weights.any() else -1


def adapter_name(expert: int) -> str:
    """What a prompt's foremost expert is called among adapters."""
    return f"expert_{expert}" if expert >= 0 else SHARED


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

    @property
    def adapter_names(self) -> list[str]:
        """Every adapter that a prompt may need: the experts, and where some get none what they share."""
        alone = [SHARED] if self.router is not None and self.router.axes else []
        return [adapter_name(m) for m in range(self.layout.experts)] + alone

    def gates(self, weights: torch.Tensor, routing: str) -> torch.Tensor:
        """What a routing makes of soft weights [n, M]."""
        return sparsify(weights, routing, self.router is not None and self.router.sure)
