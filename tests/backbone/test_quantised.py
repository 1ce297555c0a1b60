"""Backbones that stay quantised compute, train and answer as the same weights do when they are unpacked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.torch import load_file, save_file
from torch.autograd.graph import saved_tensors_hooks

from fedweave.backbone.announced import skeleton
from fedweave.backbone.blocks import nf4_bits
from fedweave.backbone.gguf_names import name_of, names_of, reordered
from fedweave.backbone.load import Backbone, load_backbone
from fedweave.backbone.packing import pack
from fedweave.backbone.quantised import (
    QuantisedLinear,
    bytes_of,
    in_groups,
    numbers_of,
    packed_weights,
    predicted_bytes,
    unpack,
)
from fedweave.bundle.gguf_model import _shape, write_model
from fedweave.bundle.gguf_tokens import write_tables
from fedweave.config import BackboneConfig
from fedweave.errors import UserError
from fedweave.experts.layout import AdapterLayout
from fedweave.inference.generate import generate
from fedweave.kernels import frozen
from fedweave.kernels.frozen import Resident
from fedweave.router.mlp import RouterLayout
from tests.helpers import PROMPTS, TARGETS, client_data, make_lanes, make_trainer
from tests.kernels.test_dequantise import random_blocks

K_MIXTURE = {"q_proj": "Q5_K", "v_proj": "Q6_K", "down_proj": "Q6_K", "o_proj": "F16", "embed_tokens": "Q6_K"}


def load(model: Path, weights: str = "stored", **settings: object) -> Backbone:
    fixed = {"device": "cpu", "max_length": 128, "prompt": "plain"}
    return load_backbone(BackboneConfig(model=str(model), weights=weights, **{**fixed, **settings}))  # type: ignore[arg-type]


def unpacked(backbone: Backbone, fused: bool = True) -> Backbone:
    """The same model, whose weights were unpacked once; the given one is used up."""
    unpack(backbone.model)
    return Backbone(
        backbone.model, backbone.tokenizer, backbone.prompts, backbone.name, backbone.note, backbone.device, fused
    )


@pytest.fixture(scope="module")
def gguf_of(backbone_of, tmp_path_factory):
    """Call with a family and a quantisation to get a GGUF file of its tiny model; the vocabulary has 8 bits."""
    made: dict[tuple[str, str], Path] = {}

    def make(family: str, kind: str = "Q4_0") -> Path:
        if (family, kind) not in made:
            path = tmp_path_factory.mktemp("stored") / f"{family}-{kind}.gguf"
            write_model(path, backbone_of(family), kind, family)
            made[family, kind] = path
        return made[family, kind]

    return make


@pytest.fixture(scope="module")
def k_file(wide_folder, tmp_path_factory) -> Path:
    """Its shape in the formats of a Q4_K_M file, which only llama.cpp can make: weights are random blocks."""
    backbone = load(wide_folder, "dense")
    config, path = backbone.model.config, tmp_path_factory.mktemp("k") / "k.gguf"
    writer = GGUFWriter(str(path), "llama")
    _shape(writer, config)
    write_tables(writer, backbone.prompts, len(backbone.head))
    for key, tensor in backbone.model.state_dict().items():
        kind = K_MIXTURE.get(key.split(".")[-2], "Q4_K") if tensor.ndim == 2 else "F32"
        if kind.endswith("_K"):
            array = random_blocks(kind, *tensor.shape, size=2e-4)
        else:
            array = quantize(reordered(key, tensor, config).numpy(), GGMLQuantizationType[kind])
        writer.add_tensor(name_of(names_of(config), key) or "", array, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def model_of(request, kind: str) -> tuple[Path, str]:
    """(model, backbone.weights) of one case."""
    if kind == "k":
        return request.getfixturevalue("k_file"), "stored"
    if kind.startswith("nf4"):
        return request.getfixturevalue("wide_folder"), kind
    return request.getfixturevalue("gguf_of")(*kind.split("-")), "stored"


ALL = [
    "llama-Q4_0",
    "llama-Q4_1",
    "llama-Q5_0",
    "llama-Q8_0",
    "qwen2-Q4_0",
    "gemma2-Q4_1",
    "gemma3-Q5_1",
    "k",
    "nf4",
    "nf4-double",
]


@pytest.fixture(params=ALL)
def case(request) -> tuple[Path, str]:
    return model_of(request, request.param)


@pytest.fixture(params=["llama-Q4_0", "qwen2-Q4_1", "gemma2-Q4_0", "k", "nf4"])
def trained_case(request) -> tuple[Path, str]:
    return model_of(request, request.param)


# -------------------------------------------------------------------------------------- the same model


def test_hidden_states_are_those_of_the_weights_unpacked_once(case):
    kept = load(*case)
    assert packed_weights(kept.model)
    packed = pack([[e.ids for e in client_data(kept, 6, seed=0).examples]], kept.device)
    with torch.no_grad():
        found, logits = kept.hidden(packed), kept.logits(kept.hidden(packed))
        plain = unpacked(kept)
        assert not packed_weights(plain.model)
        torch.testing.assert_close(found, plain.hidden(packed), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(logits, plain.logits(plain.hidden(packed)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gemma3"])
def test_a_file_is_the_same_model_whether_it_stays_quantised_or_is_converted(gguf_of, family):
    """One identity: what is trained on the one answers on the other, up to the rounding to bfloat16."""
    stored, dense = load(gguf_of(family)), load(gguf_of(family), "dense")
    assert stored.fingerprint == dense.fingerprint and stored.identity == dense.identity
    assert stored.weights_hash != dense.weights_hash  # bits as they are kept
    assert stored.parameters == dense.parameters == numbers_of(dense.model)
    assert bytes_of(stored.model) < bytes_of(dense.model) / 2.5
    packed = pack([[e.ids for e in client_data(stored, 6, seed=0).examples]], stored.device)
    with torch.no_grad():
        found, expected = stored.hidden(packed), dense.hidden(packed)
    assert (found - expected).norm() < 0.02 * expected.norm()


def test_nf4_is_another_model_than_what_it_was_made_of(wide_folder):
    kinds = {weights: load(wide_folder, weights) for weights in ("dense", "nf4", "nf4-double")}
    assert len({backbone.fingerprint for backbone in kinds.values()}) == 3
    assert load(wide_folder, "nf4").fingerprint == kinds["nf4"].fingerprint
    assert isinstance(kinds["nf4"].head, torch.Tensor)  # embedding and output layer stay plain
    for weights in ("nf4", "nf4-double"):
        linear = sum(q.bytes for q in packed_weights(kinds[weights].model).values())
        expected = sum(
            nf4_bits(q.columns, weights == "nf4-double") / 8 * q.shape[0] * q.columns
            for q in packed_weights(kinds[weights].model).values()
        )
        assert linear == expected


def test_a_folder_stores_plain_weights(wide_folder):
    assert load(wide_folder, "stored").weights_hash == load(wide_folder, "dense").weights_hash


def test_memory_is_predicted_to_the_byte(case):
    for model, weights in (case, (case[0], "dense")):
        kept = load(model, weights)
        shapes = skeleton(kept.model.config, "tiny")
        gguf = model if model.suffix == ".gguf" else None
        assert predicted_bytes(shapes, weights, 4, gguf, in_groups(kept.device)) == bytes_of(kept.model)


def test_an_output_layer_too_large_for_the_scratch_memory_goes_by_its_rows(k_file, monkeypatch):
    kept = load(k_file)
    assert isinstance(kept.head, Resident)
    hidden = torch.randn(5, kept.width, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(frozen, "AT_ONCE", {"cpu": 1 << 14})
    few = Resident(kept.head.parts, kept.head.scratch)
    assert few._rows == 64 and len(few) > 5 * 64
    torch.testing.assert_close(few.times(hidden), kept.head.times(hidden))
    slope = torch.randn(5, len(few), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(few.back(slope), kept.head.back(slope))


def test_layers_that_read_the_same_input_lie_together_and_each_keeps_its_rows(gguf_of):
    kept = load(gguf_of("llama", "Q4_1"))
    packed = packed_weights(kept.model)
    q, k = (packed[f"model.layers.0.self_attn.{name}_proj.weight"].groups for name in "qk")
    if not in_groups(kept.device):
        pytest.skip("a Triton kernel unpacks here")
    assert q is not None and k is not None
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    assert k.storage_offset() == q.numel()


# -------------------------------------------------------------------------------------- training and answering


@pytest.mark.parametrize(("fused", "checkpointing"), [(True, "off"), (True, "on"), (False, "off"), (False, "on")])
def test_training_is_that_of_the_weights_unpacked_once(trained_case, fused, checkpointing, smooth_optimiser):
    """Experts on every linear layer; with checkpointing a layer's weights are unpacked three times."""
    kept = load(*trained_case, fused=fused)
    assert (kept.decoder is not None) == fused
    layout = AdapterLayout.of(kept.linear_layers(["all-linear"]), 4, 2)
    router = RouterLayout(kept.width, 16, 2)
    lanes = make_lanes(kept, layout, router, clients=2, steps=3)
    results = []
    for backbone in (kept, None):
        backbone = backbone or unpacked(kept, fused)
        trainer, mixture = make_trainer(
            backbone, layout, router, targets=["all-linear"], checkpointing=checkpointing
        )
        results.append(list(trainer.train(lanes, 2)))
        mixture.detach()
    for mine, theirs in zip(*results, strict=True):
        assert mine.losses == pytest.approx(theirs.losses, rel=1e-5)
        torch.testing.assert_close(mine.delta_theta, theirs.delta_theta, atol=1e-5, rtol=1e-3)
        torch.testing.assert_close(mine.delta_phi, theirs.delta_phi, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("fused", [True, False])
def test_the_way_back_keeps_no_weight(gguf_of, fused):
    kept = load(gguf_of("llama"), fused=fused)
    weights = [q.dense(torch.float32) for q in packed_weights(kept.model).values()]
    layout = AdapterLayout.of(kept.linear_layers(TARGETS), 4, 1)
    trainer, mixture = make_trainer(kept, layout, None)
    seen: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.clone())
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        list(trainer.train(make_lanes(kept, layout, None, clients=1, steps=1), 1))
    mixture.detach()
    assert seen
    for rows in (w[0] for w in weights):  # a weight, or several in one, would have this row
        assert not any(t.shape[-1] == len(rows) and (t == rows).all(-1).any() for t in seen)


def test_answers_are_those_of_the_weights_unpacked_once(case):
    kept = load(*case)
    prompts = kept.prompts.encode_prompts(PROMPTS)
    found = generate(kept, prompts, 6)
    assert found == generate(unpacked(kept), prompts, 6)


# -------------------------------------------------------------------------------------- what is refused


def refusal(model: Path, weights: str) -> str:
    with pytest.raises(UserError) as error:
        load(model, weights)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_nf4_needs_rows_of_whole_groups(model_folder):
    assert "no multiple of 64" in refusal(model_folder("llama"), "nf4")


def test_nf4_names_what_a_folder_lacks(wide_folder, tmp_path, tokenizer):
    tensors = load_file(wide_folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    for file in wide_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "lack model.layers.1.mlp.up_proj.weight" in refusal(tmp_path, "nf4")


def test_a_kind_that_is_not_read_is_named_with_what_to_do(wide_folder, tmp_path, k_file):
    from gguf import GGUFReader

    reader = GGUFReader(str(k_file))
    place = next(t for t in reader.tensors if t.name == "blk.0.ffn_up.weight").field
    data = bytearray(k_file.read_bytes())
    at = place.offset + sum(part.nbytes for part in place.parts[:-2])
    data[at : at + 4] = int(GGMLQuantizationType.Q3_K).to_bytes(4, "little")
    (tmp_path / "q3.gguf").write_bytes(data)
    said = refusal(tmp_path / "q3.gguf", "stored")
    assert "blk.0.ffn_up.weight as Q3_K" in said and "backbone.weights=dense" in said


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.95, 0.9999])
def test_a_truncated_file_is_one_sentence(gguf_of, tmp_path, share):
    whole = gguf_of("llama").read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: int(share * len(whole))])
    assert "cut.gguf" in refusal(path, "stored")


def test_a_scale_that_is_not_finite_is_named(gguf_of, tmp_path):
    from fedweave.backbone.announced import stored_tensors

    data = bytearray(gguf_of("qwen2").read_bytes())
    start = next(t for t in stored_tensors(gguf_of("qwen2")) if t.name == "blk.1.attn_k.weight").start
    data[start : start + 2] = np.float16(np.inf).tobytes()
    (tmp_path / "infinite.gguf").write_bytes(data)
    said = refusal(tmp_path / "infinite.gguf", "stored")
    assert "model.layers.1.self_attn.k_proj.weight.scale holds numbers that are not finite" in said


def test_a_quantised_layer_looks_like_a_linear_one(gguf_of):
    kept = load(gguf_of("llama"))
    layer = kept.linear_layers(["q_proj"])["model.layers.0.self_attn.q_proj"]
    assert isinstance(layer, QuantisedLinear) and (layer.in_features, layer.out_features) == (32, 32)
    assert layer.weight.shape == (32, 32) and layer.weight.dtype == torch.float32
