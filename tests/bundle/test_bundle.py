"""Bundles: every expert is what PEFT loads, the whole is what was trained, and a damaged file is named."""

import shutil

import pytest
import torch

from fedweave.backbone import catalog
from fedweave.bundle.load import load_bundle
from fedweave.config import BackboneConfig
from fedweave.errors import UserError
from fedweave.router.mlp import sparsify
from fedweave.runs.use import export_run, load
from tests.helpers import PROMPTS, read_json, write_jsonl


def test_each_expert_loads_with_peft_and_gives_the_same_logits(bundle, model_folder):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    ours = load_bundle(bundle)
    experts = ours.mixture.layout.experts
    assert experts > 1
    encoded = ours.backbone.prompts.encode_prompts(PROMPTS[:1])[0]
    ids = torch.from_numpy(encoded.ids).long()[None]
    seen = []
    for m in range(experts):
        base = AutoModelForCausalLM.from_pretrained(model_folder("llama"), dtype=torch.float32)
        peft = PeftModel.from_pretrained(base, bundle / f"expert_{m}").eval()
        adapted = sum("lora_A" in name for name, _ in peft.named_parameters())
        assert adapted == len(ours.mixture.layout.names)
        gate = torch.nn.functional.one_hot(torch.tensor([m]), experts).float()
        weights = ours.mixture.layout.views(ours.theta[None])
        with torch.no_grad(), ours.backbone.decoding() as model, ours.mixture.active(weights, gate[:, None]):
            mine = model(ids).logits
        with torch.no_grad():
            theirs = peft(ids).logits
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
        seen.append(theirs)
    assert not torch.allclose(seen[0], seen[1], atol=1e-3), "experts that are all alike would test nothing"


def test_a_bundle_answers_exactly_like_its_run(trained, bundle):
    from_run, from_bundle = load(trained), load(bundle)
    assert torch.equal(from_run.theta, from_bundle.theta) and torch.equal(
        from_run.experts.phi, from_bundle.experts.phi
    )
    for routing in ("sparse", "soft"):
        a, b = (model.generate(PROMPTS, routing, max_new_tokens=6) for model in (from_run, from_bundle))
        assert a == b
    assert sparsify(from_bundle.route(PROMPTS), "sparse").sum() == len(PROMPTS)


def test_bundle_holds_what_it_promises(bundle, trained, says, complains):
    description = read_json(bundle / "fedweave.json")
    tokenizer = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    experts = [f"expert_{m}/{file}" for m in range(description["experts"])
               for file in ("adapter_config.json", "adapter_model.safetensors", *tokenizer)]  # fmt: skip
    assert set(description["files"]) == {"router.safetensors", *experts, *tokenizer}
    assert {p.stat().st_mode & 0o777 for p in bundle.rglob("*.safetensors")} == {
        (bundle / "README.md").stat().st_mode & 0o777
    }
    card = (bundle / "README.md").read_text()
    assert "PeftModel.from_pretrained" in card and "vllm serve" in card and "| Edit |" in card
    says("generate", bundle, "How many?", "--max-new-tokens", "2")
    assert "exists" in complains("export", trained, bundle)


@pytest.mark.parametrize(
    "name", ["router.safetensors", "expert_1/adapter_model.safetensors", "expert_0/adapter_config.json"]
)
@pytest.mark.parametrize("damage", ["missing", "truncated", "tampered"])
def test_a_damaged_bundle_is_refused_by_name(bundle, name, damage):
    path = bundle / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content[:-4] if damage == "truncated" else content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match=name):
        load_bundle(bundle)


def test_an_edited_card_is_the_users_own_affair(bundle):
    (bundle / "README.md").write_text("# Our model")
    assert load_bundle(bundle).generate(["How many?"], max_new_tokens=2)
    (bundle / "README.md").unlink()
    load_bundle(bundle)


def test_another_backbone_is_refused(bundle, model_folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(model_folder("llama"), other)
    weights = other / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8] + b"\x00" * 8)
    with pytest.raises(UserError, match=r"another backbone.*name the one that was: --backbone"):
        load_bundle(bundle, model=str(other))


def test_a_packaged_backbone_is_named_as_the_remedy(monkeypatch, tmp_path):
    """A bundle trained offline, once the original checkpoint lies in the hub's cache."""
    monkeypatch.setattr(catalog, "CACHE", tmp_path)
    default = BackboneConfig().model
    assert "--backbone FOLDER" in catalog.other_weights(default)
    kept = catalog._unpacked(catalog.PACKAGED[default])
    kept.parent.mkdir(parents=True)
    kept.touch()
    assert f"--backbone {kept}" in catalog.other_weights(default)


def test_every_verb_finds_a_backbone_that_moved(bundle, trained, model_folder, tmp_path, says, complains):
    moved, gone = shutil.copytree(model_folder("llama"), tmp_path / "moved"), tmp_path / "gone"
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "How many?", "response": "7"}])
    for verb in (
        ["generate", bundle, "How many?", "--max-new-tokens", "4"],
        ["evaluate", bundle, "--data", rows, "evaluation.max_new_tokens=4", "--quiet"],
        ["describe", bundle, "--data", rows, "--quiet"],
        ["export", trained, tmp_path / "more"],
        ["export", trained, tmp_path / "dense", "--merge", "0"],
        ["export", bundle, tmp_path / "denser", "--merge", "0"],
    ):
        assert str(gone) in complains(*verb, "--backbone", gone), verb
        says(*verb, "--backbone", moved)
    for path in [*(tmp_path / "more").rglob("*"), *(tmp_path / "dense").rglob("*")]:
        if path.suffix in (".md", ".json"):
            assert str(tmp_path) not in path.read_text(), path


def test_a_bundle_finds_its_backbone_here_and_tells_nobody_where(trained, model_folder, tmp_path, monkeypatch):
    bundle = tmp_path / "bundle"
    export_run(trained, bundle)
    name = model_folder("llama").name
    assert read_json(bundle / "fedweave.json")["backbone"]["model"] == name
    assert load_bundle(bundle).backbone.name == str(model_folder("llama"))
    monkeypatch.setattr(catalog, "CACHE", tmp_path / "elsewhere")
    with pytest.raises(UserError, match=f"backbone is {name}, .* not known; name it: --backbone .* model="):
        load_bundle(bundle)
    load_bundle(bundle, model=str(model_folder("llama")))


def test_a_path_in_a_bundle_of_an_earlier_version_still_leads_there(tmp_path):
    assert catalog.where_it_lies(str(tmp_path), "0" * 32) == str(tmp_path)
    assert catalog.where_it_lies("owner/name", "0" * 32) == "owner/name"
    with pytest.raises(UserError, match="backbone is gone, "):
        catalog.where_it_lies(str(tmp_path / "gone"), "../../0")


def test_others_read_a_name_and_never_a_path(trained, tmp_path):
    export_run(trained, tmp_path / "named", base="me/tiny-llama")
    assert "base_model: me/tiny-llama" in (tmp_path / "named" / "README.md").read_text()
    adapter = read_json(tmp_path / "named" / "expert_0" / "adapter_config.json")
    assert adapter["base_model_name_or_path"] == "me/tiny-llama"
    assert catalog.public_name("/data/models/My-Model.Q4_1.gguf") == "My-Model.Q4_1.gguf"
    assert catalog.public_name("owner/name") == "owner/name"


def test_local_only_has_nothing_to_export(tiny_run, tmp_path):
    run = tiny_run("method=local-only", "experts.single_rank=4", "training.rounds=1")
    with pytest.raises(UserError, match="every client"):
        export_run(run, tmp_path / "bundle")


def test_one_tokenizer_lies_under_many_names(exported):
    places = {(exported / folder / "tokenizer.json").stat().st_ino for folder in (".", "expert_0", "expert_1")}
    assert len(places) == 1


def test_where_and_how_it_computes_can_be_said(bundle, trained):
    for folder in (bundle, trained):
        assert "float32 on cpu" in repr(load(folder, device="cpu", dtype="float32"))
        with pytest.raises(UserError, match=r"backbone\.dtype"):
            load(folder, device="cpu", dtype="int8")


def test_a_pipeline_needs_an_experts_folder_alone(trained, tmp_path, model_folder):
    """The adapter, the backbone that it names, and, said by name, the tokenizer with the template of training."""
    from transformers import pipeline

    export_run(trained, tmp_path / "bundle", base=str(model_folder("llama")))
    expert = str(tmp_path / "bundle" / "expert_1")
    pipe = pipeline("text-generation", model=expert, tokenizer=expert, device="cpu")
    ours = load(tmp_path / "bundle", device="cpu")
    for prompt in PROMPTS:
        (chat,) = pipe([[{"role": "user", "content": prompt}]], max_new_tokens=12, do_sample=False)
        said = chat[0]["generated_text"][-1]["content"].strip()
        expected = ours.generate([prompt], adapter="expert_1", max_new_tokens=12)[0].text
        assert said.rstrip("\ufffd") == expected.rstrip("\ufffd")
