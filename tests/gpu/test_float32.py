"""In float32 a GPU, recorded or eager, computes what a CPU does: a few steps of every family, and whole small runs.

Products are exact (no TF32) and dropout masks are hashes, so what differs is the order of sums. On one CPU, where
other groups of clients and other threads change that order, these runs differ by up to 1e-6.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedweave.backbone.load import load_backbone
from fedweave.cli import main
from fedweave.config import BackboneConfig
from fedweave.experts.layout import AdapterLayout
from fedweave.router.mlp import RouterLayout
from tests.helpers import TARGETS, make_lanes, make_trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOLERANCE = 1e-5  # of parameters that move by 1e-2 in a step
RUN = [
    "backbone.dtype=float32", "backbone.max_length=128", "data.clients=4", "data.train=20", "data.validation=2",
    "data.test=2", "data.alpha=0.5", "experts.rank=8", "experts.dropout=0.1", "discovery.warmup_steps=3",
    "discovery.max_buckets=4", "discovery.restarts=2", "training.rounds=2", "training.local_steps=4",
    "training.batch_size=4", "training.lr=1e-2", "training.weight_decay=0.1", "router.hidden=16", "router.lr=1e-2",
    "evaluation.scores=false", "evaluation.untouched=false",
]  # fmt: skip
WAYS = {
    "recorded": ["backbone.device=cuda", "training.cuda_graphs=true"],
    "eager": ["backbone.device=cuda", "training.cuda_graphs=false"],
    "cpu": ["backbone.device=cpu"],
}


@pytest.fixture(autouse=True)
def exact_products(smooth_optimiser):
    """No TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def farthest(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a.cpu() - b.cpu()).abs().max().item()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gemma3"])
def test_steps(family, dropout, model_folder, backbone_of):
    settings = BackboneConfig(model=str(model_folder(family)), device="cuda", dtype="float32", max_length=128)
    on_cpu, on_gpu = backbone_of(family), load_backbone(settings)
    layout = AdapterLayout.of(on_cpu.linear_layers(TARGETS), 8, 3)
    router = RouterLayout(on_cpu.width, 16, 3)
    lanes = make_lanes(on_cpu, layout, router, clients=3, steps=4)
    results = {}
    for way, backbone, graphs in (("recorded", on_gpu, True), ("eager", on_gpu, False), ("cpu", on_cpu, False)):
        trainer, mixture = make_trainer(backbone, layout, router, dropout, cuda_graphs=graphs, weight_decay=0.1)
        results[way] = list(trainer.train(lanes, 3))
        assert way != "recorded" or all(group.graphs for group in trainer._groups.values())
        trainer.release()
        mixture.detach()
    for way in ("recorded", "eager"):
        for mine, expected in zip(results[way], results["cpu"], strict=True):
            assert farthest(mine.delta_theta, expected.delta_theta) <= TOLERANCE, way
            assert farthest(mine.delta_phi, expected.delta_phi) <= TOLERANCE, way
            assert mine.losses == pytest.approx(expected.losses, abs=TOLERANCE), way
            assert expected.delta_theta.abs().max() > 1e-2


@pytest.mark.parametrize("method", ["fedweave", "ffa-lora"])
def test_whole_runs(method, model_folder, tmp_path):
    """Discovery, alignment, warm start and two rounds, by way of the command line."""

    def run(way: str) -> dict[str, torch.Tensor]:
        folder: Path = tmp_path / way
        settings = [f"backbone.model={model_folder('llama')}", f"method={method}", f"output={folder}"]
        assert main(["run", "quickstart", *settings, *RUN, *WAYS[way], "--quiet"]) == 0
        return load_file(folder / "checkpoints" / "round-0002" / "state.safetensors")

    expected = run("cpu")
    for way in ("recorded", "eager"):
        state = run(way)
        assert state.keys() == expected.keys()
        for name, tensor in expected.items():
            assert state[name].shape == tensor.shape, f"{way}: another number of experts was found"
            assert farthest(state[name], tensor) <= TOLERANCE, (way, name)
