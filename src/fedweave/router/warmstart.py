"""Router warm start: before round 0 the router learns the labels a(i,c) that alignment gives for free.

Each client trains on its own (feature, expert) pairs, the server averages, a few times over. No backbone
pass, no task label, and nothing leaves a client that a training round would not send anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
import torch.nn.functional as F

from fedweave.aggregation.rules import ClientAverage
from fedweave.config import WarmStartConfig
from fedweave.experts.dropout import stream_key
from fedweave.router.mlp import RouterLayout


def warm_start_client(
    layout: RouterLayout,
    phi: torch.Tensor,  # [Q] broadcast state
    features: torch.Tensor,  # [n, d]
    experts: torch.Tensor,  # [n] a(i,c) of every example's bucket
    config: WarmStartConfig,
    *key: int | str,
) -> torch.Tensor:
    """Δφ of one client after ``config.steps`` steps of cross-entropy on its own alignment labels."""
    rng = np.random.default_rng(stream_key("warm-start", *key))
    local = phi[None].clone().requires_grad_()  # [1, Q]
    optimiser = torch.optim.AdamW([local], lr=config.lr, weight_decay=0.0)
    for _ in range(config.steps):
        batch = torch.from_numpy(rng.permutation(len(features))[: config.batch_size]).to(features.device)
        logits = layout.logits(layout.views(local), features[batch][None])[0]
        optimiser.zero_grad()
        F.cross_entropy(logits, experts[batch]).backward()
        optimiser.step()
    return (local.detach() - phi)[0]


def warm_start(
    layout: RouterLayout,
    phi: torch.Tensor,
    rounds: int,
    updates: Callable[[torch.Tensor, int], Iterable[tuple[torch.Tensor, int]]],  # (φ, t) to all (Δφ, |D_i|)
) -> torch.Tensor:
    """The federated warm start: local steps and a sample-weighted average, ``rounds`` times."""
    for t in range(rounds):
        average = ClientAverage(layout.size, phi.device)
        for delta, samples in updates(phi, t):
            average.add(delta, samples)
        phi = phi + average.step()
    return phi
