"""Loading a backbone: every failure in one sentence, every weight frozen and accounted for."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PhimoeConfig

from fedweave.backbone import catalog
from fedweave.backbone import weights as hashing
from fedweave.backbone.announced import check_room
from fedweave.backbone.device import multiplies_bfloat16, pick_device, pick_dtype
from fedweave.backbone.load import load_backbone
from fedweave.backbone.packing import pack
from fedweave.backbone.weights import weights_hash
from fedweave.config import BackboneConfig
from fedweave.errors import UserError
from fedweave.federation.rounds import federate
from fedweave.methods import build_method
from tests.conftest import FAMILIES, SHAPE, SPECIAL
from tests.federations import changed, make_engine


def load(model, **settings):
    return load_backbone(BackboneConfig(model=str(model), **{"device": "cpu", "max_length": 128, **settings}))


def complaint(model, **settings) -> str:
    with pytest.raises(UserError) as caught:
        load(model, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def damaged(tmp_path, model_folder):
    """A copy of the tiny Llama that a test may break."""
    return shutil.copytree(model_folder("llama"), tmp_path / "damaged")


# -------------------------------------------------------------------------------------- finding


@pytest.mark.parametrize("model", ["/no/such/folder", "./here", "~/nowhere/at/all", "gpt2", "a/b/c"])
def test_name_that_is_neither_path_nor_hub_id_is_a_user_error(model):
    assert complaint(model).startswith(f"backbone.model={model} is neither a folder, a .gguf file nor a hub id")


def test_folder_without_config_is_a_user_error(tmp_path):
    assert "is a folder without config.json" in complaint(tmp_path)


def test_hub_model_out_of_reach_is_a_user_error_with_a_remedy():
    message = complaint("nobody/no-such-model")
    assert message.startswith("backbone.model=nobody/no-such-model is not on this machine")
    assert "name a local folder or a .gguf file" in message


def test_offline_means_that_no_package_is_fetched_either(monkeypatch, tmp_path):
    monkeypatch.setattr(catalog, "CACHE", tmp_path)
    monkeypatch.setattr(catalog.subprocess, "run", lambda *_, **__: pytest.fail("a program was started"))
    with pytest.raises(UserError, match="downloads are off"):
        catalog.locate(next(iter(catalog.PACKAGED)), None)


# -------------------------------------------------------------------------------------- damaged folders


def test_broken_config_is_a_user_error(damaged):
    (damaged / "config.json").write_text("{")
    assert complaint(damaged).startswith(f"backbone.model={damaged} cannot be loaded: ")


def test_unknown_architecture_is_a_user_error_that_names_it(damaged):
    config = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps(config | {"model_type": "nonesuch"}))
    assert "nonesuch" in complaint(damaged)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_missing_file_is_a_user_error(damaged, name):
    (damaged / name).unlink()
    assert "cannot be loaded: " in complaint(damaged)


def test_truncated_weights_are_a_user_error(damaged):
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "cannot be loaded: " in complaint(damaged)


def test_weights_of_another_size_are_a_user_error(damaged):
    config = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    assert "cannot be loaded: " in complaint(damaged)


def test_absent_weight_is_a_user_error_that_names_it(damaged):
    weights = load_file(damaged / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, damaged / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.1.self_attn.q_proj.weight" in complaint(damaged)


# -------------------------------------------------------------------------------------- device and dtype


@pytest.mark.parametrize("weights", ["dense", "nf4"])
@pytest.mark.parametrize("name", ["0.self_attn.q_proj.bias", "1.self_attn.q_norm.weight", "2.mlp.up_proj.weight"])
def test_weights_of_layers_that_the_config_has_no_place_for_are_refused(damaged, name, weights):
    tensors = load_file(damaged / "model.safetensors")
    tensors |= {f"model.layers.{name}": torch.ones(4), "vision_tower.layers.0.weight": torch.ones(4)}
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    assert f"its config has no place for model.layers.{name}" in complaint(damaged, weights=weights)


def test_bfloat16_needs_a_processor_that_multiplies_it(model_folder, monkeypatch):
    monkeypatch.setattr("fedweave.backbone.device.multiplies_bfloat16", lambda: False)
    assert complaint(model_folder("llama"), dtype="bfloat16").startswith("backbone.dtype=bfloat16 needs a CUDA")
    monkeypatch.setattr("fedweave.backbone.device.multiplies_bfloat16", lambda: True)
    assert pick_dtype("bfloat16", torch.device("cpu")) == torch.bfloat16


@pytest.mark.skipif(not multiplies_bfloat16(), reason="this processor does not multiply bfloat16")
def test_a_federation_in_bfloat16_on_a_cpu_learns_what_one_in_float32_does(config):
    """Adapters and their optimiser are float32 in both."""
    losses: dict[str, list[float]] = {}
    for dtype in ("float32", "bfloat16"):
        own = changed(config, backbone={"dtype": dtype}, training={"rounds": 2})
        backbone, told = load_backbone(own.backbone), losses.setdefault(dtype, [])
        engine, method = make_engine(own, backbone), build_method(own)
        assert backbone.dtype == getattr(torch, dtype)
        state = method.prepare(engine)
        federate(method, engine, state, range(2), lambda _, report, told=told: told.append(report.train_loss))
        engine.detach()
    assert losses["bfloat16"][1] < losses["bfloat16"][0]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.03)


@pytest.mark.parametrize("device", ["tpu9", "", "meta", "mps"])
def test_unknown_device_is_a_user_error_that_lists_the_known_ones(model_folder, device):
    message = complaint(model_folder("llama"), device=device)
    assert message.startswith(f"backbone.device={device!r} is")
    assert message.endswith("use auto, cpu, cuda or cuda:N.")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_cuda_where_there_is_none_is_a_user_error(model_folder, device):
    assert f"backbone.device={device}, but this machine has no usable CUDA" in complaint(
        model_folder("llama"), device=device
    )


def test_auto_picks_bfloat16_on_cuda_and_float32_on_a_cpu():
    assert pick_dtype("auto", torch.device("cpu")) == torch.float32
    assert pick_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


# -------------------------------------------------------------------------------------- target modules


def test_targets_are_found_in_every_layer(backbone):
    found = backbone.linear_layers(["q_proj", "mlp.down_proj"])
    assert list(found) == [
        f"model.layers.{n}.{name}" for n in range(2) for name in ("self_attn.q_proj", "mlp.down_proj")
    ]


@pytest.mark.parametrize("target", ["query", "proj", "q_proj.weight"])
def test_target_that_matches_nothing_lists_the_linear_layers(backbone, target):
    with pytest.raises(UserError) as caught:
        backbone.linear_layers(["v_proj", target])
    message = str(caught.value)
    assert f"experts.target_modules: {target!r} matches no layer" in message
    assert "down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj" in message


def test_target_that_is_not_linear_is_a_user_error(backbone):
    with pytest.raises(UserError, match=r"model\.layers\.0\.self_attn is a LlamaAttention, not a linear layer"):
        backbone.linear_layers(["self_attn"])


# -------------------------------------------------------------------------------------- frozen weights


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_frozen_and_the_model_does_not_drop_out(backbone_of, family):
    model = backbone_of(family).model
    assert not any(p.requires_grad for p in model.parameters())
    assert not any(m.training for m in model.modules())


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"])
@pytest.mark.parametrize("bit", [0, 15, 31])
def test_one_flipped_bit_changes_the_hash_and_flipping_it_back_restores_it(backbone, name, bit):
    before = weights_hash(backbone.model)
    bits = backbone.model.get_parameter(name).data.view(torch.int32).view(-1)
    mask = torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
    bits[len(bits) // 2] ^= mask
    try:
        assert weights_hash(backbone.model) != before
    finally:
        bits[len(bits) // 2] ^= mask
    assert weights_hash(backbone.model) == before == backbone.weights_hash


def test_two_swapped_weights_change_the_hash(backbone):
    before = weights_hash(backbone.model)
    row = backbone.model.get_parameter("model.layers.0.mlp.up_proj.weight").data[3]
    assert row[0] != row[5]
    row[[0, 5]] = row[[5, 0]]
    try:
        assert weights_hash(backbone.model) != before
    finally:
        row[[0, 5]] = row[[5, 0]]
    assert weights_hash(backbone.model) == before


def test_hash_counts_every_position_of_a_large_weight():
    layer = torch.nn.Linear(70_000, 1, bias=False)
    hashes = {weights_hash(layer)}
    for position in (0, 65_520, 65_521, 69_999):  # 65521 is the modulus of the position's weight
        layer.weight.data[0, position] += 1
        hashes.add(weights_hash(layer))
    assert len(hashes) == 5


def test_the_name_of_a_model_does_not_depend_on_how_much_of_it_is_hashed_at_once(backbone, monkeypatch):
    monkeypatch.setattr(hashing, "_AT_ONCE", {"cpu": 1000})
    assert weights_hash(backbone.model, portable=True) == backbone.identity["backbone"]
    monkeypatch.setattr(hashing, "_AT_ONCE", {"cpu": 77})
    assert weights_hash(backbone.model, portable=True) == backbone.identity["backbone"]


def test_reloading_gives_the_same_hash_and_fingerprint(backbone, model_folder):
    again = load(model_folder("llama"))
    assert again.model is not backbone.model
    assert again.weights_hash == backbone.weights_hash
    assert again.fingerprint == backbone.fingerprint


def test_fingerprint_tells_weights_and_rendering_apart(backbone, model_folder, damaged):
    others = [load(model_folder("llama"), max_length=64), load(model_folder("llama"), pool="content")]
    assert all(other.weights_hash == backbone.weights_hash for other in others)
    weights = load_file(damaged / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, damaged / "model.safetensors", metadata={"format": "pt"})
    prints = [b.fingerprint for b in [backbone, *others, load(damaged)]]
    assert len(set(prints)) == len(prints)


# -------------------------------------------------------------------------------------- files that mean harm


def test_code_of_a_model_folder_never_runs_and_nobody_is_asked(damaged, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))
    (damaged / "own.py").write_text(f"open({str(damaged / 'ran')!r}, 'w')\n")
    for file, known in (("config.json", "AutoConfig"), ("tokenizer_config.json", "AutoTokenizer")):
        settings = json.loads((damaged / file).read_text())
        spoilt = settings | {"auto_map": {known: "own.Own", "AutoModelForCausalLM": "own.Own"}}
        spoilt |= {"model_type": "own", "tokenizer_class": "Own"}
        (damaged / file).write_text(json.dumps(spoilt))
        assert "cannot be loaded: " in complaint(damaged)
        (damaged / file).write_text(json.dumps(settings))
    assert not (damaged / "ran").exists()


def test_pickled_weights_are_refused_by_name(damaged):
    torch.save(load_file(damaged / "model.safetensors"), damaged / "pytorch_model.bin")
    (damaged / "model.safetensors").unlink()
    assert "pytorch_model.bin is a pickle, which can run code" in complaint(damaged)


def test_a_length_of_prompts_that_is_no_number_is_a_user_error(damaged):
    path = damaged / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": "long"}))
    assert "model_max_length in its tokenizer_config.json is 'long' and no number" in complaint(damaged)


@pytest.mark.parametrize(
    "announced",
    [
        {"vocab_size": 2**36},
        {"intermediate_size": 2**40},
        {"num_hidden_layers": 5000},
        {"num_hidden_layers": 2**30},
    ],
)
def test_sizes_beyond_the_files_are_refused_before_room_is_made(damaged, announced):
    config = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps(config | announced))
    assert "announces" in complaint(damaged)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_one_infinite_weight_is_refused_by_name(damaged, value):
    weights = load_file(damaged / "model.safetensors")
    weights["model.embed_tokens.weight"][-1, 3] = value
    save_file(weights, damaged / "model.safetensors", metadata={"format": "pt"})
    assert "model.embed_tokens.weight holds numbers that are not finite" in complaint(damaged)


def test_a_backbone_that_does_not_fit_one_card_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20 * 2**30, 24 * 2**30))
    card = torch.device("cuda", 0)
    check_room(20 * 2**30, card, "meta-llama/Llama-3.1-8B")
    with pytest.raises(UserError, match=r"takes 28.0 GiB, and cuda:0 has 20.0 of its 24.0 GiB free.*on one card"):
        check_room(28 * 2**30, card, "google/gemma-2-27b")
    check_room(28 * 2**30, torch.device("cpu"), "google/gemma-2-27b")


def test_a_window_that_is_in_masks_alone_is_as_far_as_a_model_goes(tokenizer, tmp_path):
    shape = {name: size for name, size in SHAPE.items() if name != "head_dim"}
    config = PhimoeConfig(vocab_size=len(tokenizer), sliding_window=20, num_local_experts=2, **shape, **SPECIAL)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert "set backbone.max_length=20 or less" in complaint(tmp_path)
    assert load(tmp_path, max_length=20).longest == 20


def test_positions_do_not_depend_on_the_longest_sequence_of_a_batch(tokenizer, tmp_path):
    """Phi-3 rotates otherwise beyond its first length: up to there it is the library's model, and no further."""
    factors = {"short_factor": [1.0, 1.1, 1.2], "long_factor": [4.0, 5.0, 6.0]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, **factors}
    config = FAMILIES["phi3"](len(tokenizer))
    config.original_max_position_embeddings = 64
    config.rope_parameters = {**rope, "original_max_position_embeddings": 64}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert "set backbone.max_length=64 or less" in complaint(tmp_path)
    backbone = load(tmp_path, max_length=64)
    assert backbone.longest == 64 == backbone.longest_prompt(0)
    rng = np.random.default_rng(0)
    short, long = (rng.integers(4, 100, n).astype(np.int32) for n in (20, 90))
    with torch.no_grad():
        alone = backbone.hidden(pack([[short]], backbone.device))
        beside = backbone.hidden(pack([[long, short]], backbone.device))[90:]
        own = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
        expected = own.base_model(torch.from_numpy(short).long()[None]).last_hidden_state[0]
    torch.testing.assert_close(alone, beside, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(alone, expected, atol=2e-5, rtol=1e-4)
    with pytest.raises(UserError, match="is more than the 64 tokens"):
        backbone.check_answer(65)
