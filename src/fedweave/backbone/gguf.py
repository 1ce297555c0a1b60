"""A GGUF file becomes an ordinary Hugging Face folder, once; later loads take the converted copy. Where weights
stay as the file has them (``backbone.weights=stored``) the folder has the file's description and tokenizer alone.

Three things about GGUF need repair after transformers has read one (seen with 5.17): the dequantised model
still calls itself quantised, so that it can be neither saved nor trained; its config lacks much of what the file
says (``backbone/gguf_config.py``); and the tokenizer it derives is wrong (end token equal to the start token, no
digit splitting, shattered SentencePiece words). The model is therefore stripped of its quantisation marks and the
tokenizer is built here from the file's own tables.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedweave.backbone.announced import check_announced, check_finite, in_gguf
from fedweave.backbone.gguf_config import check_places, complete
from fedweave.errors import UserError, first_line
from fedweave.files import atomic_folder, file_sha256

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerFast

CACHE = Path(os.environ.get("FEDWEAVE_CACHE", Path.home() / ".cache" / "fedweave"))

# Word-splitting rules that GGUF names but does not contain.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLIT = {
    "qwen2": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL,
    "llama-bpe": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL,
}
_GPT2_RULE = ("smollm", "gpt-2", "default")
SPLITTERS = (*_GPT2_RULE[:2], *_SPLIT)  # every rule once, by the name that a file gets

# Markers that close an assistant turn, in the order in which they are looked for in a chat template.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "</s>")

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


def _place(gguf: Path) -> Path:
    """Where the copy of this very file lies; copies made before its positions were read lie elsewhere."""
    return CACHE / "models" / f"{gguf.stem}-{file_sha256(gguf)[:16]}-2"


def converted_folder(gguf: Path) -> Path:
    """The Hugging Face folder made from ``gguf``; made now when it is not in the cache."""
    folder = _place(gguf)
    if not (folder / "config.json").is_file():
        with atomic_folder(folder, replace=True, shared=True) as partial:
            _convert(gguf, partial)
    return folder


def described_folder(gguf: Path) -> Path:
    """The same without weights; the converted one where there is one."""
    folder = _place(gguf)
    if (folder / "config.json").is_file():
        return folder
    folder = folder.with_name(f"{folder.name}-stored")
    if not (folder / "config.json").is_file():
        with atomic_folder(folder, replace=True, shared=True) as partial, _reading(gguf):
            print(f"Reading {gguf.name} once, for this and all later runs.", file=sys.stderr, flush=True)
            config, tokenizer = _described(gguf)
            _name_tokens(config, tokenizer)
            config.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
    return folder


@contextmanager
def _reading(gguf: Path) -> Iterator[None]:
    """Whatever goes wrong in here is the file's fault: one sentence."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{gguf} cannot be read as a GGUF language model: {first_line(error)}") from error


@contextmanager
def _bar_on_terminals_alone() -> Iterator[None]:
    """transformers draws its bar over a GGUF file whatever its switch for bars says: one long line in a log."""
    from transformers import modeling_gguf_pytorch_utils as reader

    bar = reader.tqdm
    reader.tqdm = partial(bar, disable=None)  # None: where there is no terminal
    try:
        yield
    finally:
        reader.tqdm = bar


def _described(gguf: Path) -> tuple[PretrainedConfig, PreTrainedTokenizerFast]:
    from transformers import AutoConfig

    found = in_gguf(gguf)
    config = AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name, trust_remote_code=False)
    complete(config, gguf)
    check_announced(config, found, str(gguf))
    check_places(config, gguf)
    tokenizer = build_tokenizer(gguf)
    tokenizer.model_max_length = config.max_position_embeddings
    return config, tokenizer


def _name_tokens(config: PretrainedConfig | GenerationConfig, tokenizer: PreTrainedTokenizerFast) -> None:
    config.bos_token_id = tokenizer.bos_token_id
    config.eos_token_id = tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig
    from transformers.utils import logging as hf_logging

    print(f"Converting {gguf.name} once, for this and all later runs.", file=sys.stderr, flush=True)
    hf_logging.disable_progress_bar()
    with _reading(gguf), _bar_on_terminals_alone():
        announced, tokenizer = _described(gguf)
        model, info = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent),
            config=announced,
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
            trust_remote_code=False,
        )
        for wrong in ("missing_keys", "mismatched_keys"):
            if info[wrong]:
                raise ValueError(f"it lacks {min(map(str, info[wrong]))}, or has it in another shape")
        check_finite(model.state_dict().items())
    model.hf_quantizer = None
    for mark in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, mark):
            delattr(model.config, mark)
    model.config.dtype = torch.bfloat16
    for config in (model.config, model.generation_config):
        _name_tokens(config, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


Tables = dict[str, Any]  # what the key-value part of a GGUF file says of its tokenizer


def build_tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """The fast tokenizer that the file's vocabulary, merges and names describe."""
    from gguf import GGUFReader
    from tokenizers import AddedToken, processors
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(str(gguf)).fields
    tables = {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")}
    kind = tables.get("tokenizer.ggml.model", "")
    if kind == "gpt2":
        tokenizer, tokens = _byte_level_bpe(tables)
    elif kind == "llama":
        tokenizer, tokens = _sentencepiece_bpe(tables)
    else:
        raise UserError(f"{gguf}: tokenizer model {kind!r} is not supported; use the hub model instead.")
    types = tables["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, y in zip(tokens, types, strict=True) if y == _CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False) for t, y in zip(tokens, types, strict=True) if y == _USER_DEFINED]
    )

    def named(role: str) -> str | None:
        index = tables.get(f"tokenizer.ggml.{role}_token_id", -1)
        return tokens[index] if 0 <= index < len(tokens) else None

    template = tables.get("tokenizer.chat_template", "")
    bos, eos, unk = named("bos"), named("eos"), named("unknown")
    end_of_turn = [mark for mark in _END_OF_TURN if mark in template and mark in tokens]
    eos = end_of_turn[0] if end_of_turn else eos
    pad = named("padding") or ("<|endoftext|>" if "<|endoftext|>" in tokens else None) or unk or eos
    # SentencePiece models start every text with BOS unless the file says otherwise; byte-level ones do not.
    if bos and tables.get("tokenizer.ggml.add_bos_token", kind == "llama"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        unk_token=unk,
        clean_up_tokenization_spaces=False,
    )
    if template:
        fast.chat_template = template
    return fast


def _byte_level_bpe(tables: Tables) -> tuple[Tokenizer, list[str]]:
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens = tables["tokenizer.ggml.tokens"]
    merges = [(m.split(" ")[0], m.split(" ")[1]) for m in tables["tokenizer.ggml.merges"]]
    rule = tables.get("tokenizer.ggml.pre", "default")
    tokenizer = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges, ignore_merges=rule == "llama-bpe")
    )
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = word_splitter(rule)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, tokens


def word_splitter(rule: str) -> PreTokenizer:
    """How text is split into words before pieces are joined, by the name that GGUF has for it."""
    from tokenizers import Regex, pre_tokenizers

    if rule in _GPT2_RULE:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        digits = [pre_tokenizers.Digits(individual_digits=True)] if rule == "smollm" else []
        return pre_tokenizers.Sequence([*digits, byte_level])
    if rule not in _SPLIT:
        raise UserError(f"GGUF pre-tokenizer {rule!r} is not supported; use the hub model instead.")
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT[rule]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _sentencepiece_bpe(tables: Tables) -> tuple[Tokenizer, list[str]]:
    """SentencePiece BPE: the merges are implied by the pieces and their scores."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokens = tables["tokenizer.ggml.tokens"]
    scores, types = tables["tokenizer.ggml.scores"], tables["tokenizer.ggml.token_type"]
    gemma = "<start_of_turn>" in tokens
    # Gemma's runs of blanks are stored as real blanks; inside the tokenizer a blank is ▁.
    tokens = ["▁" * len(t) if t and not t.strip(" ") else t for t in tokens]
    vocabulary = {t: i for i, t in enumerate(tokens)}
    merges = []
    for token, score, kind in zip(tokens, scores, types, strict=True):
        if kind not in (_NORMAL, _USER_DEFINED):
            continue
        halves = [(token[:k], token[k:]) for k in range(1, len(token))]
        known = sorted(
            (vocabulary[a], vocabulary[b], a, b) for a, b in halves if a in vocabulary and b in vocabulary
        )
        rank = 1e9 if kind == _USER_DEFINED else score
        merges += [(rank, a, b) for _, _, a, b in known]
    merges.sort(key=lambda m: (m[0], len(m[1]), len(m[2])), reverse=True)
    unk = tables.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[(a, b) for _, a, b in merges],
            unk_token=tokens[unk],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if gemma:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer, tokens
