"""The frozen decoder of Llama-type models, run layer by layer through fused operations.

    s, h = add_norm(s, delta)        a = attend_rotated(h [Wq Wk Wv])    delta = a Wo
    s, h = add_norm(s, delta)        m = gated_unit(h [Wg Wu])           delta = m Wd

It computes what transformers' own layers compute. Products that read the same input are one product; what lies
between products is one kernel each, with its gradient written out (``kernels/``); and since the weights are
frozen, little is kept for the backward pass: the stream s twice, what attention reads and writes, and [g u]. With
``again`` it is s alone, once, and a layer runs a second time on the way back.

Families differ in what stands in a layer, and the layer itself says so: norms of heads (Qwen3, Gemma-3), products
that are joined already and heads that rotate in part (Phi-3), layers without positions (SmolLM3) or with positions
of their own (Gemma-3), windows (Mistral, Gemma), norms behind attention and MLP as well (Gemma). Others run through
transformers (``backbone/library.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from fedweave.backbone.packing import Packed, attend_rotated
from fedweave.backbone.quantised import QuantisedLinear, joined
from fedweave.experts.mixture import carries_experts, reading, run_layer_again, with_experts, with_own_gates
from fedweave.kernels import fp8 as kernels_fp8
from fedweave.kernels import fused
from fedweave.kernels.again import unread_product
from fedweave.kernels.fp8 import EightBit, room_for
from fedweave.kernels.frozen import Resident, Rounded, Weight, linear
from fedweave.kernels.gated import gated_product, gated_unit
from fedweave.kernels.lanes import Rows
from fedweave.kernels.layer import add_norm
from fedweave.kernels.rotary import HeadNorms
from fedweave.kernels.source import Source

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "phi3", "smollm3", "gemma2", "gemma3_text")
_ACTIVATIONS = {"silu": False, "gelu_pytorch_tanh": True}  # whether it is gelu

Turn = tuple[torch.Tensor, torch.Tensor]  # cos and sin, [T, R]
Eight = Literal["off", "forward", "both"]  # which products with frozen weights are in 8 bits: ``training.fp8``


class _Given(NamedTuple):
    """What all products of a pass have beside their input."""

    packed: Packed
    turn: Turn
    fp8: Eight
    read: Rows | None = None  # rows that somebody reads of the layer's output; None: all


class Decoder:
    """A frozen model's layers with their products joined. The model keeps working: its weights become views."""

    def __init__(self, model: PreTrainedModel):
        self.base = model.base_model
        self.layers = [_Layer(layer, model.config) for layer in self.base.layers]
        self.norm = _norm_of(self.base.norm)

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        """Whether this model is of the kind that is written out here."""
        config = model.config
        return (
            config.model_type in FAMILIES
            and _activation(config) in _ACTIVATIONS
            and not getattr(config, "use_bidirectional_attention", False)
            and all(_plain(layer.mlp.down_proj, model.dtype) for layer in model.base_model.layers)
        )

    def hidden(
        self, packed: Packed, again: bool = False, fp8: Eight = "off", read: Rows | None = None
    ) -> torch.Tensor:
        """Last hidden states after the final norm, [T, d] or those that are ``read`` [n, d]; with ``again`` layers
        keep their inputs alone."""
        embedded = self.base.embed_tokens(packed.ids)  # [1, T, d]
        turns = {kind: self._turn(kind, embedded, packed) for kind in dict.fromkeys(la.turn for la in self.layers)}
        s, delta = embedded[0], None
        for layer in self.layers:
            given = _Given(packed, turns[layer.turn], fp8, read if layer is self.layers[-1] else None)
            if again and torch.is_grad_enabled():
                s = run_layer_again(layer.linears, partial(layer.summed, given=given), s)
            else:
                with with_own_gates(layer.linears):
                    s, delta = layer(s, delta, given)
        return add_norm(s, delta, *self.norm, slope=delta is not None and self.layers[-1].goes_back(fp8))[1]

    def _turn(self, kind: tuple[str, ...] | None, embedded: torch.Tensor, packed: Packed) -> Turn:
        """How layers of this kind rotate; None: not at all."""
        cos, sin = self.base.rotary_emb(embedded, packed.positions, *(kind or ()))  # [1, T, R]
        return (cos[0], sin[0]) if kind is not None else (torch.ones_like(cos[0]), torch.zeros_like(sin[0]))


class _Norm(NamedTuple):
    weight: torch.Tensor  # [d]
    eps: float


def _norm_of(module: Any) -> _Norm:
    """Gemma's weights are what is added to 1, in float32."""
    if hasattr(module, "variance_epsilon"):
        return _Norm(module.weight.data, module.variance_epsilon)
    return _Norm(1 + module.weight.data.float(), module.eps)


def _activation(config: PretrainedConfig) -> str:
    return getattr(config, "hidden_activation", None) or config.hidden_act


def _plain(layer: torch.nn.Linear, dtype: torch.dtype) -> bool:
    """Whether a layer's weight is ours to multiply by, and not kept in a way that only its own layer knows."""
    return isinstance(layer, QuantisedLinear) or layer.weight.dtype == dtype


class _Layer:
    def __init__(self, layer: LlamaDecoderLayer, config: PretrainedConfig):
        attention, mlp = layer.self_attn, layer.mlp
        joined, framed = hasattr(attention, "qkv_proj"), hasattr(layer, "pre_feedforward_layernorm")
        names = ["qkv_proj"] if joined else ["q_proj", "k_proj", "v_proj"]
        before = "pre_feedforward_layernorm" if framed else "post_attention_layernorm"
        self.norms = (_norm_of(layer.input_layernorm), _norm_of(getattr(layer, before)))
        behind = ["post_attention_layernorm", "post_feedforward_layernorm"] if framed else []
        self.behind = [_norm_of(getattr(layer, name)) for name in behind]
        self.qkv = _Joined([getattr(attention, name) for name in names])
        self.out = _Joined([attention.o_proj])
        self.gate_up = _Joined([mlp.gate_up_proj] if joined else [mlp.gate_proj, mlp.up_proj])
        self.down = _Joined([mlp.down_proj])
        self.linears = [w for product in (self.qkv, self.out, self.gate_up, self.down) for w in product.layers]
        self.gelu = _ACTIVATIONS[_activation(config)]
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.scaling: float = attention.scaling
        # some families say it of every layer, others once for all; a Llama whose config has such a key reads it not
        once = config.sliding_window if config.model_type in ("mistral", "phi3") else None
        self.window = getattr(attention, "sliding_window", once)
        self.softcap = getattr(attention, "attn_logit_softcapping", None)
        self.turn: tuple[str, ...] | None = () if getattr(attention, "use_rope", True) else None
        if "rope_theta" not in config.rope_parameters:  # one for every kind of layer
            self.turn = (attention.layer_type,)
        self.head_norms = None
        if hasattr(attention, "q_norm"):
            q, k = _norm_of(attention.q_norm), _norm_of(attention.k_norm)
            self.head_norms = HeadNorms(torch.stack([q.weight, k.weight]), q.eps)

    def __call__(
        self,
        s: torch.Tensor,  # [T, d] the residual stream before the last contribution
        delta: torch.Tensor | None,  # [T, d] that contribution
        given: _Given,
        unread: bool = False,  # whether nobody reads the last product
    ) -> tuple[torch.Tensor, torch.Tensor]:
        fp8 = given.fp8
        s, h, source, twin = self.normed(0, s, delta, self.qkv, fp8)
        qkv = self.qkv(h, fp8, source, twin)
        attended = attend_rotated(
            qkv, given.turn, self.heads, self.kv_heads, given.packed,
            self.scaling, self.window, self.softcap, self.head_norms,
        )  # fmt: skip
        attended = attended.flatten(1)
        if given.read is not None:  # behind the last attention nobody looks at other tokens
            s, attended = given.read.of(s), given.read.of(attended)
        with reading(self.linears, given.read):
            delta = self.behind_norm(0, self.out(attended, fp8), fp8)
            return self.mlp(s, delta, fp8, unread)

    def mlp(
        self, s: torch.Tensor, delta: torch.Tensor, fp8: Eight, unread: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The second half of a layer."""
        s, h, source, twin = self.normed(1, s, delta, self.gate_up, fp8)
        to_down = self.down.wants(s, fp8)
        if twin is not None and not self.gate_up.carries_experts:
            both, m = gated_product(h, self.gate_up.rounded(fp8), self.gate_up.bias, self.gelu, twin, *to_down)
        else:
            both = self.gate_up(h, fp8, source, twin)
            m = gated_unit(both, self.gelu, *to_down)
        delta = self.down(m, fp8, Source.gated(both, self.gelu), to_down.twin, unread and not self.behind)
        return s, self.behind_norm(1, delta, fp8)

    def summed(self, s: torch.Tensor, given: _Given) -> torch.Tensor:
        """The stream with this layer's contribution: one tensor to keep instead of two. Where the layer runs again
        its last product, a quarter of the work, is left out if nothing but the stream reads it."""
        s, delta = self(s, None, given, unread=torch.is_grad_enabled())
        return s + delta

    def normed(
        self, which: int, s: torch.Tensor, delta: torch.Tensor | None, product: _Joined, fp8: Eight
    ) -> tuple[torch.Tensor, torch.Tensor, Source, Rounded | None]:
        """The residual stream with ``delta``; its norm in the form that the product reads, and where it is from."""
        (weight, eps), wants = self.norms[which], product.wants(s, fp8)
        s, h, inverse = add_norm(s, delta, weight, eps, *wants, slope=delta is not None and self.goes_back(fp8))
        return s, h, Source.norm(s, inverse, weight), wants.twin

    def behind_norm(self, which: int, delta: torch.Tensor, fp8: Eight) -> torch.Tensor:
        return add_norm(delta, None, *self.behind[which], slope=_round_back(fp8))[1] if self.behind else delta

    def goes_back(self, fp8: Eight) -> bool:
        """Whether the gradient of what is added to the stream goes into a product in 8 bits next."""
        return _round_back(fp8) and not self.behind


def _round_back(fp8: Eight) -> bool:
    return fp8 == "both" and kernels_fp8.WITHIN


class _Wants(NamedTuple):
    """In what form a product reads its input."""

    twin: Rounded | None  # room for it in 8 bits
    plain: bool  # whether it is read as it is, too


class _Joined:
    """Linear layers that read the same input, as one product."""

    def __init__(self, layers: Sequence[torch.nn.Linear]):
        self.layers = layers
        self.bias: torch.Tensor | None = layers[0].bias
        if self.bias is not None and len(layers) > 1:
            self.bias = torch.cat([layer.bias.data for layer in layers])
        self.weight = self._join(layers)
        self._rounded: dict[str, EightBit] = {}

    @staticmethod
    def _join(layers: Sequence[torch.nn.Linear]) -> Weight:
        """[columns of all, n]"""
        quantised = [layer for layer in layers if isinstance(layer, QuantisedLinear)]
        if quantised:
            joint = joined(quantised) if len(quantised) == len(layers) > 1 else None
            kept = [layer.packed if isinstance(layer, QuantisedLinear) else layer.weight for layer in layers]
            return Resident(kept if joint is None else [joint], quantised[0].scratch)
        if len(layers) == 1:
            return layers[0].weight
        weight = torch.cat([layer.weight.data for layer in layers])
        for layer, part in zip(layers, weight.split([w.out_features for w in layers]), strict=True):
            layer.weight.data = part
        return weight

    def _in(self, fp8: Eight) -> Weight:
        """The weight in 8 bits where that is asked for and can be."""
        if fp8 == "off" or not isinstance(self.weight, torch.Tensor) or not EightBit.fits(self.weight):
            return self.weight
        return self.rounded(fp8)

    def rounded(self, fp8: Eight) -> EightBit:
        """Rounded when it is first asked for."""
        assert isinstance(self.weight, torch.Tensor)
        if fp8 not in self._rounded:
            self._rounded[fp8] = EightBit(self.weight, fp8 == "both")
        return self._rounded[fp8]

    @property
    def carries_experts(self) -> bool:
        return carries_experts(self.layers)

    def wants(self, like: torch.Tensor, fp8: Eight) -> _Wants:
        """Of an input with as many rows as ``like``."""
        weight = self._in(fp8)
        if not isinstance(weight, EightBit) or not kernels_fp8.WITHIN or not fused(like):
            return _Wants(None, True)
        return _Wants(room_for((len(like), weight.shape[1]), like.device), self.carries_experts)

    def __call__(
        self,
        x: torch.Tensor,
        fp8: Eight,
        source: Source | None = None,
        twin: Rounded | None = None,
        unread: bool = False,
    ) -> torch.Tensor:
        weight = self._in(fp8)
        if not self.carries_experts:
            return unread_product(x, weight) if unread else linear(x, weight, self.bias, twin)
        with torch.no_grad():
            y = x.new_empty(len(x), len(weight)) if unread else linear(x, weight, self.bias, twin)
        return with_experts(y, x, self.layers, weight, source)
