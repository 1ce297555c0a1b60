"""Gradients of the training loss itself, without a step: what the diagnostics measure on the real model."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from fedweave.experts.layout import AdapterLayout
from fedweave.federation.compute import Compute
from fedweave.router.mlp import RouterLayout
from fedweave.streams import stream_key
from fedweave.training.batch import ClientData, Lane, build_batch
from fedweave.training.fit import lanes_that_fit
from fedweave.training.lockstep import LockstepTrainer, Trainable
from fedweave.training.schedule import bucket_batches


@dataclass
class Gradients:
    """Mean over a lane's batches."""

    losses: np.ndarray  # [K]
    theta: torch.Tensor  # [K, P]
    phi: torch.Tensor | None  # [K, Q]


class GradientMeter:
    """Losses and gradients of lanes at the parameters that they bring; dropout is off, nothing is clipped."""

    def __init__(self, compute: Compute, layout: AdapterLayout, router: RouterLayout | None):
        router = router.trained if router is not None else None
        self.compute, self.layout, self.router = compute, layout, router
        self.trainer = LockstepTrainer(
            compute.backbone, compute.mixture(layout), router, compute.config.training, dropout=0.0, router_rate=0.0
        )

    def __call__(self, lanes: Sequence[Lane], on_lane: Callable[[int], None] = lambda lanes: None) -> Gradients:
        fit = lanes_that_fit(self.compute.backbone, self.layout, lanes, self.compute.config.training)
        self.trainer.checkpointing = fit.checkpointing
        parts = []
        for start in range(0, len(lanes), fit.lanes):
            group = lanes[start : start + fit.lanes]
            parts.append(self._measure(group))
            on_lane(len(group))
        losses, theta, phi = zip(*parts, strict=True)
        routed = torch.cat(phi) if self.router is not None else None
        return Gradients(np.concatenate(losses), torch.cat(theta), routed)

    def _measure(self, lanes: Sequence[Lane]) -> tuple[np.ndarray, torch.Tensor, torch.Tensor | None]:
        backbone, router, steps = self.compute.backbone, self.router, len(lanes[0].schedule)
        experts = Trainable((len(lanes), self.layout.size), backbone.device, backbone.dtype, self.layout.views)
        experts.load([lane.theta for lane in lanes])
        routers = None
        if router is not None:
            shape = (len(lanes), router.size)
            routers = Trainable(shape, backbone.device, torch.float32, lambda phi: [router.views(phi)])
            routers.load([lane.phi for lane in lanes if lane.phi is not None])
        total = torch.zeros(len(lanes), device=backbone.device)
        for step in range(steps):
            batch = build_batch(lanes, step, 0.0, backbone.device)
            losses = self.trainer.lane_losses(batch, experts, routers, len(lanes))
            with warnings.catch_warnings():  # rows of a matrix are no dense tensors, and need not be
                warnings.filterwarnings("ignore", message="grad and param do not obey the gradient layout")
                (losses.sum() / steps).backward()
            total += losses.detach() / steps
        phi = routers.collect().cpu() if routers is not None else None
        return total.double().cpu().numpy(), experts.collect().cpu(), phi


def sample_lane(
    data: ClientData,
    members: np.ndarray,
    theta: torch.Tensor,
    phi: torch.Tensor | None,
    batches: int,
    batch_size: int,
    *key: int | str,
) -> Lane:
    """``batches`` fixed batches of some members of a client's data, to stand for all of them."""
    drawn = bucket_batches(members, batch_size, stream_key("diagnose", *key))
    return Lane(data, list(islice(drawn, batches)), theta, phi, ("diagnose", *key))


def pooled(parts: Sequence[ClientData]) -> ClientData:
    """Several clients' data as one; the diagnosis sees what no method may."""
    return ClientData("all", [e for p in parts for e in p.examples], torch.cat([p.features for p in parts]))
