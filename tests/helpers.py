"""Small clients and lanes for numerical tests."""

from __future__ import annotations

import numpy as np
import torch

from fedweave.backbone.features import compute_features
from fedweave.backbone.load import Backbone
from fedweave.config import TrainingConfig
from fedweave.data.sample import make_sample
from fedweave.experts.layout import AdapterLayout
from fedweave.experts.mixture import Mixture
from fedweave.router.mlp import RouterLayout
from fedweave.training.batch import ClientData, Lane
from fedweave.training.lockstep import LockstepTrainer
from fedweave.training.schedule import local_schedule

TARGETS = ("q_proj", "v_proj")


def client_data(backbone: Backbone, count: int, seed: int, name: str = "client") -> ClientData:
    """``count`` examples that mix the four sample patterns."""
    pools, _ = make_sample(count, seed)
    rng = np.random.default_rng(seed)
    everything = [e for pool in pools.values() for e in pool]
    chosen = [everything[i] for i in rng.permutation(len(everything))[:count]]
    encoded = backbone.prompts.encode(chosen)
    return ClientData(name, encoded, compute_features(backbone, [e.prompt for e in encoded]))


def random_theta(layout: AdapterLayout, seed: int, scale: float = 0.05) -> torch.Tensor:
    """Experts that differ and whose B is not zero, so that every gradient is alive."""
    noise = torch.randn(layout.size, generator=torch.Generator().manual_seed(seed)) * scale
    return layout.initial(0) + noise


def assert_trained_alike(mine: torch.Tensor, theirs: torch.Tensor, limit: float = 2e-5) -> None:
    """What two processes trained, whose optimiser no fixture reaches: where a gradient is rounding alone, so is the
    direction of AdamW's step, and one weight in a thousand may have gone another way."""
    difference = (mine.float() - theirs.float()).abs()
    assert (difference > limit).float().mean() <= 1e-3 and difference.max() <= 1e-2


def make_lanes(
    backbone: Backbone, layout: AdapterLayout, router: RouterLayout | None, clients: int, steps: int = 4
) -> list[Lane]:
    lanes = []
    for i in range(clients):
        data = client_data(backbone, 12 + 3 * i, seed=i)
        # buckets of unequal size, one smaller than a batch
        buckets = [np.arange(2), np.arange(2, len(data))]
        schedule = local_schedule(buckets, steps, 4, 0, 0, i)
        phi = router.initial(7) if router else None
        lanes.append(Lane(data, schedule, random_theta(layout, 3), phi, (0, 0, i)))
    return lanes


def make_trainer(
    backbone: Backbone,
    layout: AdapterLayout,
    router: RouterLayout | None,
    dropout: float = 0.0,
    router_rate: float = 1e-2,
    **training: float,
) -> tuple[LockstepTrainer, Mixture]:
    mixture = Mixture(backbone.linear_layers(TARGETS), layout, alpha=16.0)
    config = TrainingConfig(**{"lr": 1e-2, "clip": 1.0, **training})  # type: ignore[arg-type]
    return LockstepTrainer(backbone, mixture, router, config, dropout, router_rate), mixture
