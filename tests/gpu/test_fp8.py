"""Products in 8 bits on a GPU that has them."""

from __future__ import annotations

import pytest
import torch

from fedweave.backbone.load import load_backbone
from fedweave.config import BackboneConfig
from fedweave.experts.layout import AdapterLayout
from fedweave.kernels import fp8
from fedweave.kernels.fp8 import EightBit, round_rows
from tests.helpers import TARGETS, make_lanes, make_trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with FP8"
    ),
]


@pytest.fixture(scope="module")
def on_gpu(model_folder):
    return load_backbone(BackboneConfig(model=str(model_folder("llama")), device="cuda", max_length=128))


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return made.to("cuda", torch.bfloat16)


@pytest.mark.parametrize("width", [64, 576, 3072, 8192])
def test_triton_rounds_as_torch_does(width, monkeypatch):
    x = numbers(37, 2 * width)[:, :width] * torch.logspace(-6, 4, 37, device="cuda")[:, None].to(torch.bfloat16)
    by_triton = round_rows(x)
    monkeypatch.setattr(fp8, "fused", lambda x: False)
    for found, wanted in zip(by_triton, round_rows(x), strict=True):
        assert torch.allclose(found.float(), wanted.float(), rtol=0.13)  # a step of e4m3, where a division rounds
        assert (found.float() == wanted.float()).float().mean() > 0.99


@pytest.mark.parametrize("tokens", [1, 17, 1000])
def test_tensor_cores_compute_what_the_reference_does(tokens):
    weight, x, dy = numbers(960, 576, seed=1), numbers(tokens, 576, seed=2), numbers(tokens, 960, seed=3)
    kept, reference = EightBit(weight, True), EightBit(weight.cpu(), True)
    for found, wanted in ((kept.times(x), reference.times(x.cpu())), (kept.back(dy), reference.back(dy.cpu()))):
        assert found.dtype == torch.bfloat16
        difference = (found.cpu().float() - wanted.float()).norm() / wanted.float().norm()
        assert difference < 1e-2


@pytest.mark.parametrize("graphs", [True, False])
def test_training_in_8_bits_stays_near(on_gpu, graphs):
    layout = AdapterLayout.of(on_gpu.linear_layers(TARGETS), 8, 1)
    deltas = []
    for way in ("off", "forward", "both"):
        trainer, mixture = make_trainer(on_gpu, layout, None, fp8=way, cuda_graphs=graphs)
        results = list(trainer.train(make_lanes(on_gpu, layout, None, clients=3, steps=5), 3))
        trainer.release()
        mixture.detach()
        deltas.append(torch.stack([result.delta_theta for result in results]))
    for rounded in deltas[1:]:
        assert not torch.equal(rounded, deltas[0])
        assert (torch.cosine_similarity(rounded, deltas[0]) > 0.8).all()
