"""Two processes that torchrun starts on one GPU share it and give the run of one: whether processes agree needs no
second GPU to be seen. The same test passes on a CPU."""

from __future__ import annotations

import pytest
import torch

from tests.federation.test_distributed import assert_same_run, torchrun

no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=no_gpu)]
)
@pytest.mark.parametrize("together", ["auto", "1"])
@pytest.mark.gpu
def test_two_processes_that_share_a_device_equal_one(tmp_path, small, tiny_run, device, together):
    """In float32, where nothing but the order of sums differs: processes train other groups of clients."""
    settings = [
        f"backbone.device={device}",
        "backbone.dtype=float32",
        "training.rounds=2",
        f"training.clients_per_step={together}",
    ]
    one, two = tiny_run(*settings), tmp_path / "two"
    command = ["-m", "fedweave.cli", "run", "quickstart", *small, *settings, f"output={two}"]
    said = torchrun(*command, CUDA_VISIBLE_DEVICES="0")
    assert "2 processes share the clients" in said
    assert ("2 of them each GPU" in said) == (device == "cuda")
    assert_same_run(one, two, 2e-5)
