"""Experts on every linear layer, and layers that run twice, from training to every format of export."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedweave.bundle.load import load_bundle
from fedweave.bundle.programs import write_gguf, write_mlx
from fedweave.cli import main
from fedweave.runs.use import export_as, export_run, load
from tests.bundle import test_gguf
from tests.helpers import PROMPTS, read_json

KINDS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SETTINGS = ("experts.target_modules=all-linear", "training.lr=1e-2", "training.rounds=1")


@pytest.fixture(scope="module")
def run(tiny_run) -> Path:
    return tiny_run(*SETTINGS)


@pytest.fixture(scope="module")
def bundle(run, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("every") / "bundle"
    export_run(run, folder)  # which compares every expert with PEFT's
    return folder


def test_a_bundle_names_the_layers_as_peft_does(run, bundle):
    assert read_json(bundle / "fedweave.json")["target_modules"] == KINDS
    assert read_json(bundle / "expert_0" / "adapter_config.json")["target_modules"] == KINDS
    ours, theirs = load(run), load_bundle(bundle)
    assert len(ours.mixture.layout.names) == 14 and torch.equal(ours.theta, theirs.theta)
    assert ours.generate(PROMPTS, max_new_tokens=6) == theirs.generate(PROMPTS, max_new_tokens=6)


def test_layers_that_run_twice_change_no_bit_of_a_run(run, small, tmp_path):
    other = tmp_path / "run"
    options = [*small, *SETTINGS, "training.checkpointing=on", f"output={other}", "--quiet"]
    assert main(["run", "quickstart", *options]) == 0
    states = [load_file(folder / "checkpoints" / "round-0001" / "state.safetensors") for folder in (run, other)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def test_a_run_goes_on_from_such_a_bundle(bundle, small, tmp_path, complains):
    options = [*small, f"init={bundle}", f"output={tmp_path / 'second'}", "--quiet"]
    assert "set experts.target_modules=[down_proj," in complains("run", "quickstart", *options)
    assert main(["run", "quickstart", *options, *SETTINGS]) == 0


def test_other_programs_get_every_layer(bundle, tmp_path):
    export_as(partial(write_gguf, quantisation="F32"), bundle, tmp_path / "gguf")
    test_gguf.test_an_expert_added_to_the_files_own_weights_is_the_expert(bundle, tmp_path / "gguf", tmp_path)
    export_as(write_mlx, bundle, tmp_path / "mlx")
    assert len(read_json(tmp_path / "mlx" / "expert_0" / "adapter_config.json")["lora_parameters"]["keys"]) == 7
