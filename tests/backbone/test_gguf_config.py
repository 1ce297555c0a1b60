"""A GGUF file and the folder that it was made of are one model, far into a text as well."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from transformers import AutoConfig, LlamaConfig, Phi3Config

from fedweave.backbone.gguf_config import complete
from fedweave.backbone.gguf_names import ARCHITECTURES
from fedweave.backbone.load import load_backbone
from fedweave.backbone.packing import pack
from fedweave.bundle.gguf_model import write_model
from fedweave.config import BackboneConfig
from fedweave.errors import UserError

IDS = np.arange(10, 130, dtype=np.int32)  # beyond windows, and where a stretch shows


@torch.no_grad()
def far(backbone) -> torch.Tensor:
    return backbone.logits(backbone.hidden(pack([[IDS]], backbone.device)))


@pytest.mark.parametrize("weights", ["stored", "dense"])
@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_a_file_is_the_model_that_was_written(backbone_of, tmp_path, family, weights):
    own = backbone_of(family)
    write_model(tmp_path / "model.gguf", own, "F32", "tiny")
    model = str(tmp_path / "model.gguf")
    found, expected = far(load_backbone(BackboneConfig(model=model, weights=weights, device="cpu"))), far(own)
    atol = 1e-5 if weights == "stored" else 0.03  # a converted copy is in bfloat16
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)


def test_a_bias_that_the_architecture_does_not_know_is_refused(backbone_of, tmp_path, monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "qwen2", "llama")
    write_model(tmp_path / "model.gguf", backbone_of("qwen2"), "F32", "tiny")
    monkeypatch.undo()
    for weights in ("stored", "dense"):
        with pytest.raises(UserError, match=r"a llama has no place for blk\.0\.attn_k\.bias"):
            load_backbone(BackboneConfig(model=str(tmp_path / "model.gguf"), weights=weights, device="cpu"))


def said(path, architecture="llama", values=(), factors=None, name="rope_freqs.weight"):
    """A file that says ``values`` of a model with heads of 16."""
    writer = GGUFWriter(str(path), architecture)
    for key, value in dict(values).items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        add[type(value)](f"{architecture}.{key}", value)
    if factors is not None:
        writer.add_tensor(name, np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_other_stretches_are_those_of_transformers(tmp_path):
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 512}
    config = LlamaConfig(max_position_embeddings=2048)
    complete(config, said(tmp_path / "yarn.gguf", values=yarn))
    stretch = {
        key: config.rope_parameters[key] for key in ("rope_type", "factor", "original_max_position_embeddings")
    }
    assert stretch == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    gemma = AutoConfig.for_model("gemma3_text", head_dim=16, num_hidden_layers=2)
    values = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base_swa": 5e3,
              "attention.sliding_window_pattern": [True, False], "final_logit_softcapping": 0.0}  # fmt: skip
    complete(gemma, said(tmp_path / "linear.gguf", "gemma3", values))
    assert gemma.rope_parameters["full_attention"]["rope_type"] == "linear"
    assert gemma.rope_parameters["sliding_attention"] == {"rope_type": "default", "rope_theta": 5e3}
    assert gemma.layer_types == ["sliding_attention", "full_attention"]
    assert gemma.query_pre_attn_scalar == 16 and gemma.final_logit_softcapping is None


def test_a_large_gemma_scales_attention_in_its_own_way(tmp_path):
    for layers, scale in ((46, 144), (42, 128)):
        config = AutoConfig.for_model(
            "gemma2", hidden_size=4608, num_attention_heads=32, head_dim=128, num_hidden_layers=layers
        )
        complete(config, said(tmp_path / f"{layers}.gguf", "gemma2"))
        assert config.query_pre_attn_scalar == scale


@pytest.mark.parametrize(
    ("config", "values", "factors", "name", "message"),
    [
        (LlamaConfig(), {"rope.scaling.type": "longrope"}, None, "", r"not read \(longrope\)"),
        (LlamaConfig(head_dim=16), {}, [1.0] * 4, "rope_freqs.weight", "no 8 positive numbers"),
        (LlamaConfig(head_dim=16), {}, [1.0] * 7 + [0.0], "rope_freqs.weight", "no 8 positive numbers"),
        (LlamaConfig(head_dim=16), {}, [1.0] * 8, "rope_factors_long.weight", "rope_factors_long.weight"),
        (Phi3Config(), {}, [1.0] * 8, "rope_factors_long.weight", "not read of phi3"),
    ],
)
def test_positions_that_are_not_read_are_refused(tmp_path, config, values, factors, name, message):
    with pytest.raises(ValueError, match=message):
        complete(config, said(tmp_path / "file.gguf", values=values, factors=factors, name=name))
