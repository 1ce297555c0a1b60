"""What llama.cpp calls the tensors of a model, and how it keeps them.

Llama-type models rotate the two halves of a query in transformers and its neighbouring pairs in llama.cpp, so the
rows of q and k stand in another order there. Gemma's norms multiply by 1 + w in transformers and by w in llama.cpp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from gguf import TensorNameMap
    from transformers import PretrainedConfig

# transformers' name of a family, and llama.cpp's
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}


def names_of(config: PretrainedConfig) -> TensorNameMap:
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architecture = ARCHITECTURES[config.model_type]
    known = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    return get_tensor_name_map(known, config.num_hidden_layers)


def name_of(names: TensorNameMap, key: str) -> str | None:
    """The name of transformers' ``key``, where there is one."""
    found = names.get_name(key, try_suffixes=(".weight", ".bias"))
    return None if found is None else str(found)


def reordered(key: str, tensor: torch.Tensor, config: PretrainedConfig) -> torch.Tensor:
    """Rows of q and k, [heads · D, …], as llama.cpp rotates them: of each head the first of its first half, the
    first of its second half, the second of its first half …"""
    count = _rotated_heads(key, config)
    return tensor if count is None else tensor.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)


def order_of(key: str, rows: int, config: PretrainedConfig) -> torch.Tensor | None:
    """Which of llama.cpp's rows stand where in transformers, [rows]; None: as they stand."""
    if _rotated_heads(key, config) is None:
        return None
    return torch.empty(rows, dtype=torch.long).scatter_(
        0, reordered(key, torch.arange(rows), config), torch.arange(rows)
    )


def added_to_norms(key: str, config: PretrainedConfig) -> int:
    """By how much llama.cpp's number is larger."""
    return int(config.model_type.startswith("gemma") and key.endswith("norm.weight"))


def _rotated_heads(key: str, config: PretrainedConfig) -> int | None:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    return heads.get(key.split(".")[-2]) if ARCHITECTURES[config.model_type] == "llama" else None
