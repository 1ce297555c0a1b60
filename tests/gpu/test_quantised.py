"""Backbones that stay quantised on a CUDA device: Triton unpacks them, recorded steps find the scratch memory."""

from __future__ import annotations

import pytest
import torch

from fedweave.backbone.load import Backbone
from fedweave.backbone.packing import pack
from fedweave.backbone.quantised import bytes_of, packed_weights
from fedweave.experts.layout import AdapterLayout
from fedweave.inference.generate import generate
from fedweave.kernels import dequantise
from fedweave.router.mlp import RouterLayout
from tests.backbone.test_quantised import gguf_of, k_file, load, model_of, unpacked  # noqa: F401  (fixtures)
from tests.helpers import PROMPTS, TARGETS, client_data, make_lanes, make_trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(params=["llama-Q4_0", "qwen2-Q4_1", "gemma2-Q5_0", "k", "nf4", "nf4-double"])
def kept(request) -> Backbone:
    return load(*model_of(request, request.param), device="cuda")


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_unpacks_every_weight_of_a_model_as_torch_does(kept, dtype, monkeypatch):
    weights = packed_weights(kept.model)
    by_triton = {name: packed.dense(dtype) for name, packed in weights.items()}
    monkeypatch.setattr(dequantise, "fused", lambda x: False)
    assert weights
    for name, packed in weights.items():
        assert torch.equal(by_triton[name], packed.dense(dtype)), name


def test_hidden_states_and_answers_are_those_of_the_weights_unpacked_once(kept):
    packed = pack([[e.ids for e in client_data(kept, 6, seed=0).examples]], kept.device)
    prompts = kept.prompts.encode_prompts(PROMPTS)
    with torch.no_grad():
        found, said = kept.hidden(packed), generate(kept, prompts, 12)  # its steps are recorded
        plain = unpacked(kept)
        assert relative(found, plain.hidden(packed)) < 1e-2  # bfloat16
    assert len(said) == len(PROMPTS)


@pytest.mark.parametrize("graphs", [True, False])
def test_training_is_that_of_the_weights_unpacked_once(kept, graphs, smooth_optimiser):
    layout = AdapterLayout.of(kept.linear_layers(TARGETS), 8, 3)
    router = RouterLayout(kept.width, 16, 3)
    lanes = make_lanes(kept, layout, router, clients=3, steps=5)
    results = []
    for backbone in (kept, None):
        trainer, mixture = make_trainer(backbone or unpacked(kept), layout, router, cuda_graphs=graphs)
        list(trainer.train(lanes[::-1], 3))  # a first use must leave nothing behind
        results.append(list(trainer.train(lanes, 3)))
        mixture.detach()
    for mine, theirs in zip(*results, strict=True):
        assert mine.losses == pytest.approx(theirs.losses, rel=4e-3)
        assert relative(mine.delta_theta, theirs.delta_theta) < 2e-2
        assert relative(mine.delta_phi, theirs.delta_phi) < 2e-2


def test_no_more_than_the_quantised_weights_stay_on_the_device(k_file):  # noqa: F811
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    kept = load(k_file, device="cuda")
    torch.cuda.synchronize()
    grown = torch.cuda.memory_allocated() - before
    scratch = kept.decoder.layers[0].qkv.weight.scratch.take(1, 1).untyped_storage().nbytes()
    limit = bytes_of(kept.model) + scratch + (1 << 19)  # tables and rounding up
    assert grown < limit < 2 * kept.parameters
