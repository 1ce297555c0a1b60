"""GGUF files: the converted model computes what the file holds, and the tokenizer splits as the file says."""

import copy
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from fedweave.backbone.catalog import locate
from fedweave.backbone.gguf import CACHE, build_tokenizer
from fedweave.backbone.load import load_backbone
from fedweave.config import BackboneConfig
from fedweave.errors import UserError

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
HEADS, KV_HEADS, WIDTH = 4, 2, 32
MERGES = ["1 2", "h e", "l l", "he ll", "hell o", "Ġ hello"]
TOKENS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>",
    *sorted(pre_tokenizers.ByteLevel.alphabet()), *(m.replace(" ", "") for m in MERGES),
]  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def original() -> LlamaForCausalLM:
    """Weights that bfloat16 can hold, so that converting them loses nothing."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=256,
        rms_norm_eps=1e-5, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((4 * p if p.ndim == 2 else p).bfloat16())
    return model


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """The order of rows in which llama.cpp keeps the queries and keys of rotary attention."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, model, pre="smollm"):
    """A F32 GGUF file as llama.cpp's converter lays it out."""
    out = GGUFWriter(str(path), "llama")
    out.add_context_length(256)
    out.add_embedding_length(WIDTH)
    out.add_block_count(2)
    out.add_feed_forward_length(64)
    out.add_rope_dimension_count(WIDTH // HEADS)
    out.add_rope_freq_base(10000.0)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KV_HEADS)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_vocab_size(len(TOKENS))
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre(pre)
    out.add_token_list(TOKENS)
    out.add_token_types([CONTROL if t.startswith("<|") else NORMAL for t in TOKENS])
    out.add_token_merges(MERGES)
    out.add_bos_token_id(1)
    out.add_eos_token_id(0)  # not the token that ends a turn
    out.add_chat_template(TEMPLATE)
    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, tensor in model.state_dict().items():
        module, array = name.removesuffix(".weight"), tensor.numpy()
        if layer := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module):
            module = f"blk.{layer[1]}.{names[layer[2]]}"
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(module.split(".")[-1])
            array = permute(array, heads) if heads else array
        out.add_tensor(f"{outer.get(module, module)}.weight", np.ascontiguousarray(array))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def load(path):
    return load_backbone(BackboneConfig(model=str(path), device="cpu", max_length=128))


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory, original):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", original)


@pytest.fixture(scope="module")
def converted(gguf_file):
    return load(gguf_file)


def test_logits_equal_those_of_the_model_that_was_written(converted, original):
    ids = torch.randint(0, len(TOKENS), (3, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), converted.decoding() as model:
        got, expected = model(input_ids=ids).logits, original(input_ids=ids).logits
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_an_answer_ends_at_the_end_of_a_turn_as_the_template_says(converted):
    assert converted.tokenizer.eos_token == "<|im_end|>"
    assert converted.prompts.end_id == TOKENS.index("<|im_end|>")
    assert converted.model.config.eos_token_id == converted.tokenizer.eos_token_id
    assert converted.tokenizer.pad_token == "<|endoftext|>"


def test_smollm_splits_digits_one_by_one_although_a_merge_joins_them(converted):
    assert converted.tokenizer.tokenize("12 hello") == ["1", "2", "Ġhello"]


def test_plain_gpt2_rule_keeps_digits_together(tmp_path, original):
    tokenizer = build_tokenizer(write_gguf(tmp_path / "gpt2.gguf", original, pre="gpt-2"))
    assert tokenizer.tokenize("12 hello") == ["12", "Ġhello"]


def test_control_tokens_stay_whole_and_text_survives_a_round_trip(converted):
    text = "<|im_start|>user\nné 12<|im_end|>"
    ids = converted.tokenizer(text)["input_ids"]
    assert (ids[0], ids[-1]) == (1, 2)
    assert converted.tokenizer.decode(ids) == text


def test_second_load_takes_the_converted_folder(converted, gguf_file, capfd):
    folder = Path(locate(str(gguf_file), None).path)
    before = {p.name: p.stat().st_mtime_ns for p in [folder, *folder.iterdir()]}
    again = load(gguf_file)
    assert {p.name: p.stat().st_mtime_ns for p in [folder, *folder.iterdir()]} == before
    assert "Converting" not in capfd.readouterr().err
    assert again.fingerprint == converted.fingerprint
    assert not list(folder.parent.glob("*.partial"))


def test_a_conversion_says_one_line_where_nobody_looks(tmp_path, original, capfd):
    write_gguf(tmp_path / "quiet.gguf", original)
    load(tmp_path / "quiet.gguf")
    assert capfd.readouterr().err == "Converting quiet.gguf once, for this and all later runs.\n"


def test_changed_file_of_the_same_name_is_converted_anew(converted, tmp_path, original):
    changed = copy.deepcopy(original)
    with torch.no_grad():
        changed.lm_head.weight[0, 0] += 1
    assert load(write_gguf(tmp_path / "tiny.gguf", changed)).weights_hash != converted.weights_hash


def test_missing_file_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match=r"nothing\.gguf: there is no such GGUF file"):
        load(tmp_path / "nothing.gguf")


@pytest.mark.parametrize("content", [b"", b"no model at all " * 100, b"GGUF" + bytes(200)])
def test_garbage_is_a_user_error_that_names_the_file_and_leaves_nothing(tmp_path, content):
    path = tmp_path / "garbage.gguf"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"garbage\.gguf cannot be read as a GGUF language model"):
        load(path)
    assert not list((CACHE / "models").glob("garbage*"))


def test_unknown_pre_tokenizer_is_a_user_error_that_names_it(tmp_path, original):
    with pytest.raises(UserError, match="'deepseek-llm' is not supported"):
        load(write_gguf(tmp_path / "other.gguf", original, pre="deepseek-llm"))


def test_unknown_tokenizer_model_is_a_user_error_that_names_it(tmp_path):
    with pytest.raises(UserError, match="'rwkv' is not supported"):
        build_tokenizer(write_pieces(tmp_path, PIECES, model="rwkv"))


# -------------------------------------------------------------------------------------- SentencePiece

SPECIAL = ["<unk>", "<s>", "</s>", "<0xC3>", "<0xA9>"]
WORDS = ["▁", "a", "b", "n", "na", "an", "▁b", "ban", "ana", "▁ban", "nana", "▁banana"]
PIECES = [*SPECIAL, *WORDS]


def write_pieces(folder, pieces, model="llama", bos=None, template=""):
    """A GGUF file with nothing but a table of pieces; an earlier word scores higher."""
    path = folder / "pieces.gguf"
    out = GGUFWriter(str(path), "llama")
    out.add_tokenizer_model(model)
    out.add_token_list(pieces)
    out.add_token_scores([-float(i) for i in range(len(pieces))])
    kinds = {"<unk>": UNKNOWN, "<0xC3>": BYTE, "<0xA9>": BYTE}
    out.add_token_types([kinds.get(t, CONTROL if t.startswith("<") else NORMAL) for t in pieces])
    out.add_unk_token_id(0)
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    if bos is not None:
        out.add_add_bos_token(bos)
    if template:
        out.add_chat_template(template)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.close()
    return path


def highest_score_first(text):
    """SentencePiece's own rule: join the neighbours whose union scores highest, until none is a piece."""
    parts = list("▁" + text.replace(" ", "▁"))
    while joins := [(PIECES.index(a + b), i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in PIECES]:
        i = min(joins)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


@pytest.mark.parametrize("text", ["banana", "nab", "an ban", "bananaban", "a  nana anab", "bnnaanabana"])
def test_pieces_are_joined_highest_score_first(tmp_path, text):
    assert build_tokenizer(write_pieces(tmp_path, PIECES)).tokenize(text) == highest_score_first(text)


def test_unknown_letters_fall_back_to_bytes_and_come_back(tmp_path):
    tokenizer = build_tokenizer(write_pieces(tmp_path, PIECES))
    assert tokenizer.tokenize("né") == ["▁", "n", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer("ban né", add_special_tokens=False)["input_ids"]) == "ban né"


@pytest.mark.parametrize(("flag", "starts"), [(None, True), (True, True), (False, False)])
def test_text_starts_with_bos_unless_the_file_says_otherwise(tmp_path, flag, starts):
    tokenizer = build_tokenizer(write_pieces(tmp_path, PIECES, bos=flag))
    assert (tokenizer("ban")["input_ids"][0] == 1) == starts
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")


def test_gemma_pieces_take_no_leading_blank_and_end_at_end_of_turn(tmp_path):
    pieces = [*PIECES, "<start_of_turn>", "<end_of_turn>"]
    path = write_pieces(tmp_path, pieces, template="<start_of_turn>{{ messages }}<end_of_turn>")
    tokenizer = build_tokenizer(path)
    assert tokenizer.tokenize("ban ban") == ["ban", "▁ban"]
    assert tokenizer.eos_token == "<end_of_turn>"
