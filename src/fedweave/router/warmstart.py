"""Router warm start: before round 0 the router learns the labels a(i,c) that alignment gives for free.

Each client trains on its own (feature, expert) pairs, the server averages, a few times over. No backbone
pass, no task label, and nothing leaves a client that a training round would not send anyway.

A client that has examples of two experts out of four knows how to tell these two apart and nothing about the
others. So its softmax runs over those two alone (as in FedRS, Li and Zhan, 2021): over all four it would learn that
the others are never right, and every client that lacks an expert would unlearn what its owners teach. A client of
one expert has nothing to tell apart and is not asked. That needs clients whose experts overlap: where some experts
are linked by no chain of clients, everybody learns over all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from fedweave.config import WarmStartConfig
from fedweave.router.mlp import RouterLayout
from fedweave.streams import stream_key


@dataclass
class LabelledFeatures:
    """What one client's router learns from."""

    features: torch.Tensor  # [n, d]
    experts: torch.Tensor  # [n] a(i,c) of every example's bucket
    key: tuple[int | str, ...]  # names this client and round


def contrast_of(assignments: Sequence[Sequence[int]], experts: int, asked: str = "auto") -> str:
    """Over which experts clients learn: own where clients with several link every expert to every other, or all."""
    if asked != "auto":
        return asked
    linked = [{m} for m in range(experts)]
    for own in map(set, assignments):
        if touched := [group for group in linked if group & own]:
            linked = [group for group in linked if not group & own] + [set().union(*touched)]
    return "own" if len(linked) == 1 else "all"


def warm_start_clients(
    layout: RouterLayout,
    phi: torch.Tensor,  # [Q] broadcast state
    clients: Sequence[LabelledFeatures],
    config: WarmStartConfig,
    contrast: str,  # own or all
) -> torch.Tensor:
    """Δφ [K, Q] of K clients, each after ``config.steps`` steps of cross-entropy on its own alignment labels. They
    march together: everything is a row of its own, so none sees the others."""
    device, count = phi.device, len(clients)
    features = torch.cat([p.features for p in clients]).to(device)
    experts = torch.cat([p.experts for p in clients]).to(device)
    index, weight = _batches([len(p.features) for p in clients], [p.key for p in clients], config)
    absent = None
    if contrast == "own":
        own = [torch.bincount(p.experts, minlength=layout.experts) for p in clients]
        absent = (torch.stack(own) == 0)[:, None].to(device)  # [K, 1, M]
    local = phi.repeat(count, 1).requires_grad_()  # [K, Q]
    optimiser = torch.optim.AdamW([local], lr=config.lr, weight_decay=0.0)
    for rows, share in zip(index.to(device), weight.to(device), strict=True):  # [K, b]
        logits = layout.logits(layout.views(local), features[rows])  # [K, b, M]
        if absent is not None:
            logits = logits.masked_fill(absent, float("-inf"))
        losses = F.cross_entropy(logits.flatten(0, 1), experts[rows].flatten(), reduction="none").view_as(share)
        optimiser.zero_grad()
        (losses * share).sum().backward()
        optimiser.step()
    return local.detach() - phi


def _batches(
    sizes: Sequence[int], keys: Sequence[tuple[int | str, ...]], config: WarmStartConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of all steps [steps, K, b] in the joined features, and their weights: a small client's batch is filled
    up with its first row, of weight 0."""
    widest = min(config.batch_size, max(sizes))
    index = np.zeros((config.steps, len(sizes), widest), dtype=np.int64)
    weight = np.zeros(index.shape, dtype=np.float32)
    first = 0
    for k, (size, key) in enumerate(zip(sizes, keys, strict=True)):
        rng, batch = np.random.default_rng(stream_key("warm-start", *key)), min(size, widest)
        index[:, k] = first
        for step in range(config.steps):
            index[step, k, :batch] = first + rng.permutation(size)[:batch]
        weight[:, k, :batch] = 1 / batch
        first += size
    return torch.from_numpy(index), torch.from_numpy(weight)
