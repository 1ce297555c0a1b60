"""The frozen decoder of Llama-type models, run layer by layer through fused operations.

    s, h = add_norm(s, delta)        q, k, v = rotate(h [Wq Wk Wv])      delta = attention(q, k, v) Wo
    s, h = add_norm(s, delta)        m = gated_unit(h [Wg Wu])           delta = m Wd

It computes what transformers' own layers compute. Products that read the same input are one product; what lies
between products is one kernel each, with its gradient written out (``kernels/``); and since the weights are
frozen, little is kept for the backward pass. Other architectures run through transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fedweave.backbone.packing import Packed, attend
from fedweave.backbone.quantised import QuantisedLinear
from fedweave.experts.mixture import carries_experts, with_experts
from fedweave.kernels.frozen import Resident, Weight, linear
from fedweave.kernels.layer import add_norm, computed_again, gated_unit, rotate

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

FAMILIES = ("llama", "qwen2", "mistral")


class Decoder:
    """A frozen model's layers with their products joined. The model keeps working: its weights become views."""

    def __init__(self, model: PreTrainedModel):
        self.base = model.base_model
        self.layers = [_Layer(layer) for layer in self.base.layers]

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        """Whether this model is of the kind that is written out here."""
        config = model.config
        return (
            config.model_type in FAMILIES
            and config.hidden_act == "silu"
            and all(_plain(layer.self_attn.q_proj, model.dtype) for layer in model.base_model.layers)
        )

    def hidden(self, packed: Packed) -> torch.Tensor:
        """Last hidden states after the final norm, [T, d]."""
        s = self.base.embed_tokens(packed.ids)  # [1, T, d]
        cos, sin = (angle[0] for angle in self.base.rotary_emb(s, packed.positions))  # [T, D]
        s, delta = s[0], None
        for layer in self.layers:
            s, delta = layer(s, delta, cos, sin, packed)
        norm = self.base.norm
        return add_norm(s, delta, norm.weight, norm.variance_epsilon)[1]


def _plain(layer: torch.nn.Linear, dtype: torch.dtype) -> bool:
    """Whether a layer's weight is ours to multiply by, and not kept in a way that only its own layer knows."""
    return isinstance(layer, QuantisedLinear) or layer.weight.dtype == dtype


class _Layer:
    def __init__(self, layer: LlamaDecoderLayer):
        attention, mlp = layer.self_attn, layer.mlp
        self.attention = attention
        self.norms = (layer.input_layernorm, layer.post_attention_layernorm)
        self.qkv = _Joined([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = _Joined([attention.o_proj])
        self.gate_up = _Joined([mlp.gate_proj, mlp.up_proj])
        self.down = _Joined([mlp.down_proj])
        self.heads = attention.q_proj.out_features // attention.head_dim
        self.kv_heads = attention.k_proj.out_features // attention.head_dim

    def __call__(
        self,
        s: torch.Tensor,  # [T, d] the residual stream before the last contribution
        delta: torch.Tensor | None,  # [T, d] that contribution
        cos: torch.Tensor,
        sin: torch.Tensor,
        packed: Packed,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        s, qkv = self.normed(self.norms[0], s, delta, self.qkv)
        q, k, v = rotate(qkv, cos, sin, self.heads, self.kv_heads)  # [T, heads, D]
        window = getattr(self.attention, "sliding_window", None)
        attended = attend(q, k, v, packed, self.attention.scaling, window)
        s, gate_up = self.normed(self.norms[1], s, self.out(attended.flatten(1)), self.gate_up)
        return s, self.down(gated_unit(gate_up))

    @staticmethod
    def normed(
        norm: LlamaRMSNorm, s: torch.Tensor, delta: torch.Tensor | None, product: _Joined
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream with ``delta``, and the product of its norm, which is not kept."""
        s, h = add_norm(s, delta, norm.weight, norm.variance_epsilon)
        with computed_again(h, s, norm.weight, norm.variance_epsilon):
            return s, product(h)


class _Joined:
    """Linear layers that read the same input, as one product."""

    def __init__(self, layers: Sequence[torch.nn.Linear]):
        self.layers = layers
        self.bias: torch.Tensor | None = layers[0].bias
        if self.bias is not None and len(layers) > 1:
            self.bias = torch.cat([layer.bias.data for layer in layers])
        self.weight: Weight = self._join(layers)  # [columns of all, n]

    @staticmethod
    def _join(layers: Sequence[torch.nn.Linear]) -> Weight:
        quantised = [layer for layer in layers if isinstance(layer, QuantisedLinear)]
        if quantised:
            kept = [layer.packed if isinstance(layer, QuantisedLinear) else layer.weight for layer in layers]
            return Resident(kept, quantised[0].scratch)
        if len(layers) == 1:
            return layers[0].weight
        weight = torch.cat([layer.weight.data for layer in layers])
        for layer, part in zip(layers, weight.split([w.out_features for w in layers]), strict=True):
            layer.weight.data = part
        return weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not carries_experts(self.layers):
            return linear(x, self.weight, self.bias)
        with torch.no_grad():
            y = linear(x, self.weight, self.bias)
        return with_experts(y, x, self.layers, self.weight)
