"""What a GGUF file says of its model and transformers (5.17) does not read: how wide a head is, soft-caps, windows,
and how positions are stretched. A Llama 3 or a Gemma without them is another model.

What is not said of a model in its file is what llama.cpp takes for granted of its family.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedweave.backbone.announced import skeleton, stored_tensors
from fedweave.backbone.gguf_names import ARCHITECTURES, name_of, names_of

if TYPE_CHECKING:
    import numpy as np
    from transformers import PretrainedConfig

_FACTORS = "rope_freqs.weight"  # by how much slower each pair of a head rotates
# layers of the 27B, which scale attention in a way of their own
_OF_A_LARGE_GEMMA = {"gemma2": 46, "gemma3_text": 62}


def complete(config: PretrainedConfig, gguf: Path) -> None:
    """Put into ``config`` what the file says beyond it; positions of a kind that it cannot hold are refused."""
    from gguf import GGUFReader

    reader = GGUFReader(str(gguf))
    architecture = reader.fields["general.architecture"].contents()
    said = {
        key.removeprefix(f"{architecture}."): field.contents()
        for key, field in reader.fields.items()
        if key.startswith(f"{architecture}.")
    }
    factors = {tensor.name: tensor.data for tensor in reader.tensors if tensor.name.startswith("rope_f")}
    if said.get("rope.scaling.type") in (None, "none"):
        said.pop("rope.scaling.type", None)
    if config.model_type in ARCHITECTURES:
        if width := said.get("attention.key_length"):
            config.head_dim = width
        if config.model_type.startswith("gemma"):
            _complete_gemma(config, said)
        _stretch(config, said, factors)
    elif factors or "rope.scaling.type" in said:
        raise ValueError(f"its positions are stretched, which is not read of {config.model_type}")


def check_places(config: PretrainedConfig, gguf: Path) -> None:
    """Every tensor of the file belongs somewhere: a Llama whose file has biases is another model without them."""
    if config.model_type not in ARCHITECTURES:
        return
    names = names_of(config)
    places = {name_of(names, key) for key, _ in skeleton(config, str(gguf)).named_parameters()}
    if lost := sorted({tensor.name for tensor in stored_tensors(gguf)} - places - {_FACTORS}):
        raise ValueError(f"a {config.model_type} has no place for {lost[0]}")


def _complete_gemma(config: PretrainedConfig, said: dict[str, Any]) -> None:
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if cap in said:
            setattr(config, cap, said[cap] or None)
    large = config.num_hidden_layers == _OF_A_LARGE_GEMMA[config.model_type]
    config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if large else config.head_dim
    windowed = said.get("attention.sliding_window_pattern")
    if isinstance(windowed, list):
        if len(windowed) != config.num_hidden_layers:
            raise ValueError(f"it says of {len(windowed)} layers whether they have a window")
        config.layer_types = ["sliding_attention" if one else "full_attention" for one in windowed]
    if "rope.freq_base_swa" in said:
        config.rope_parameters["sliding_attention"]["rope_theta"] = said["rope.freq_base_swa"]


def _stretch(config: PretrainedConfig, said: dict[str, Any], factors: dict[str, np.ndarray]) -> None:
    """Positions as transformers names them; a stretch is that of layers without a window."""
    kind = said.get("rope.scaling.type")
    found = config.rope_parameters
    full = found.get("full_attention", found)
    if factors:
        if list(factors) != [_FACTORS] or full is not found or kind is not None:
            raise ValueError(f"it stretches positions by {', '.join(factors)} in a way that is not read")
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        each = factors[_FACTORS].tolist() if factors[_FACTORS].shape == (width // 2,) else []
        if not each or not all(0 < factor < math.inf for factor in each):
            raise ValueError(f"{_FACTORS} holds no {width // 2} positive numbers")
        # the one kind that takes any numbers; of its two lists both are this one, so that no length changes them
        stretch = {"rope_type": "longrope", "short_factor": each, "long_factor": each, "attention_factor": 1.0,
                   "factor": 1.0, "original_max_position_embeddings": config.max_position_embeddings}  # fmt: skip
    elif kind in ("linear", "yarn"):
        stretch = {"rope_type": kind, "factor": said["rope.scaling.factor"]}
        if kind == "yarn":
            stretch["original_max_position_embeddings"] = said["rope.scaling.original_context_length"]
    elif kind is None:
        return
    else:
        raise ValueError(f"it stretches positions in a way that is not read ({kind})")
    full.update(stretch)
