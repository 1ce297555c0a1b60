"""A tiny model with three experts that differ, and a router that sends prompts to different ones."""

from __future__ import annotations

import pytest

from fedweave.experts.layout import AdapterLayout
from fedweave.experts.mixture import Mixture
from fedweave.inference.model import FedWeaveModel
from fedweave.router.mlp import RouterLayout
from fedweave.router.routed import RoutedExperts
from tests.helpers import TARGETS, random_theta


@pytest.fixture
def make_model(backbone_of):
    """Call with a family's name; the experts come off the shared backbone afterwards."""
    mixtures = []

    def make(family: str = "llama") -> FedWeaveModel:
        backbone = backbone_of(family)
        layers = backbone.linear_layers(("qkv_proj",) if family == "phi3" else TARGETS)
        layout = AdapterLayout.of(layers, 4, 3)
        mixtures.append(Mixture(layers, layout, 16))
        router = RouterLayout(backbone.width, 8, 3, "unit")
        phi = 3 * router.initial(1)[None]
        experts = RoutedExperts(layout, router, random_theta(layout, 5, 0.4), phi)
        return FedWeaveModel(backbone, mixtures[-1], experts)

    yield make
    for mixture in mixtures:
        mixture.detach()


@pytest.fixture
def model(make_model) -> FedWeaveModel:
    return make_model()
