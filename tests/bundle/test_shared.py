"""A model whose experts share a part: run, resume, export, plain PEFT, merging, fixed mixtures, a new start."""

import contextlib
import json
from functools import partial

import pytest
import torch
from gguf import GGUFReader
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fedweave import load
from fedweave.bundle.adapter import probe
from fedweave.bundle.export import write_soft
from fedweave.bundle.gguf_model import reordered
from fedweave.bundle.load import load_bundle
from fedweave.bundle.programs import write_gguf, write_mlx
from fedweave.cli import main
from fedweave.runs.use import export_as, export_run
from tests.bundle.test_export import one_hot, probe_of
from tests.helpers import PROMPTS, SMALL

SWITCHES = [
    "experts.shared_rank=8", "experts.start=zero", "experts.labels=router", "router.training=chosen",
    "training.batches=mixed", "training.schedule=late", "training.lr=1e-2", "training.weighting=example",
    "router.gate=sure", "router.familiar=0.9", "experts.rest=0.2",
]  # fmt: skip


@pytest.fixture(scope="module")
def settings(model_folder) -> list[str]:
    return [f"backbone.model={model_folder('llama')}", *SMALL, *SWITCHES, "--quiet"]


@pytest.fixture(scope="module")
def woven(tmp_path_factory, settings):
    folder = tmp_path_factory.mktemp("shared") / "run"
    assert main(["run", "quickstart", *settings, f"output={folder}"]) == 0
    return folder


@pytest.fixture(scope="module")
def exported(woven):
    export_run(woven, woven.parent / "bundle")
    return woven.parent / "bundle"


def test_every_expert_is_one_adapter_that_plain_peft_runs(exported, model_folder):
    ours = load_bundle(exported)
    layout = ours.mixture.layout
    assert layout.shared == 8 and layout.experts > 1
    for m in range(layout.experts):
        config = json.loads((exported / f"expert_{m}" / "adapter_config.json").read_text())
        assert config["r"] == 4 + 8
        ours = load_bundle(exported)
        expected = probe(ours, one_hot(m, layout.experts))
        base = AutoModelForCausalLM.from_pretrained(model_folder("llama"), dtype=torch.float32)
        ours.backbone.model = PeftModel.from_pretrained(base, exported / f"expert_{m}").eval()
        torch.testing.assert_close(probe_of(ours), expected, atol=1e-4, rtol=1e-4)


def test_what_experts_share_is_an_adapter_for_prompts_like_none_before(exported, model_folder):
    ours = load_bundle(exported)
    assert ours.experts.adapter_names[-1] == "shared" and ours.experts.router.axes
    nobody = torch.zeros(ours.mixture.layout.experts)
    expected = probe(ours, nobody)
    odd = torch.randn(3, ours.backbone.width, generator=torch.Generator().manual_seed(0)) * 1e3
    assert not ours.weights(odd).any()
    base = AutoModelForCausalLM.from_pretrained(model_folder("llama"), dtype=torch.float32)
    ours.backbone.model = PeftModel.from_pretrained(base, exported / "shared").eval()
    torch.testing.assert_close(probe_of(ours), expected, atol=1e-4, rtol=1e-4)


def test_a_bundle_is_its_run_whatever_the_routing(woven, exported):
    from_run, from_bundle = load(woven), load(exported)
    torch.testing.assert_close(from_run.theta, from_bundle.theta, atol=1e-7, rtol=1e-6)
    for routing in ("sparse", "soft", "top2"):
        texts = [[a.text for a in m.generate(PROMPTS, routing, max_new_tokens=4)] for m in (from_run, from_bundle)]
        assert texts[0] == texts[1]
    silent = from_bundle.theta.clone()
    silent[from_bundle.mixture.layout.expert_of_column == from_bundle.mixture.layout.experts] = 0.0
    gates = one_hot(0, from_bundle.mixture.layout.experts)
    with_shared = probe(from_bundle, gates)
    from_bundle.experts.theta = silent
    assert not torch.allclose(probe(from_bundle, gates), with_shared), "no routing leaves the shared part out"


def test_merged_models_and_fixed_mixtures_have_the_shared_part(woven, exported, tmp_path, model_folder):
    experts = load_bundle(exported).mixture.layout.experts
    assert main(["export", str(exported), str(tmp_path / "dense"), "--merge", "1"]) == 0
    ours = load_bundle(exported)
    expected = probe(ours, one_hot(1, experts))
    ours.backbone.model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32).eval()
    torch.testing.assert_close(probe(ours), expected, atol=1e-4, rtol=1e-4)
    weights = torch.linspace(1, 2, experts).softmax(0)
    export_as(partial(write_soft, weights=weights.tolist()), woven, tmp_path / "soft")
    ours = load_bundle(exported)
    expected = probe(ours, weights)
    base = AutoModelForCausalLM.from_pretrained(model_folder("llama"), dtype=torch.float32)
    ours.backbone.model = PeftModel.from_pretrained(base, tmp_path / "soft").eval()
    torch.testing.assert_close(probe_of(ours), expected, atol=1e-4, rtol=1e-4)


def test_files_for_other_programs_have_the_shared_part(exported, tmp_path):
    ours = load_bundle(exported)
    config, scale = ours.backbone.model.config, ours.mixture.scale
    export_as(partial(write_gguf, quantisation="F32"), exported, tmp_path / "gguf")
    export_as(write_mlx, exported, tmp_path / "mlx")
    assert ours.experts.adapter_names[-1] == "shared"
    for name in ours.experts.adapter_names:
        peft = load_file(exported / name / "adapter_model.safetensors")
        theirs = load_file(tmp_path / "mlx" / name / "adapters.safetensors")
        rank = json.loads((tmp_path / "mlx" / name / "adapter_config.json").read_text())["lora_parameters"]["rank"]
        lora = GGUFReader(str(tmp_path / "gguf" / f"{name}.gguf"))
        tensors = {tensor.name: torch.tensor(tensor.data) for tensor in lora.tensors}
        alpha = lora.fields["adapter.lora.alpha"].contents()
        assert rank == (8 if name == "shared" else 12) and alpha / rank == scale
        for layer in ours.mixture.layout.names:
            a, b = (peft[f"base_model.model.{layer}.lora_{factor}.weight"] for factor in "AB")
            torch.testing.assert_close(theirs[f"{layer}.lora_a"] @ theirs[f"{layer}.lora_b"], (b @ a).T)
            block, kind = layer.split(".")[2], layer[-6]  # q or v
            found = (
                tensors[f"blk.{block}.attn_{kind}.weight.lora_b"]
                @ tensors[f"blk.{block}.attn_{kind}.weight.lora_a"]
            )
            torch.testing.assert_close(found, reordered(f"{layer}.weight", b @ a, config))


def last_state(folder):
    return load_file(sorted((folder / "checkpoints").glob("round-*"))[-1] / "state.safetensors")


def test_a_run_that_was_stopped_ends_as_one_that_was_not(woven, settings, tmp_path, monkeypatch):
    from fedweave.federation import rounds

    one_round, done = rounds.one_round, []

    def stops(*args):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(1)
        return one_round(*args)

    monkeypatch.setattr(rounds, "one_round", stops)
    with contextlib.suppress(KeyboardInterrupt):
        main(["run", "quickstart", *settings, f"output={tmp_path / 'run'}"])
    monkeypatch.setattr(rounds, "one_round", one_round)
    assert main(["resume", str(tmp_path / "run"), "--quiet"]) == 0
    whole, resumed = last_state(woven), last_state(tmp_path / "run")
    assert torch.equal(whole["theta"], resumed["theta"]) and torch.equal(whole["phi"], resumed["phi"])


def test_a_federation_starts_from_a_bundle_with_a_shared_part(exported, settings, tmp_path, capsys):
    short = [*settings, "training.rounds=1", f"init={exported}"]
    assert main(["run", "quickstart", *short, f"output={tmp_path / 'run'}"]) == 0
    start = load_file(tmp_path / "run" / "checkpoints" / "round-0000" / "state.safetensors")
    assert torch.equal(start["theta"], load_bundle(exported).theta)
    assert not torch.equal(last_state(tmp_path / "run")["theta"], start["theta"])
    assert main(["run", "quickstart", *short, "experts.shared_rank=4", f"output={tmp_path / 'other'}"]) == 2
    assert "set experts.shared_rank=8, as in the bundle" in capsys.readouterr().err


def test_the_summary_counts_what_is_trained_and_sent(woven):
    summary = json.loads((woven / "summary.json").read_text())
    layout = load(woven).mixture.layout
    assert summary["trained_parameters"] == layout.size
    events = [json.loads(line) for line in (woven / "metrics.jsonl").read_text().splitlines()]
    sent = [up for event in events if event["event"] == "round" for up in event["bytes_up"].values()]
    one, shared = layout.with_experts(1).size, layout.shared_part.size
    assert {up - 4 * shared for up in sent} <= {4 * m * one for m in range(1, layout.experts + 1)}
