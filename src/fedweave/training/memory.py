"""How many lanes fit into the device's memory at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedweave.backbone.load import Backbone
from fedweave.training.batch import Lane

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_USABLE = 0.8  # of the free memory; the rest is for what a step allocates in passing
_CPU_TOKENS = 4096  # a longer step is no faster on a CPU
_PER_PARAMETER = 24  # bytes: value, gradient, two moments and start in float32, a copy and its gradient in bfloat16


def activation_numbers(config: PretrainedConfig, fused: bool) -> int:
    """Numbers kept for the backward pass, per token: those that ``backbone/decoder.py`` keeps, or about 12
    hidden-wide and 4 MLP-wide tensors a layer where transformers' own layers run."""
    width, inner = config.hidden_size, config.intermediate_size
    if not fused:
        return config.num_hidden_layers * (12 * width + 4 * inner)
    head = getattr(config, "head_dim", None) or width // config.num_attention_heads
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    return config.num_hidden_layers * (2 * width + 2 * queries + 2 * keys + 2 * inner)


def joined_numbers(config: PretrainedConfig) -> int:
    """Weights of the products that ``backbone/decoder.py`` joins, of which a CPU keeps both forms."""
    width, head = config.hidden_size, getattr(config, "head_dim", None)
    head = head or width // config.num_attention_heads
    outputs = (config.num_attention_heads + 2 * config.num_key_value_heads) * head + 2 * config.intermediate_size
    return config.num_hidden_layers * width * outputs


def cpu_tokens(per_token: float) -> int:
    """Most tokens of a step on a CPU; ``per_token`` are the bytes that each keeps."""
    return min(_CPU_TOKENS, max(512, int(4e9 / per_token)))


@dataclass
class Fit:
    """How many lanes march together, and why."""

    lanes: int
    why: str


def lanes_that_fit(backbone: Backbone, lanes: Sequence[Lane], asked: int | str) -> Fit:
    """As many as asked for, or as the free memory holds."""
    if asked != "auto":
        return Fit(int(asked), f"training.clients_per_step={asked}")
    mean = float(np.mean([len(e.ids) for lane in lanes for e in lane.data.examples]))
    longest = max(1, *(len(step) for lane in lanes for step in lane.schedule))
    tokens = mean * longest  # of one lane's step
    config = backbone.model.config.get_text_config()
    per_token = activation_numbers(config, backbone.decoder is not None) * backbone.dtype.itemsize
    if backbone.device.type != "cuda":
        limit = cpu_tokens(per_token)
        return Fit(max(1, int(limit / tokens)), f"{limit} tokens in a step")
    parameters = lanes[0].theta.numel() + (lanes[0].phi.numel() if lanes[0].phi is not None else 0)
    parameters *= longest if lanes[0].shield is not None else 1  # every example has a gradient of its own
    each = tokens * per_token + _PER_PARAMETER * parameters
    free, _ = torch.cuda.mem_get_info(backbone.device)
    free += torch.cuda.memory_reserved(backbone.device) - torch.cuda.memory_allocated(backbone.device)
    return Fit(
        max(1, int(_USABLE * free / each)), f"about {each / 2**30:.2f} GiB each, {free / 2**30:.0f} GiB free"
    )
