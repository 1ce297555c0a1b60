"""The fused decoder and transformers' own layers learn the same, with experts on every linear layer."""

import json
import shutil

import numpy as np
import pytest
import torch

from fedweave.backbone.decoder import FAMILIES as FUSED
from fedweave.backbone.load import load_backbone
from fedweave.backbone.packing import pack
from fedweave.config import BackboneConfig
from fedweave.experts.layout import AdapterLayout
from fedweave.experts.mixture import Mixture
from fedweave.router.mlp import RouterLayout
from fedweave.training.batch import build_batch
from tests.conftest import FAMILIES
from tests.helpers import make_lanes, make_trainer, random_theta

ALL = ("all-linear",)


def train(backbone, targets, lanes, layout, router):
    trainer, mixture = make_trainer(backbone, layout, router, 0.1, targets=targets)
    results = list(trainer.train(lanes, len(lanes)))
    mixture.detach()
    return results


@pytest.mark.parametrize("family", FAMILIES)
def test_both_ways_learn_the_same_on_every_layer(backbone_of, family, smooth_optimiser):
    fused, plain = backbone_of(family), backbone_of(family, fused=False)
    assert fused.decoder is not None and plain.decoder is None and fused.model.config.model_type in FUSED
    layout = AdapterLayout.of(fused.linear_layers(ALL), 4, 3)
    assert len(layout.names) == 2 * (4 if family == "phi3" else 7)
    router = RouterLayout(fused.width, 16, 3)
    lanes = make_lanes(fused, layout, router, clients=3, steps=3)
    for mine, theirs in zip(*(train(b, ALL, lanes, layout, router) for b in (fused, plain)), strict=True):
        assert (mine.delta_theta - theirs.delta_theta).abs().max() <= 2e-5
        assert (mine.delta_phi - theirs.delta_phi).abs().max() <= 2e-5
        assert mine.losses == pytest.approx(theirs.losses, abs=1e-5)
        moved = [part.abs().max() for part in layout.b_blocks(mine.delta_theta)]
        assert min(moved) > 1e-3, "a layer that learned nothing tests nothing"


@pytest.mark.parametrize("targets", [("down_proj",), ("o_proj", "up_proj"), ("mlp.gate_proj", "k_proj")])
def test_any_list_of_layers(backbone_of, targets, smooth_optimiser):
    fused, plain = backbone_of("llama"), backbone_of("llama", fused=False)
    layout = AdapterLayout.of(fused.linear_layers(targets), 4, 2)
    router = RouterLayout(fused.width, 16, 2)
    lanes = make_lanes(fused, layout, router, clients=2, steps=2)
    for mine, theirs in zip(*(train(b, targets, lanes, layout, router) for b in (fused, plain)), strict=True):
        torch.testing.assert_close(mine.delta_theta, theirs.delta_theta, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("family", "kinds"), [("llama", 1), ("gemma3", 2), ("smollm3", 2)])
def test_layers_of_one_kind_share_their_angles(backbone_of, family, kinds):
    backbone, calls = backbone_of(family), []
    packed = pack([[np.arange(5), np.arange(3)]], backbone.device)
    rotary = backbone.model.base_model.rotary_emb
    hook = rotary.register_forward_hook(lambda *_: calls.append(1))
    try:
        backbone.hidden(packed)
    finally:
        hook.remove()
    layers = backbone.decoder.layers
    assert len(calls) == len({layer.turn for layer in layers}) <= kinds and len(layers) == 2


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_behind_the_last_attention_there_are_only_rows_that_somebody_reads(backbone_of, family, monkeypatch):
    backbone = backbone_of(family)
    layout = AdapterLayout.of(backbone.linear_layers(ALL), 4, 2)
    lanes = make_lanes(backbone, layout, None, clients=3, steps=1)
    batch = build_batch(lanes, 0, 0.2, backbone.device)
    mixture = Mixture(backbone.linear_layers(ALL), layout, 8)
    weights = layout.views(torch.stack([random_theta(layout, seed) for seed in range(3)]))
    gates = torch.rand(1, batch.packed.tokens, 2).requires_grad_()
    seen: list[int] = []

    def counted(product, x, *rest):
        if product is backbone.decoder.layers[-1].down:
            seen.append(len(x))
        return called(product, x, *rest)

    called = type(backbone.decoder.layers[0].down).__call__
    monkeypatch.setattr(type(backbone.decoder.layers[0].down), "__call__", counted)
    found = []
    for read in (batch.read, None):
        with mixture.active(weights, gates, batch.packed.lanes, batch.dropout):
            hidden = backbone.hidden(batch.packed, read=read)
        hidden = hidden if read else batch.read.of(hidden)
        found.append((hidden, *torch.autograd.grad(hidden.square().sum(), gates)))
    mixture.detach()
    assert seen == [len(batch.read.index), batch.packed.tokens] and seen[0] < seen[1]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_a_window_that_a_family_does_not_know_is_none(model_folder, tmp_path):
    """A Llama's config may speak of one, as some that were a Mistral's do; transformers' Llama attends to all."""
    folder = shutil.copytree(model_folder("llama"), tmp_path / "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"sliding_window": 20}))
    packed, found = pack([[np.arange(4, 64)]], torch.device("cpu")), []
    for fused in (True, False):
        backbone = load_backbone(BackboneConfig(model=str(folder), device="cpu", fused=fused))
        found.append(backbone.hidden(packed).detach())
    torch.testing.assert_close(*found)
