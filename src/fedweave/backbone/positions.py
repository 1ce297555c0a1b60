"""Rotary positions that do not depend on who else is in a batch.

Some models (Phi-3's ``longrope``, ``dynamic``) rotate all sequences of a batch in another way once the longest of
them is beyond the length that they were first trained with. In a packed batch a client would feel its neighbours,
and a recorded step cannot ask. So such a model keeps the rotation of sequences up to that length, and takes no
longer ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedweave.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def steady_positions(model: PreTrainedModel, max_length: int, name: str) -> int | None:
    """Let positions stay as they are loaded, for sequences of up to ``max_length``; returns how many tokens a
    sequence may have, where the model says so."""
    config = model.config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None)
    rotary = getattr(model.base_model, "rotary_emb", None)
    kind = getattr(rotary, "rope_type", None)
    if rotary is None or not isinstance(kind, str) or not (kind == "longrope" or "dynamic" in kind):
        return longest
    rotary.rope_type = "default"  # which the library never changes
    longest = min(config.rope_parameters.get("original_max_position_embeddings", longest), longest)
    if max_length > longest:
        raise UserError(
            f"backbone.max_length={max_length} is more than the {longest} tokens up to which {name} has positions "
            f"that do not depend on other sequences; set backbone.max_length={longest} or less."
        )
    return longest
