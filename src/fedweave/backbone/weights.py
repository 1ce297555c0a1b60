"""A backbone's weights as ``backbone.weights`` wants them, and a hash over all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fedweave.backbone.announced import check_finite, check_read, check_room, skeleton
from fedweave.backbone.catalog import Located
from fedweave.backbone.quantised import (
    as_nf4,
    from_gguf,
    in_groups,
    kept_weights,
    load_quantised,
    packed_weights,
    predicted_bytes,
)
from fedweave.config import BackboneConfig
from fedweave.kernels.dequantise import Quantised

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 24}  # numbers that are hashed at once, as eight bytes each
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def load_model(
    config: BackboneConfig,
    located: Located,
    announced: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> PreTrainedModel:
    """The model with its weights, all of them there and finite, on the device."""
    shapes = skeleton(announced, config.model)
    needed = predicted_bytes(shapes, config.weights, dtype.itemsize, located.gguf, in_groups(device))
    check_room(needed, device, config.model)
    if located.gguf is not None:
        model = load_quantised(announced, from_gguf(located.gguf, announced), dtype, device)
    elif config.weights.startswith("nf4"):
        source = as_nf4(Path(located.path), config.weights == "nf4-double", device, shapes)
        model = load_quantised(announced, source, dtype, device)
    else:
        model = _load_dense(located.path, dtype).to(device)
    check_finite(kept_weights(model, unpacked=False))
    return model


def _load_dense(path: str, dtype: torch.dtype) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, output_loading_info=True, trust_remote_code=False, use_safetensors=True
    )
    if info["missing_keys"]:
        raise ValueError(f"the files lack {sorted(info['missing_keys'])[0]}")
    if info["mismatched_keys"]:
        raise ValueError(f"{min(map(str, info['mismatched_keys']))} has another shape than the config says")
    check_read(model, info["unexpected_keys"])
    return model


@torch.no_grad()
def weights_hash(model: torch.nn.Module, portable: bool = False) -> str:
    """A hash over every bit of every parameter and buffer, fast enough to take before and after a run; ``portable``
    takes their values rounded to bfloat16, whatever they are loaded in and however they are kept."""
    weights: Iterable[tuple[str, torch.Tensor | Quantised]] = kept_weights(model, unpacked=False)
    if portable:
        weights = [*model.state_dict().items(), *packed_weights(model).items()]
    lines = []
    for name, weight in weights:
        kind, total, mixed, seen = None, 0, 0, 0
        for values in _pieces(weight):
            if portable and values.is_floating_point():
                values = values.to(torch.bfloat16)
            kind, bits = values.dtype, values.view(_BITS[values.element_size()]).long()
            places = torch.arange(seen + 1, seen + 1 + len(bits), device=bits.device) % 65521
            total, mixed, seen = total + int(bits.sum()), mixed + int((bits * places).sum()), seen + len(bits)
        lines.append(f"{name} {tuple(weight.shape)} {kind} {total} {mixed}\n")
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def _pieces(weight: torch.Tensor | Quantised) -> Iterator[torch.Tensor]:
    """All numbers in their order, some at a time, so that a large matrix is never there as numbers."""
    some = _AT_ONCE[weight.device.type]
    if isinstance(weight, torch.Tensor):
        yield from weight.contiguous().reshape(-1).split(some)
        return
    rows = max(1, some // weight.columns)
    for start in range(0, len(weight.low), rows):
        yield weight.rows(slice(start, start + rows)).dense(torch.float32).flatten()
