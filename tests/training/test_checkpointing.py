"""Layers that run again on the way back: the same results to the last bit, for less memory."""

import pytest
import torch

from fedweave.experts.layout import AdapterLayout
from fedweave.router.mlp import RouterLayout
from tests.conftest import FAMILIES
from tests.helpers import TARGETS, make_lanes, make_trainer


@pytest.mark.parametrize(
    ("family", "fused", "targets"),
    [
        ("llama", True, TARGETS),
        ("llama", False, TARGETS),
        ("gemma3", False, ("all-linear",)),
        *((name, True, ("all-linear",)) for name in FAMILIES),
    ],
)
def test_results_are_the_same_to_the_last_bit(backbone_of, family, fused, targets):
    backbone = backbone_of(family, fused)
    layout = AdapterLayout.of(backbone.linear_layers(targets), 4, 3)
    router = RouterLayout(backbone.width, 16, 3)
    lanes = make_lanes(backbone, layout, router, clients=3, steps=3)
    results = []
    for checkpointing in ("off", "on"):
        trainer, mixture = make_trainer(backbone, layout, router, 0.2, targets=targets, checkpointing=checkpointing)
        results.append(list(trainer.train(lanes, 3)))
        mixture.detach()
    for plain, again in zip(*results, strict=True):
        assert torch.equal(plain.delta_theta, again.delta_theta) and torch.equal(plain.delta_phi, again.delta_phi)
        assert plain.losses == again.losses
        assert plain.delta_theta.abs().max() > 1e-3
