"""Experts for MLX, loaded by mlx_lm where it is installed (`pip install mlx-lm mlx-cpu`, on any machine)."""

import pytest
import torch
from safetensors.torch import load_file

from fedweave.bundle.adapter import probe
from fedweave.bundle.load import load_bundle
from tests.bundle.test_export import probe_ids
from tests.helpers import read_json


@pytest.fixture(scope="module")
def written(exported, tmp_path_factory):
    from fedweave.cli import main

    folder = tmp_path_factory.mktemp("mlx") / "experts"
    assert main(["export", str(exported), str(folder), "--format", "mlx"]) == 0
    return folder


def test_factors_are_transposed_and_the_scale_is_ours(exported, written):
    ours = load_bundle(exported)
    layout = ours.mixture.layout
    for m in range(layout.experts):
        found = load_file(written / f"expert_{m}" / "adapters.safetensors")
        config = read_json(written / f"expert_{m}" / "adapter_config.json")
        assert config["num_layers"] == 2 and config["fine_tune_type"] == "lora"
        parameters = config["lora_parameters"]
        assert parameters["keys"] == ["self_attn.q_proj", "self_attn.v_proj"]
        named = layout.named(ours.theta, m)
        for name in layout.names:
            a, b = found[f"{name}.lora_a"], found[f"{name}.lora_b"]  # [in, r], [r, out]
            assert a.shape[1] == b.shape[0] == parameters["rank"]
            theirs = parameters["scale"] * (a @ b).T  # [out, in]
            one, two = (named[f"base_model.model.{name}.lora_{factor}.weight"] for factor in "AB")
            torch.testing.assert_close(theirs, ours.mixture.scale * two @ one)
    assert (written / "chat_template.jinja").is_file() and "mlx_lm" in (written / "README.md").read_text()


def test_mlx_gives_the_logits_of_the_experts(exported, written, model_folder):
    mlx_lm = pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    import mlx.core as mx

    ours = load_bundle(exported)
    for m in range(ours.mixture.layout.experts):
        model, _ = mlx_lm.load(str(model_folder("llama")), adapter_path=str(written / f"expert_{m}"))
        logits = torch.tensor(model(mx.array(probe_ids(ours).tolist())).astype(mx.float32)[0].tolist())
        torch.testing.assert_close(logits, probe(ours, ours.experts.only(f"expert_{m}")[1]), atol=1e-3, rtol=1e-3)


def test_the_readmes_code_gives_the_experts_answer(exported, written, model_folder):
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    ours = load_bundle(exported)
    code = (written / "README.md").read_text().split("```python\n")[1].split("```")[0]
    base, found = model_folder("llama"), {}
    exec(code.replace("PATH", str(written)).replace(f'"{base.name}"', f'"{base}"'), found)
    prompt = "Fix the grammar: Ada go to school."
    expected = ours.generate([prompt], adapter="expert_0", max_new_tokens=256)[0].text
    assert found["answer"].strip().startswith(expected[:40])
