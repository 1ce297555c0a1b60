"""Federated evaluation: every site measures the broadcast model on validation examples of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedweave.evaluation.losses import example_losses
from fedweave.federation.client import Client
from fedweave.federation.engine import InProcessEngine
from fedweave.methods.base import Method, ServerState
from fedweave.router.mlp import sparsify, vote


@dataclass
class Loss:
    """Sums over examples, so that the mean over sites is the mean over all of their examples."""

    total: float = 0.0
    entropy: float = 0.0  # of the router
    count: int = 0

    def __add__(self, other: Loss) -> Loss:
        return Loss(self.total + other.total, self.entropy + other.entropy, self.count + other.count)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else float("nan")

    @property
    def mean_entropy(self) -> float:
        return self.entropy / self.count if self.count else float("nan")


def local_loss(bench: InProcessEngine, method: Method, client: Client, state: ServerState) -> Loss:
    """The validation loss of a site, with the routing that selects the best round."""
    held = client.held
    if held is None or not len(held):
        return Loss()
    theta, shared = state.theta, method.shared(state.layout)
    if client.own is not None and shared is not None:  # a site answers with what it keeps
        theta = torch.where(shared.to(theta.device), theta, client.own)
    weights = vote(state.router, state.phi, state.shares, held.features)
    gates = sparsify(weights, method.selection)
    losses = example_losses(bench.backbone, held.examples, bench.mixture(state.layout), theta, gates)
    entropy = -(weights.clamp(min=1e-12).log() * weights).sum().item()
    return Loss(losses.sum().item(), entropy, len(held))
