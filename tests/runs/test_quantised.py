"""A whole life on a backbone that stays quantised: run, test, resume, export, load elsewhere, serve."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedweave.backbone.catalog import locate
from fedweave.backbone.quantised import packed_weights
from fedweave.bundle.adapter import probe
from fedweave.bundle.gguf_model import write_model
from fedweave.runs.use import export_run, load
from tests.helpers import PROMPTS, SMALL, events, read_json
from tests.serving.conftest import running


@pytest.fixture(scope="module")
def gguf(backbone_of, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("quantised") / "tiny.gguf"
    write_model(path, backbone_of("qwen2"), "Q4_1", "tiny")
    return path


@pytest.fixture(scope="module")
def run(gguf, tiny_run) -> Path:
    """The last of two settings of one key holds."""
    return tiny_run(
        f"backbone.model={gguf}", "backbone.weights=stored", "backbone.prompt=plain", "training.lr=1e-2"
    )


@pytest.fixture(scope="module")
def bundle(run, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "bundle"
    export_run(run, folder)
    return folder


def test_a_run_learns_and_says_what_it_ran_on(run):
    summary = read_json(run / "summary.json")
    assert summary["config"]["backbone"]["weights"] == "stored"
    assert any("GGUF" in note for note in summary["notes"])
    losses = [event["loss"] for event in events(run, "validation")]
    assert min(losses[1:]) < losses[0]


def test_a_resumed_run_may_keep_its_weights_another_way_if_they_are_the_same(tiny_copy, gguf, says, complains):
    copy = tiny_copy(
        f"backbone.model={gguf}", "backbone.weights=stored", "backbone.prompt=plain", "training.lr=1e-2"
    )
    says("resume", copy, "training.rounds=4", "backbone.weights=dense")
    assert "no multiple of 64" in complains("resume", copy, "training.rounds=5", "backbone.weights=nf4")


def test_a_bundle_loads_the_weights_that_it_was_trained_on(bundle):
    assert read_json(bundle / "fedweave.json")["backbone"]["weights"] == "stored"
    model = load(bundle, device="cpu")
    assert packed_weights(model.backbone.model)
    answers = model.generate(PROMPTS, max_new_tokens=4)
    assert [len(a.weights) for a in answers] == [model.mixture.layout.experts] * 3


def test_it_answers_on_the_converted_folder_too(bundle, gguf):
    """What `--backbone FOLDER` does: a folder's weights are stored plain."""
    stored, folder = load(bundle, device="cpu"), load(bundle, device="cpu", model=locate(str(gguf), None).path)
    assert packed_weights(stored.backbone.model) and not packed_weights(folder.backbone.model)
    gates = stored.experts.only("expert_0")[1]
    found, expected = probe(stored, gates), probe(folder, gates)
    assert (found - expected).norm() < 0.05 * expected.norm()


def test_another_models_weights_are_refused_with_a_remedy(bundle, model_folder, complains):
    said = complains("generate", bundle, "Hello", "--backbone", model_folder("qwen2"))
    assert "was trained on another backbone" in said and "--backbone FOLDER, FILE.gguf" in said


def test_a_merged_model_is_dense_and_the_expert(bundle, tmp_path, says):
    says("export", bundle, tmp_path / "merged", "--merge", 0)
    model = load(bundle, device="cpu")
    tensors = load_file(tmp_path / "merged" / "model.safetensors")
    name = model.mixture.layout.names[0]
    plain = model.backbone.model.get_submodule(name).weight
    a, b = (model.mixture.layout.named(model.theta, 0)[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
    torch.testing.assert_close(tensors[f"{name}.weight"], plain + model.mixture.scale * b @ a)


def test_the_backbone_can_be_written_as_gguf_again(bundle, tmp_path, says):
    says("export", bundle, tmp_path / "out", "--format", "gguf", "--quantise", "Q4_1")
    again = load(bundle, device="cpu", model=str(tmp_path / "out" / "base-Q4_1.gguf"))
    assert again.backbone.identity["backbone"] == load(bundle, device="cpu").backbone.identity["backbone"]


def test_a_server_answers_with_it(bundle):
    with running(load(bundle, device="cpu")) as server:
        client = server.client()
        said = client.completions.create(model="fedweave", prompt="How many?", max_tokens=4, temperature=0)
        assert said.usage.completion_tokens > 0


def test_a_run_on_nf4_from_start_to_answer(tmp_path, wide_folder, says):
    run, bundle = tmp_path / "run", tmp_path / "bundle"
    says(
        "run", "quickstart", *SMALL, f"backbone.model={wide_folder}", "backbone.weights=nf4-double", f"output={run}"
    )
    assert any("NF4" in note for note in read_json(run / "summary.json")["notes"])
    export_run(run, bundle)
    assert "NF4" in (bundle / "README.md").read_text()
    assert load(bundle, device="cpu").generate(PROMPTS[:1], max_new_tokens=4)
