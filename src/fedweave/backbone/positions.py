"""Positions that do not depend on who else is in a batch, and how far a model's attention is right without masks.

Some models (Phi-3's ``longrope``, ``dynamic``) rotate all sequences of a batch in another way once the longest of
them is beyond the length that they were first trained with. In a packed batch a client would feel its neighbours,
and a recorded step cannot ask. So such a model keeps the rotation of sequences up to that length, and takes no
longer ones. So do families whose windows are in their masks alone, which packing does without: up to a window's
length there is none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedweave.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# whose layers (transformers 5.17) do not tell attention of a window
_MASKED = ("doge", "llama4_text", "phimoe", "qwen2_moe")


def steady_positions(model: PreTrainedModel, max_length: int, name: str) -> int | None:
    """Let positions stay as they are loaded, for sequences of up to ``max_length``; returns how many tokens a
    sequence may have, where the model says so."""
    config = model.config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None)
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    if config.model_type in _MASKED and window:
        longest = min(config.max_position_embeddings, window)
        _check_length(max_length, longest, f"{name} has no window yet, which its masks alone know")
    rotary = getattr(model.base_model, "rotary_emb", None)
    kind = getattr(rotary, "rope_type", None)
    if rotary is None or not isinstance(kind, str) or not (kind == "longrope" or "dynamic" in kind):
        return longest
    rotary.rope_type = "default"  # which the library never changes
    longest = min(config.rope_parameters.get("original_max_position_embeddings", longest), longest)
    _check_length(max_length, longest, f"{name} has positions that do not depend on other sequences")
    return longest


def _check_length(max_length: int, longest: int, why: str) -> None:
    if max_length > longest:
        raise UserError(
            f"backbone.max_length={max_length} is more than the {longest} tokens up to which {why}; "
            f"set backbone.max_length={longest} or less."
        )
