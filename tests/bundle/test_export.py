"""What export writes besides the bundle, and what it checks before a folder gets its name."""

import copy
import json
import shutil
from functools import partial

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from fedweave.backbone.prompts import PromptFormat
from fedweave.bundle.adapter import check_adapter, probe
from fedweave.bundle.card import vllm_command
from fedweave.bundle.export import write_merged, write_soft
from fedweave.bundle.load import load_bundle
from fedweave.bundle.tokens import write_tokenizer
from fedweave.cli import main
from fedweave.config import BackboneConfig
from fedweave.data.examples import Example
from fedweave.errors import UserError
from fedweave.federation.checkpoint import save_checkpoint
from fedweave.runs.folder import RunFolder
from fedweave.runs.use import export_as
from tests.helpers import PROMPTS, read_json, write_jsonl


def one_hot(expert: int, experts: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(expert), experts).float()


def test_a_merged_model_is_the_backbone_with_one_expert(bundle, tmp_path):
    assert main(["export", str(bundle), str(tmp_path / "dense"), "--merge", "1"]) == 0
    ours = load_bundle(bundle)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "dense")
    for prompt in PROMPTS:
        answer = ours.generate([prompt], max_new_tokens=6)[0]
        if answer.expert == 1:
            ids = tokenizer(f"{prompt}\n\nResponse:", return_tensors="pt").input_ids
            out = dense.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
            assert tokenizer.decode(out, skip_special_tokens=True).strip() == answer.text
    ours.backbone.model = dense.eval()
    torch.testing.assert_close(
        probe(ours), probe(load_bundle(bundle), one_hot(1, ours.mixture.layout.experts)), atol=1e-4, rtol=1e-4
    )
    assert not (tmp_path / "dense" / "adapter_config.json").exists()


@pytest.mark.parametrize("begins", [False, True])
def test_the_shipped_template_renders_what_training_rendered(tokenizer, tmp_path, begins):
    """Whatever is said by whom, to the token; with a tokenizer that begins texts with a mark of its own, too."""
    tokenizer = copy.deepcopy(tokenizer)
    if begins:
        tokenizer.bos_token = "<pad>"
        mark = ("<pad>", tokenizer.pad_token_id)
        tokenizer._tokenizer.post_processor = TemplateProcessing(single="<pad> $A", special_tokens=[mark])
    prompts = PromptFormat(tokenizer, BackboneConfig(prompt="plain"))
    assert write_tokenizer(tmp_path, prompts)
    shipped = AutoTokenizer.from_pretrained(tmp_path)
    speak = [("system", "Be brief."), ("user", " Dan has\n\n3 coins. "), ("assistant", "And?"), ("tool", "4"),
             ("system", "Now."), ("user", "How many?\n")]  # fmt: skip
    for turns in (speak[:2], speak[1:2], speak[:4], speak, [("user", "{{ eos_token }} 'x'")]):
        chat = tuple({"role": role, "content": text} for role, text in turns)
        ids = shipped.apply_chat_template(list(chat), add_generation_prompt=True, return_dict=False)
        assert ids == prompts.encode_prompts([chat])[0].ids.tolist()
    row = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "7"}]
    (trained,) = prompts.encode([Example("How many?", "7", "sum", "here:1")])
    assert shipped.apply_chat_template(row, return_dict=False) == trained.ids.tolist()


def test_a_tokenizer_without_a_faithful_template_ships_none(tokenizer, tmp_path):
    odd = copy.deepcopy(tokenizer)
    mark = ("<eos>", odd.eos_token_id)
    odd._tokenizer.post_processor = TemplateProcessing(single="$A <eos>", special_tokens=[mark])
    assert not write_tokenizer(tmp_path, PromptFormat(odd, BackboneConfig(prompt="plain")))
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template is None


def test_the_code_of_the_cards_gives_the_models_answers(bundle, tmp_path, model_folder):
    """The card's own code, run: for a merged model and for an adapter."""
    export_as(partial(write_merged, expert=1), bundle, tmp_path / "dense")
    ours = load_bundle(bundle)
    expected = ours.generate(["Fix the grammar: Ada go to school."], adapter="expert_1", max_new_tokens=64)[0].text
    base = AutoModelForCausalLM.from_pretrained(model_folder("llama"), dtype=torch.float32)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    for folder, model in (
        (tmp_path / "dense", dense),
        (bundle, PeftModel.from_pretrained(base, bundle / "expert_1")),
    ):
        card = (folder / "README.md").read_text()
        section = card[card.index("## How a prompt looks") :]
        assert "Fix the grammar: Ada go to school.\n\nResponse:\n```" in section
        code = section.split("```python\n")[1].split("```")[0].replace("PATH", str(folder))
        found = {"model": model}
        exec(code, found)
        assert found["answer"].rstrip("\ufffd").strip() == expected  # theirs may end within a character
    assert dense.generation_config.eos_token_id == ours.backbone.end_ids


def test_a_fixed_mixture_is_one_adapter_of_rank_m_times_r(trained, bundle, tmp_path, model_folder):
    ours = load_bundle(bundle)
    experts = ours.mixture.layout.experts
    weights = torch.linspace(1, 2, experts).softmax(0)
    export_as(partial(write_soft, weights=weights.tolist()), trained, tmp_path / "soft")
    config = read_json(tmp_path / "soft" / "adapter_config.json")
    assert config["r"] == ours.mixture.layout.rank * experts
    base = AutoModelForCausalLM.from_pretrained(model_folder("llama"), dtype=torch.float32)
    expected = probe(ours, weights)
    ours.backbone.model = PeftModel.from_pretrained(base, tmp_path / "soft").eval()
    torch.testing.assert_close(probe_of(ours), expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def probe_of(model):
    """`probe` through a PEFT wrapper, whose attention was never exchanged."""
    return model.backbone.model(probe_ids(model)).logits[0]


def probe_ids(model) -> torch.Tensor:
    """[1, tokens]"""
    from fedweave.bundle.adapter import _PROBE

    return torch.from_numpy(model.backbone.prompts.encode_prompts([_PROBE])[0].ids).long()[None]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--merge", "99"], "there is no expert 99"),
        (["--soft", "0.5"], "weights, one per expert"),
        (["--soft", "a,b"], "not a list of weights"),
        (["--soft", "EVEN+1"], "sum to 1"),
    ],
)
def test_wrong_exports_are_one_sentence_and_leave_nothing(trained, bundle, tmp_path, complains, arguments, message):
    experts = load_bundle(bundle).mixture.layout.experts
    arguments = [a.replace("EVEN+1", ",".join(["1"] * experts)) for a in arguments]
    before = set(tmp_path.iterdir())
    assert message in complains("export", trained, tmp_path / "out", *arguments)
    assert set(tmp_path.iterdir()) == before


def test_an_adapter_that_computes_something_else_is_caught(bundle):
    """Swapped factors, a wrong scale and keys that no layer answers to: what real loaders pass over in silence."""
    model = load_bundle(bundle)
    gates = one_hot(0, model.mixture.layout.experts)
    check_adapter(bundle / "expert_0", model, gates)
    with pytest.raises(UserError, match="other logits"):
        check_adapter(bundle / "expert_1", model, gates)
    config_file = bundle / "expert_0" / "adapter_config.json"
    config = read_json(config_file)
    config_file.write_text(json.dumps({**config, "lora_alpha": 3}))
    with pytest.raises(UserError, match="other logits"):
        check_adapter(bundle / "expert_0", model, gates)
    config_file.write_text(json.dumps({**config, "target_modules": ["q_proj"]}))
    with pytest.raises(UserError, match=r"adapts 2 layers of the model instead of 4"):
        check_adapter(bundle / "expert_0", model, gates)
    config_file.write_text(json.dumps(config))
    check_adapter(bundle / "expert_0", model, gates)  # nothing of the trials is left on the model


def test_an_export_that_is_not_finite_is_refused(trained, tmp_path):
    broken = shutil.copytree(trained, tmp_path / "run")
    newest = RunFolder(broken).newest()
    for name, tensor in newest.tensors.items():
        if name.endswith("theta"):
            tensor[0] = float("nan")
    save_checkpoint(newest.path.parent, newest.path.name, newest.tensors, newest.meta)
    with pytest.raises(UserError, match="NaN"):
        export_as(partial(write_merged, expert=0), broken, tmp_path / "dense")


def test_adapters_carry_what_vllm_asks_for(bundle, model_folder):
    """vLLM: peft_type LORA, the served model's very name, no bias, no modules to save, no variant, plain keys."""
    for folder in sorted(bundle.glob("expert_*")):
        config = read_json(folder / "adapter_config.json")
        assert config["peft_type"] == "LORA"
        assert config["base_model_name_or_path"] == model_folder("llama").name
        assert isinstance(config["r"], int) and isinstance(config["lora_alpha"], int)
        assert config["bias"] == "none" and not config["modules_to_save"]
        assert not config["use_dora"] and not config["use_rslora"]
        with safe_open(folder / "adapter_model.safetensors", "pt") as tensors:
            keys = set(tensors.keys())
            ranks = {tensors.get_slice(k).get_shape()[0] for k in keys if "lora_A" in k}
        assert ranks == {config["r"]}
        layers = {f"model.layers.{i}.self_attn.{p}" for i in range(2) for p in config["target_modules"]}
        assert keys == {f"base_model.model.{n}.lora_{f}.weight" for n in layers for f in "AB"}
    command = vllm_command("m", ["expert_0", "expert_1", "shared"], 4)
    assert "--max-lora-rank 8 " in command and "--max-loras 3" in command and "shared=PATH/shared" in command


def test_a_bundle_is_no_source_of_another(bundle, tmp_path, complains):
    assert f"{bundle} is a bundle already; --merge" in complains("export", bundle, tmp_path / "again")


def test_a_bundle_is_evaluated_on_a_file(trained, bundle, tmp_path, says, complains):
    rows = [{"prompt": p, "response": "Two plums", "task": t} for p, t in zip(PROMPTS, "aab", strict=True)]
    data = write_jsonl(tmp_path / "mine.jsonl", rows)
    options = ["--data", data, "evaluation.max_new_tokens=4", "--quiet"]
    tables = [says("evaluate", source, *options) for source in (trained, bundle)]
    assert tables[0] == tables[1] and "macro average" in tables[0]
    assert "--data" in complains("evaluate", bundle)
    assert "fixed for a bundle" in complains("evaluate", bundle, "--data", data, "training.rounds=3")


def test_a_full_disk_is_one_sentence_and_leaves_nothing(bundle, tmp_path, monkeypatch, complains):
    def full(*_):
        raise Exception("No space left on device (os error 28)")  # as the tokenizers package says it

    monkeypatch.setattr("fedweave.bundle.export.write_tokenizer", full)
    target = tmp_path / "full" / "dense"
    said = complains("export", bundle, target, "--merge", "0")
    assert f"{target} cannot be written: No space left on device" in said and not list(target.parent.iterdir())
