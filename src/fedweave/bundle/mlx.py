"""Adapters as mlx_lm loads them: factors transposed, and a config of its own."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from fedweave.bundle.adapter import rank_and_alpha
from fedweave.schema import Description


def write_mlx_adapter(folder: Path, tensors: Mapping[str, torch.Tensor], description: Description) -> None:
    """An adapter in PEFT's names and shapes, lora_A [r, in] and lora_B [out, r], as lora_a [in, r] and lora_b
    [r, out]. mlx_lm scales by a number of its own and finds the layers to adapt by their names within a block."""
    rank, alpha = rank_and_alpha(tensors, description)
    folder.mkdir()
    factors = {}
    for key, tensor in tensors.items():
        layer, factor = re.fullmatch(r"base_model\.model\.(.+)\.lora_(A|B)\.weight", key).groups()  # type: ignore[union-attr]
        factors[f"{layer}.lora_{factor.lower()}"] = tensor.T.contiguous()
    save_file(factors, folder / "adapters.safetensors", {"format": "mlx"})
    blocks = [re.fullmatch(r".*layers\.(\d+)\.(.+)\.lora_[ab]", name) for name in factors]
    found = [block.groups() for block in blocks if block]
    config = {
        "fine_tune_type": "lora",
        "num_layers": 1 + max(int(index) for index, _ in found),
        "lora_parameters": {
            "rank": rank,
            "scale": alpha / rank,
            "dropout": 0.0,
            "keys": sorted({name for _, name in found}),
        },
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
