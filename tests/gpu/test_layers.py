"""Experts on every linear layer and layers that run twice, where only a CUDA device shows it: Triton kernels in the
fused decoder, recorded steps, memory."""

import pytest
import torch

from benchmarks.memory import Case, measure
from fedweave.backbone import packing
from fedweave.backbone.load import Backbone, load_backbone
from fedweave.config import BackboneConfig
from fedweave.experts.layout import AdapterLayout
from fedweave.kernels import experts as expert_kernels
from fedweave.kernels import fp8 as fp8_kernels
from fedweave.router.mlp import RouterLayout
from fedweave.training.lockstep import LaneResult
from tests.conftest import FAMILIES
from tests.helpers import make_lanes, make_trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ALL = ("all-linear",)


@pytest.fixture(scope="module")
def on_gpu(model_folder):
    def load(family: str, **settings: object) -> Backbone:
        options = {"device": "cuda", "max_length": 128, **settings}
        return load_backbone(BackboneConfig(model=str(model_folder(family)), **options))

    return load


def results(backbone: Backbone, dropout: float = 0.1, clients: int = 3, **training: object) -> list[LaneResult]:
    layout = AdapterLayout.of(backbone.linear_layers(ALL), 8, 3)
    router = RouterLayout(backbone.width, 16, 3)
    lanes = make_lanes(backbone, layout, router, clients=clients, steps=4)
    trainer, mixture = make_trainer(backbone, layout, router, dropout, targets=ALL, **training)
    found = list(trainer.train(lanes, clients))
    recorded = [group.graphs is not None for group in trainer._groups.values()]
    assert recorded == [bool(training.get("cuda_graphs", True))]
    trainer.release()
    mixture.detach()
    return found


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_that_run_twice_change_no_bit(on_gpu, family, graphs):
    backbone = on_gpu(family)
    kept, again = (
        results(backbone, cuda_graphs=graphs, checkpointing=checkpointing) for checkpointing in ("off", "on")
    )
    for one, two in zip(kept, again, strict=True):
        assert torch.equal(one.delta_theta, two.delta_theta) and torch.equal(one.delta_phi, two.delta_phi)
        assert one.losses == two.losses and one.delta_theta.abs().max() > 1e-3


@pytest.mark.parametrize("fp8", ["off", "forward", "both"])
def test_kernels_that_have_become_one_learn_what_they_did_apart(wide_folder, fp8, monkeypatch, smooth_optimiser):
    """Rounding within other kernels changes no bit; the others round to bfloat16 less often. Heads are wide enough
    for rotary positions within attention."""
    backbone = load_backbone(BackboneConfig(model=str(wide_folder), device="cuda", max_length=128))
    joint = results(backbone, fp8=fp8)
    monkeypatch.setattr(fp8_kernels, "WITHIN", False)
    for one, two in zip(joint, results(backbone, fp8=fp8), strict=True):
        assert torch.equal(one.delta_theta, two.delta_theta) and one.losses == two.losses
    monkeypatch.setattr(expert_kernels, "TOGETHER", 1)
    monkeypatch.setattr(packing, "JOINT", False)
    for one, two in zip(joint, results(backbone, fp8=fp8), strict=True):
        assert (one.delta_theta - two.delta_theta).norm() < 0.1 * two.delta_theta.norm()
        assert one.losses == pytest.approx(two.losses, rel=2e-2)


@pytest.mark.parametrize("checkpointing", ["off", "on"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_layers_learn_what_transformers_own_do(on_gpu, family, checkpointing, smooth_optimiser):
    """In float32, recorded: every kernel of the fused decoder beside the library's operations."""
    ways = [on_gpu(family, dtype="float32", fused=fused) for fused in (True, False)]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        mine, theirs = (results(way, checkpointing=checkpointing) for way in ways)
    finally:
        torch.set_float32_matmul_precision(before)
    for one, two in zip(mine, theirs, strict=True):
        assert (one.delta_theta - two.delta_theta).abs().max() <= 2e-5
        assert (one.delta_phi - two.delta_phi).abs().max() <= 2e-5
        assert one.losses == pytest.approx(two.losses, abs=2e-5)


@pytest.mark.parametrize(
    "case",
    [
        Case("135m"),
        Case("135m", checkpointing="on"),
        Case("135m", every=True),
        Case("135m", every=True, checkpointing="on"),
        Case("135m", clients=5, experts=8, rank=16),
        Case("135m", clients=10, fused=False),
    ],
    ids=str,
)
def test_memory_is_within_a_tenth_of_its_prediction(case):
    assert abs(measure(case, torch.device("cuda"))["error"]) <= 0.1
