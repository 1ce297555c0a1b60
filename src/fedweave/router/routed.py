"""Experts and their routers: the one form of a model, from the trainer to checkpoints, bundles and servers."""

from dataclasses import dataclass, field, replace

import torch
from typing_extensions import Self

from fedweave.errors import UserError
from fedweave.experts.layout import AdapterLayout
from fedweave.router.mlp import RouterLayout, sparsify

SHARED = "shared"  # as an adapter: what all experts share, alone
BASE = "base"  # as an adapter: nothing, the bare backbone


def foremost(weights: torch.Tensor) -> int:
    """The expert with the largest of a prompt's weights [M]; -1 where none has any."""
    return int(weights.argmax()) if weights.any() else -1


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

    def strangeness(self, features: torch.Tensor) -> list[float | None]:
        """How far prompts [n, d] lie from familiar ones, where 1 is the limit beyond which no expert answers; None
        from a router that takes every prompt for familiar."""
        if self.router is None or self.phi is None or not self.router.axes:
            return [None] * len(features)
        limit = self.router.views(self.phi[0])["familiar.limit"]
        return (self.router.strangeness(self.phi[0], features.to(self.phi)) / limit).tolist()

    def allow(self, doubt: float) -> None:
        """Let experts answer up to so many times the limit that training found."""
        if self.router is None or self.phi is None or not self.router.axes:
            raise UserError(
                "this model takes every prompt for familiar; a run learns a limit unless router.familiar=1."
            )
        if not doubt > 0:
            raise UserError(f"a limit of doubt is a number above 0, not {doubt:g}.")
        self.router.views(self.phi)["familiar.limit"].mul_(min(doubt, 1e9))

    def forgetting(self) -> Self:
        """The same model, to which every prompt is familiar."""
        if self.router is None or self.phi is None:
            return self
        return replace(self, router=self.router.trained, phi=self.router.forgetting(self.phi))

    # ---------------------------------------------------------------------------------- adapters by name

    def adapter(self, expert: int) -> str:
        """The name of what answers where this expert is foremost; without one, what they share or nothing."""
        return f"expert_{expert}" if expert >= 0 else SHARED if self.layout.shared else BASE

    @property
    def adapter_names(self) -> list[str]:
        """Every adapter that a prompt may need: the experts, and where some get none what they share."""
        alone = [SHARED] if self.layout.shared and self.router is not None and self.router.axes else []
        return [self.adapter(m) for m in range(self.layout.experts)] + alone

    @property
    def choices(self) -> list[str]:
        """Every adapter that may be asked for by name."""
        shared = [SHARED] if self.layout.shared else []
        return [*(self.adapter(m) for m in range(self.layout.experts)), *shared, BASE]

    def only(self, adapter: str) -> tuple[int, torch.Tensor]:
        """(expert or -1, gates [M + R/r]) of an adapter that is asked for by name."""
        if adapter not in self.choices:
            raise UserError(f"there is no adapter {adapter!r}; there are {', '.join(self.choices)}.")
        nothing = torch.zeros(self.layout.experts)
        if adapter == BASE:
            return -1, self.layout.all_gates(nothing) * 0
        expert = -1 if adapter == SHARED else self.choices.index(adapter)
        if expert >= 0:
            nothing[expert] = 1.0
        return expert, self.layout.all_gates(nothing)

    def gates(self, weights: torch.Tensor, routing: str) -> torch.Tensor:
        """What a routing makes of soft weights [n, M]."""
        return sparsify(weights, routing, self.router is not None and self.router.sure)
