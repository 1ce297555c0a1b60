"""The frozen decoder of Llama-type models, run layer by layer through fused operations.

    s, h = add_norm(s, delta)        q, k, v = rotate(h [Wq Wk Wv])      delta = attention(q, k, v) Wo
    s, h = add_norm(s, delta)        m = gated_unit(h [Wg Wu])           delta = m Wd

It computes what transformers' own layers compute. Products that read the same input are one product; what lies
between products is one kernel each, with its gradient written out (``kernels/``); and since the weights are
frozen, little is kept for the backward pass: the stream s twice, what attention reads and writes, and [g u]. With
``again`` it is s alone, once, and a layer runs a second time on the way back.

Families differ in what stands in a layer, and the layer itself says so: norms of heads (Qwen3), products that are
joined already and heads that rotate in part (Phi-3), layers without positions (SmolLM3), windows (Mistral). Other
architectures run through transformers (``backbone/library.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from fedweave.backbone.packing import Packed, attend
from fedweave.experts.mixture import carries_experts, run_layer_again, with_experts, with_own_gates
from fedweave.kernels.again import unread_product
from fedweave.kernels.layer import add_norm, computed_again, gated, gated_unit, norm
from fedweave.kernels.rotary import HeadNorms, rotate

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "phi3", "smollm3")


class Decoder:
    """A frozen model's layers with their products joined. The model keeps working: its weights become views."""

    def __init__(self, model: PreTrainedModel):
        self.base = model.base_model
        self.layers = [_Layer(layer, model.config) for layer in self.base.layers]

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        """Whether this model is of the kind that is written out here."""
        config = model.config
        return (
            config.model_type in FAMILIES
            and config.hidden_act == "silu"
            and all(layer.mlp.down_proj.weight.dtype == model.dtype for layer in model.base_model.layers)
        )

    def hidden(self, packed: Packed, again: bool = False) -> torch.Tensor:
        """Last hidden states after the final norm, [T, d]; with ``again`` layers keep their inputs alone."""
        s = self.base.embed_tokens(packed.ids)  # [1, T, d]
        angles = [angle[0] for angle in self.base.rotary_emb(s, packed.positions)]  # cos and sin, [T, R]
        still = [torch.ones_like(angles[0]), torch.zeros_like(angles[1])]
        s, delta = s[0], None
        for layer in self.layers:
            turn = angles if layer.turned else still
            if again and torch.is_grad_enabled():
                s = run_layer_again(layer.linears, partial(layer.summed, turn=turn, packed=packed), s)
            else:
                with with_own_gates(layer.linears):
                    s, delta = layer(s, delta, turn, packed)
        final = self.base.norm
        return add_norm(s, delta, final.weight, final.variance_epsilon)[1]


class _Layer:
    def __init__(self, layer: LlamaDecoderLayer, config: PretrainedConfig):
        attention, mlp = layer.self_attn, layer.mlp
        joined = hasattr(attention, "qkv_proj")
        names = ["qkv_proj"] if joined else ["q_proj", "k_proj", "v_proj"]
        self.norms = (layer.input_layernorm, layer.post_attention_layernorm)
        self.qkv = _Joined([getattr(attention, name) for name in names])
        self.out = _Joined([attention.o_proj])
        self.gate_up = _Joined([mlp.gate_up_proj] if joined else [mlp.gate_proj, mlp.up_proj])
        self.down = _Joined([mlp.down_proj])
        self.linears = [w for product in (self.qkv, self.out, self.gate_up, self.down) for w in product.layers]
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.scaling: float = attention.scaling
        # some families say it of every layer, others once for all
        self.window = getattr(attention, "sliding_window", getattr(config, "sliding_window", None))
        self.turned = bool(getattr(attention, "use_rope", True))
        self.head_norms = None
        if hasattr(attention, "q_norm"):
            weights = torch.stack([attention.q_norm.weight.data, attention.k_norm.weight.data])
            self.head_norms = HeadNorms(weights, attention.q_norm.variance_epsilon)

    def __call__(
        self,
        s: torch.Tensor,  # [T, d] the residual stream before the last contribution
        delta: torch.Tensor | None,  # [T, d] that contribution
        turn: Sequence[torch.Tensor],  # cos and sin, [T, R]
        packed: Packed,
        unread: bool = False,  # whether nobody reads the layer's own contribution
    ) -> tuple[torch.Tensor, torch.Tensor]:
        s, qkv = self.normed(self.norms[0], s, delta, self.qkv)
        cos, sin = turn
        q, k, v = rotate(qkv, cos, sin, self.heads, self.kv_heads, self.head_norms)  # [T, heads, D]
        attended = attend(q, k, v, packed, self.scaling, self.window)
        s, gate_up = self.normed(self.norms[1], s, self.out(attended.flatten(1)), self.gate_up)
        m, both = gated_unit(gate_up), gate_up.detach()
        with computed_again(m, lambda: gated(both)):
            return s, self.down(m, unread)

    def summed(self, s: torch.Tensor, turn: Sequence[torch.Tensor], packed: Packed) -> torch.Tensor:
        """The stream with this layer's contribution: one tensor to keep instead of two. Where the layer runs again
        its last product, a quarter of the work, is left out: what comes after it is known."""
        s, delta = self(s, None, turn, packed, unread=torch.is_grad_enabled())
        return s + delta

    @staticmethod
    def normed(
        rms: LlamaRMSNorm, s: torch.Tensor, delta: torch.Tensor | None, product: _Joined
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream with ``delta``, and the product of its norm, which is not kept."""
        s, h = add_norm(s, delta, rms.weight, rms.variance_epsilon)
        stream = s.detach()
        with computed_again(h, lambda: norm(stream, rms.weight, rms.variance_epsilon)):
            return s, product(h)


class _Joined:
    """Linear layers that read the same input, as one product."""

    def __init__(self, layers: Sequence[torch.nn.Linear]):
        self.layers = layers
        self.weight: torch.Tensor = layers[0].weight
        self.bias: torch.Tensor | None = layers[0].bias
        if len(layers) == 1:
            return
        self.weight = torch.cat([layer.weight.data for layer in layers])  # [columns of all, n]
        for layer, part in zip(layers, self.weight.split([w.out_features for w in layers]), strict=True):
            layer.weight.data = part
        if self.bias is not None:
            self.bias = torch.cat([layer.bias.data for layer in layers])

    def __call__(self, x: torch.Tensor, unread: bool = False) -> torch.Tensor:
        if not carries_experts(self.layers):
            return unread_product(x, self.weight) if unread else F.linear(x, self.weight, self.bias)
        with torch.no_grad():
            y = x.new_empty(len(x), len(self.weight)) if unread else F.linear(x, self.weight, self.bias)
        return with_experts(y, x, self.layers, self.weight)
