"""The tokenizer's tables as GGUF files hold them: what :mod:`fedweave.backbone.gguf` reads, written."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from fedweave.backbone.gguf import SPLITTERS, word_splitter
from fedweave.backbone.prompts import PromptFormat
from fedweave.bundle.tokens import begins, with_template
from fedweave.errors import UserError

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from transformers import PreTrainedTokenizerFast

# Digits, contractions in both cases, blanks, line ends, signs, other scripts: no two rules split all of it alike.
_TRIAL = "In 2024, it's I'LL  3.14159\n\n  x=f(12)\t!?\r\n don't 1234567 été 12年 ١٢٣ …end  "
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

Tables = dict[str, Any]  # tokenizer.json, parsed


def write_tables(writer: GGUFWriter, prompts: PromptFormat, rows: int) -> None:
    """Vocabulary, merges, special tokens and the template of training. ``rows``: of the embedding, which may have
    more than the tokenizer has tokens; a token that has no row is in no text."""
    tokenizer = with_template(prompts)
    tables: Tables = json.loads(tokenizer.backend_tokenizer.to_str())
    if tables["model"]["type"] != "BPE":
        raise _unknown(f"a {tables['model']['type']} vocabulary")
    tokens = [f"[PAD{i}]" for i in range(rows)]
    types = [_UNUSED] * rows
    known = [(i, token, _NORMAL) for token, i in tables["model"]["vocab"].items()]
    for added in tables["added_tokens"]:
        known.append((added["id"], added["content"], _CONTROL if added["special"] else _USER_DEFINED))
    for i, token, kind in known:
        if i < rows:
            tokens[i], types[i] = token, kind
    if tables["model"].get("byte_fallback"):
        _pieces(writer, tokenizer, tables, tokens, types)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_splitter(tokenizer))
        writer.add_token_merges([" ".join(pair) for pair in _merges(tables)])
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    _marks(writer, prompts, rows)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)


def _merges(tables: Tables) -> list[list[str]]:
    """Pairs of pieces, the first to be joined first; older files write a pair as one text."""
    return [pair.split(" ") if isinstance(pair, str) else pair for pair in tables["model"]["merges"]]


def _splitter(tokenizer: PreTrainedTokenizerFast) -> str:
    """GGUF's name of the rule by which this tokenizer splits words: found by trying."""
    own = tokenizer.backend_tokenizer.pre_tokenizer
    words = own.pre_tokenize_str(_TRIAL) if own is not None else []
    for rule in SPLITTERS:
        if word_splitter(rule).pre_tokenize_str(_TRIAL) == words:
            return rule
    raise _unknown("a rule for splitting words")


def _pieces(
    writer: GGUFWriter, tokenizer: PreTrainedTokenizerFast, tables: Tables, tokens: list[str], types: list[int]
) -> None:
    """SentencePiece joins the neighbours whose union scores highest: an earlier merge scores higher."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(_merges(tables)):
        ranks.setdefault("".join(pair), rank)
    for i, token in enumerate(tokens):
        if types[i] == _NORMAL and len(token) == 6 and token.startswith("<0x"):
            types[i] = _BYTE
    if tokenizer.unk_token_id is not None:
        types[tokenizer.unk_token_id] = _UNKNOWN
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_scores([-float(ranks.get(token, len(ranks))) for token in tokens])
    writer.add_add_space_prefix(tokenizer.tokenize("a")[0].startswith("▁"))


def _marks(writer: GGUFWriter, prompts: PromptFormat, rows: int) -> None:
    """The tokens that begin a prompt and end an answer: those of training."""
    tokenizer = prompts.tokenizer
    ends = [i for i in (prompts.end_id, tokenizer.eos_token_id) if i is not None]
    named = {
        "bos": tokenizer.bos_token_id,
        "eos": ends[0] if ends else None,
        "eot": ends[-1] if ends else None,
        "unk": tokenizer.unk_token_id,
        "pad": tokenizer.pad_token_id,
    }
    for role, token in named.items():
        if token is not None and token < rows:
            getattr(writer, f"add_{role}_token_id")(token)
    writer.add_add_bos_token(begins(prompts))
    writer.add_add_eos_token(False)


def _unknown(what: str) -> UserError:
    return UserError(
        f"the tokenizer has {what} that FedWeave cannot write as GGUF; export a dense model with --merge alone and "
        "convert that folder with llama.cpp's convert_hf_to_gguf.py."
    )
