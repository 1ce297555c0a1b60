"""GGUF files as export writes them, read back by transformers, which puts q and k into their order by itself."""

import json
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers

from fedweave.backbone.gguf import SPLITTERS, build_tokenizer, word_splitter
from fedweave.backbone.load import load_backbone
from fedweave.backbone.packing import pack
from fedweave.backbone.prompts import PromptFormat
from fedweave.backbone.quantised import unpack
from fedweave.bundle.adapter import probe
from fedweave.bundle.gguf_model import QUANTISATIONS, reordered, rotary_factors, write_model
from fedweave.bundle.gguf_tokens import write_tables
from fedweave.bundle.load import load_bundle
from fedweave.bundle.programs import write_gguf
from fedweave.config import BackboneConfig
from fedweave.errors import UserError
from fedweave.inference.model import FedWeaveModel
from fedweave.runs.use import export_as


def arrays(path) -> dict[str, np.ndarray]:
    return {t.name: dequantize(t.data, t.tensor_type) for t in GGUFReader(str(path)).tensors}


def logits_of(gguf, like: FedWeaveModel) -> torch.Tensor:
    """Of the probe, by the model in a file as `backbone.model=FILE.gguf` loads it."""
    backbone = load_backbone(BackboneConfig(model=str(gguf), device="cpu", max_length=128, prompt="plain"))
    assert backbone.tokenizer.get_vocab() == like.backbone.tokenizer.get_vocab()
    return probe(FedWeaveModel(backbone, like.mixture, like.experts))


def close(found: torch.Tensor, expected: torch.Tensor, limit: float) -> bool:
    return ((found - expected).norm() / expected.norm()).item() < limit


@pytest.fixture(scope="module")
def written(exported, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf") / "F32"
    export_as(partial(write_gguf, quantisation="F32"), exported, folder)
    return folder


def test_a_folder_for_llama_cpp_has_the_backbone_and_every_expert(exported, written):
    ours = load_bundle(exported)
    experts = ours.experts.adapter_names
    files = {"base-F32.gguf", "README.md", *(f"{n}.{e}" for n in experts for e in ("gguf", "Modelfile"))}
    assert {path.name for path in written.iterdir()} == files
    assert close(logits_of(written / "base-F32.gguf", ours), probe(ours), 0.02)  # it loads in bfloat16


def test_an_expert_added_to_the_files_own_weights_is_the_expert(exported, written, tmp_path):
    """What llama.cpp does with a LoRA file: W + alpha / r · B A, in the order of rows that the file has."""
    ours = load_bundle(exported)
    for m in range(ours.mixture.layout.experts):
        lora = GGUFReader(str(written / f"expert_{m}.gguf"))
        facts = {name: lora.fields[name].contents() for name in ("general.type", "general.architecture")}
        assert facts == {"general.type": "adapter", "general.architecture": "llama"}
        alpha, factors = lora.fields["adapter.lora.alpha"].contents(), arrays(written / f"expert_{m}.gguf")
        both = tmp_path / f"{m}.gguf"
        shutil.copy(written / "base-F32.gguf", both)
        changed = GGUFReader(str(both), "r+")
        layers = {name.removesuffix(".lora_a") for name in factors if name.endswith("_a")}
        for tensor in changed.tensors:
            if tensor.name in layers:
                a, b = factors[f"{tensor.name}.lora_a"], factors[f"{tensor.name}.lora_b"]
                tensor.data[:] += alpha / len(a) * b @ a
                layers.remove(tensor.name)
        changed.data.flush()
        assert not layers
        gates = ours.experts.only(f"expert_{m}")[1]
        assert close(logits_of(both, ours), probe(ours, gates), 0.02)
        assert not close(probe(ours), probe(ours, gates), 0.1)


@pytest.mark.parametrize(("kind", "limit"), [("Q8_0", 0.05), ("Q4_0", 0.4), ("BF16", 0.03)])
def test_a_merged_model_is_the_expert_up_to_quantisation(exported, tmp_path, kind, limit):
    export_as(partial(write_gguf, quantisation=kind, expert=1), exported, tmp_path / "out")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        f"expert_1-{kind}.gguf", "expert_1.Modelfile", "README.md"
    }  # fmt: skip
    ours = load_bundle(exported)
    expected = probe(ours, ours.experts.only("expert_1")[1])
    assert close(logits_of(tmp_path / "out" / f"expert_1-{kind}.gguf", ours), expected, limit)


def test_llamas_queries_and_keys_change_their_order_and_nothing_else(backbone_of):
    config = backbone_of("llama").model.config
    rows = torch.arange(32)[:, None]  # 4 heads of 8, or 2 of 8 and as many again
    assert reordered("model.layers.0.self_attn.q_proj.weight", rows, config)[:8, 0].tolist() == [
        0,
        4,
        1,
        5,
        2,
        6,
        3,
        7,
    ]
    assert reordered("x.k_proj.weight", rows[:16], config)[8:, 0].tolist() == [8, 12, 9, 13, 10, 14, 11, 15]
    for name in ("x.v_proj.weight", "x.o_proj.weight", "x.up_proj.weight"):
        assert torch.equal(reordered(name, rows, config), rows)
    for family in ("qwen2", "gemma2", "gemma3"):
        assert torch.equal(reordered("x.q_proj.weight", rows, backbone_of(family).model.config), rows)


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_families_come_back(backbone_of, tmp_path, family):
    backbone = backbone_of(family)
    write_model(tmp_path / "model.gguf", backbone, "F32", "tiny")
    found = load_backbone(BackboneConfig(model=str(tmp_path / "model.gguf"), device="cpu", max_length=128))
    ids = np.arange(4, 12, dtype=np.int32)  # within a window
    mine, theirs = (b.logits(b.hidden(pack([[ids]], b.device))) for b in (backbone, found))
    assert close(theirs, mine, 0.02)  # it is kept in bfloat16
    assert found.longest == (8 if family == "mistral" else 512)  # beyond its window llama.cpp would attend


def test_an_output_layer_of_its_own_goes_with_the_file(model_folder, tmp_path):
    """The config says that it is the embedding; transformers believes the weights, where both are there."""
    folder = shutil.copytree(model_folder("llama"), tmp_path / "llama")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    backbone = load_backbone(BackboneConfig(model=str(folder), device="cpu", max_length=128))
    write_model(tmp_path / "model.gguf", backbone, "F32", "tiny")
    np.testing.assert_array_equal(arrays(tmp_path / "model.gguf")["output.weight"], backbone.head.numpy())
    unpack(backbone.model)  # as a merge does
    assert torch.equal(backbone.model.get_output_embeddings().weight, backbone.head)
    with pytest.raises(UserError, match="set tie_word_embeddings=false"):
        load_backbone(BackboneConfig(model=str(folder), device="cpu", max_length=128, weights="nf4"))


def test_norms_of_heads_go_with_the_file(backbone_of, tmp_path):
    """transformers takes every Qwen3 file for one with heads of 128, so the file itself is read."""
    write_model(tmp_path / "model.gguf", backbone_of("qwen3"), "F32", "tiny")
    found, own = arrays(tmp_path / "model.gguf"), backbone_of("qwen3").model.state_dict()
    for name, part in (("q_norm", "attn_q_norm"), ("k_norm", "attn_k_norm"), ("q_proj", "attn_q")):
        expected = own[f"model.layers.1.self_attn.{name}.weight"].numpy()
        np.testing.assert_array_equal(found[f"blk.1.{part}.weight"].reshape(expected.shape), expected)
    assert len(found) == len(own) - backbone_of("qwen3").model.config.tie_word_embeddings


def test_stretched_positions_go_with_the_file(backbone_of):
    """Llama 3 slows the slow rotations down by a factor that llama.cpp divides by."""
    from transformers import LlamaConfig, LlamaForCausalLM

    assert rotary_factors(backbone_of("llama").model) is None
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, rope_parameters=rope, **shape))
    factors = rotary_factors(model)
    plain = 1e4 ** -(np.arange(8) / 8)
    np.testing.assert_allclose(plain / factors, model.base_model.rotary_emb.inv_freq.numpy(), rtol=1e-5)
    assert factors[0] == pytest.approx(1.0) and factors[-1] == pytest.approx(8.0)
    model.config.rope_parameters = {**rope, "rope_type": "yarn"}
    model.base_model.rotary_emb.attention_scaling = 1.2
    with pytest.raises(UserError, match=r"'yarn' in llama as GGUF; .* convert_hf_to_gguf\.py"):
        rotary_factors(model)


# -------------------------------------------------------------------------------------- tokenizers


def tables_of(prompts: PromptFormat, path, rows=None):
    writer = GGUFWriter(str(path), "llama")
    write_tables(writer, prompts, rows or len(prompts.tokenizer))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return build_tokenizer(path), GGUFReader(str(path))


TEXTS = ["Fix the grammar: Ada go.", " 3 + 41 = 44\n\n", "it's IT'S été 年", "<|start|>user\nHow many?<|end|>\n"]


@pytest.mark.parametrize("kind", ["plain", "chat"])
def test_a_byte_level_tokenizer_comes_back(tokenizer, chat_tokenizer, tmp_path, kind):
    prompts = PromptFormat(chat_tokenizer if kind == "chat" else tokenizer, BackboneConfig(prompt=kind))
    found, reader = tables_of(prompts, tmp_path / "t.gguf", len(tokenizer) + 3)
    for text in TEXTS:
        expected = prompts.tokenizer(text)["input_ids"]
        assert found(text)["input_ids"] == expected and found.decode(expected) == text
    (ids,) = (p.ids.tolist() for p in prompts.encode_prompts(["How many?"]))
    turns = [{"role": "user", "content": "How many?"}]
    assert found.apply_chat_template(turns, add_generation_prompt=True, return_dict=False) == ids
    ends = {name: reader.fields[f"tokenizer.ggml.{name}_token_id"].contents() for name in ("eos", "eot")}
    assert ends == {"eos": prompts.end_id, "eot": tokenizer.eos_token_id}
    assert found.convert_ids_to_tokens(len(tokenizer) + 2) == f"[PAD{len(tokenizer) + 2}]"


@pytest.mark.parametrize("rule", SPLITTERS)
def test_every_rule_for_splitting_words_is_known_again(tokenizer, tmp_path, rule):
    from transformers import PreTrainedTokenizerFast

    own = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer._tokenizer.to_str()), eos_token="<eos>"
    )
    own._tokenizer.pre_tokenizer = word_splitter(rule)
    found, reader = tables_of(PromptFormat(own, BackboneConfig(prompt="plain")), tmp_path / "t.gguf")
    assert reader.fields["tokenizer.ggml.pre"].contents() == rule
    for text in TEXTS:
        assert found(text)["input_ids"] == own(text)["input_ids"]


def sentencepiece(prefix: bool) -> Tokenizer:
    """A BPE of pieces with bytes for the rest, as Llama 2 (which puts a blank first) and Gemma have."""
    marks, letters = ["<unk>", "<s>", "</s>", "<0xC3>", "<0xA9>"], ["▁", "a", "b", "n"]
    merges = [("a", "n"), ("n", "a"), ("▁", "b"), ("▁b", "an"), ("an", "a"), ("▁ban", "ana")]
    words = [*marks, *letters, *("".join(pair) for pair in merges)]
    bpe = Tokenizer(
        models.BPE(
            {w: i for i, w in enumerate(words)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    steps = [normalizers.Prepend("▁")] if prefix else []
    bpe.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    bpe.add_special_tokens(marks[:3])
    return bpe


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_scores_are_the_order_of_merges(tmp_path, prefix):
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=sentencepiece(prefix), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    found, reader = tables_of(PromptFormat(fast, BackboneConfig(prompt="plain")), tmp_path / "t.gguf")
    fields = {
        name: reader.fields[f"tokenizer.ggml.{name}"].contents() for name in ("model", "scores", "token_type")
    }
    assert fields["model"] == "llama" and fields["token_type"][:6] == [2, 3, 3, 6, 6, 1]
    score = dict(zip(fast.convert_ids_to_tokens(list(range(len(fast)))), fields["scores"], strict=True))
    assert score["an"] > score["na"] > score["▁b"] > score["▁ban"] > score["ana"] > score["▁banana"]
    assert reader.fields["tokenizer.ggml.add_space_prefix"].contents() is prefix
    if prefix:  # the reader takes a file without Gemma's marks for Llama's
        for text in ("banana", "nab an ban", "né"):
            assert found.tokenize(text) == fast.tokenize(text)


def test_a_rule_that_gguf_has_no_name_for_is_refused(tokenizer, tmp_path):
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    odd = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer._tokenizer.to_str()))
    odd.eos_token = "<eos>"
    odd._tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(UserError, match=r"a rule for splitting words .* convert_hf_to_gguf\.py"):
        tables_of(PromptFormat(odd, BackboneConfig(prompt="plain")), tmp_path / "t.gguf")


# -------------------------------------------------------------------------------------- the command


def test_the_command_writes_and_refuses(exported, tmp_path, says, complains):
    says("export", exported, tmp_path / "q", "--format", "gguf", "--quantise", "Q5_1", "--merge", "0")
    assert (tmp_path / "q" / "expert_0-Q5_1.gguf").is_file()
    before = set(tmp_path.iterdir())
    for arguments, message in (
        (["--format", "gguf", "--quantise", "Q6_K"], f"there are {', '.join(QUANTISATIONS)}"),
        (["--format", "gguf", "--merge", "99"], "there is no expert 99"),
        (["--format", "gguf", "--soft", "1"], "writes experts or --merge K"),
        (["--format", "mlx", "--merge", "0"], "--format mlx writes experts"),
        (["--format", "gguf", "--doubt", "2"], "--doubt is for bundles"),
        (["--quantise", "Q8_0"], "no effect without --format gguf"),
    ):
        assert message in complains("export", exported, tmp_path / "no", *arguments)
    assert set(tmp_path.iterdir()) == before
    card = (tmp_path / "q" / "README.md").read_text()
    assert "llama-server -m expert_0-Q5_1.gguf\n" in card and "Ada go to school.\n\nResponse:\n" in card
    assert json.dumps("PATH") not in card
