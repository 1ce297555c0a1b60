"""What travels in a round: the numbers that clients send and receive, as the method means them to be sent."""

from __future__ import annotations

import torch

from fedweave.federation.client import Update
from fedweave.methods.base import ServerState

BYTES = 4  # of a number: states and updates are float32


class Traffic:
    """Counts one round over all participants."""

    def __init__(self, state: ServerState, travelling: torch.Tensor | None):
        """``travelling`` [P] marks the columns of θ that leave a client at all; None: every one."""
        owner = state.layout.expert_of_column
        owner = owner if travelling is None else owner[travelling]
        self.per_expert = torch.bincount(owner, minlength=state.layout.experts)  # [M] numbers of each
        self.router = state.router.size if state.router else 0
        self.up = self.down = 0  # bytes

    def add(self, update: Update) -> None:
        """A client receives all experts and a router; it sends the experts that it serves and, if trained, φ."""
        served = update.counts.cpu() > 0
        router = self.router if update.delta_phi is not None and bool(update.delta_phi.any()) else 0
        self.up += BYTES * (int(self.per_expert[served].sum()) + router)
        self.down += BYTES * (int(self.per_expert.sum()) + router)
