"""What a training step takes of memory, counted from shapes: for ``clients_per_step=auto`` and ``fedweave budget``.

    backbone      the frozen weights; where they are quantised, also the largest of them unpacked
    clients       of every trained number a float32 master, start, gradient and two moments, and in half precision a
                  copy of it and of its gradient
    activations   what every layer keeps for the backward pass
    passing       what lives for a moment, at worst: a block of logits, or gradients within the last layer

A layer keeps, per token, in numbers of the backbone's precision (d hidden width, q and k the widths of all query
and key heads, I the MLP's, R̄ = M·r + R the rows of a stacked expert):

                                            backbone/decoder.py     transformers, in half precision
    residual stream, inputs of norms        2 d (Gemma: 4 d)        2 d for each norm: they are float32
    inputs of adapted layers                –, computed again       d (q, k, v), d (gate, up), I (down)
    q, k, v, what attention gives           2 q + 2 k               2 q + 2 k
    q, k, v before norms of heads           q + 2 k                 2 q + 2 k
    gate and up, and what they give         2 I                     3 I
    A x and g ⊙ A x of adapted layers       2 R̄ each                2 R̄ each
    sums of softmax and norms, float32      heads + 2               heads + 2

With checkpointing it keeps d, and one layer at a time keeps all of that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fedweave.kernels.attention import WIDEST
from fedweave.kernels.entropy import BLOCK_ELEMENTS
from fedweave.kernels.frozen import AT_ONCE

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Measured, not derived (docs/budget.md): what libraries keep on a GPU for their products; on a CPU Python with
# torch and transformers, and what the C library's allocator keeps in holes between tensors.
_LIBRARIES = 0.15 * 2**30
_PROCESS = 490 * 2**20
_HOLES = 1.5


@dataclass(frozen=True)
class Step:
    """So many lanes that march together."""

    lanes: int
    tokens: float  # of all lanes
    trained: int  # numbers that each lane trains
    answers: float = 1 / 3  # share of the tokens that are predicted
    longest: float = 3.0  # sequence, as a multiple of the mean one
    mean: float = 115.0  # tokens of a sequence
    spread: float = 1.0  # by how much steps differ: the longest of ten has 1 + spread / √n of the mean, n sequences

    def times(self, lanes: int) -> Step:
        """So many of it."""
        return replace(self, lanes=lanes * self.lanes, tokens=lanes * self.tokens)

    @property
    def most_tokens(self) -> float:
        """Of the longest of ten such steps. Lengths of mixed examples vary by about 0.65 of their mean, sums of n
        by 0.65 / √n of theirs, and the largest of ten lies 1.54 deviations above the mean: a spread of 1."""
        return self.tokens * (1 + self.spread * (self.mean / max(self.tokens, self.mean)) ** 0.5)


@dataclass(frozen=True)
class StepMemory:
    """The count for one model with what it carries."""

    config: PretrainedConfig  # of its text side
    fused: bool  # whether backbone/decoder.py runs it
    element: int  # bytes of a number
    adapted: tuple[str, ...] = ()  # names of the layers that carry experts
    rows: int = 0  # M·r + R

    # ---------------------------------------------------------------------------------- per token

    @property
    def _head(self) -> int:
        return getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads

    @property
    def _widths(self) -> tuple[int, int, int, int]:
        """d, q, k and I."""
        c = self.config
        return (
            c.hidden_size,
            c.num_attention_heads * self._head,
            c.num_key_value_heads * self._head,
            c.intermediate_size,
        )

    def layer_numbers(self, step: Step | None = None) -> float:
        """What one layer keeps of a token."""
        d, q, k, inner = self._widths
        kind, wide = self.config.model_type, 4 / self.element  # a float32 in numbers of this precision
        reduced = 2 * self.rows * len(self.adapted) / self.config.num_hidden_layers
        kept = 2 * q + 2 * k + reduced + (self.config.num_attention_heads + 2) * wide
        kept += self._scores(step)
        normed, framed = kind.startswith(("qwen3", "gemma3")), kind.startswith("gemma")
        if self.fused:
            return kept + (4 if framed else 2) * d + 2 * inner + normed * (q + 2 * k)
        norms = (4 if framed else 2) * d + normed * (q + k)
        if self.element == 4:
            norms = 2 * d  # the stream itself
        kinds = {name.split(".")[-1] for name in self.adapted}
        kept += d * bool(kinds & {"q_proj", "k_proj", "v_proj", "qkv_proj"})
        kept += d * bool(kinds & {"gate_proj", "up_proj", "gate_up_proj"}) + inner * ("down_proj" in kinds)
        return kept + norms * wide + 3 * inner

    def _scores(self, step: Step | None) -> float:
        """Where no kernel caps the scores of attention they are written out, for sequences padded to the longest:
        tanh and softmax in float32, softmax once more, and padded q, k and v."""
        if step is None or not getattr(self.config, "attn_logit_softcapping", None) or self._head <= WIDEST:
            return 0.0
        written = self.config.num_attention_heads * step.longest * step.mean * (1 + 8 / self.element)
        return step.longest * (written + 3 * self._widths[1])

    def token_bytes(self, checkpointing: bool = False, step: Step | None = None) -> float:
        """Bytes that a token keeps for the backward pass."""
        layers, one = self.config.num_hidden_layers, self.layer_numbers(step)
        last = 2 * self._widths[0]  # of the final norm: its input and what it gives
        return self.element * (last + (layers * self._widths[0] + one if checkpointing else layers * one))

    @property
    def passing_bytes(self) -> float:
        """Bytes of a token's gradients at a layer's widest place: between the MLP's products, or in attention."""
        d, q, k, inner = self._widths
        return self.element * (2 * d + max(3 * inner, 3 * q + 4 * k))

    # ---------------------------------------------------------------------------------- at the peak

    def training(self, step: Step, checkpointing: bool = False, cpu: bool = False) -> dict[str, float]:
        """Bytes beside the backbone at the peak of a step: tensors on a GPU; on a CPU, which also holds logits and
        their gradient at once, with the holes between them."""
        tokens = step.most_tokens
        block = BLOCK_ELEMENTS["cpu" if cpu else "cuda"]
        logits = min(block, step.answers * tokens * self.config.vocab_size) * self.element * (1 + cpu)
        if checkpointing:  # where logits are made, the layer that runs again has not begun
            logits -= tokens * self.element * self.layer_numbers(step)
        per_number = 20 + (2 * self.element if self.element < 4 else 0)
        return {
            "clients": float(step.lanes * step.trained * per_number),
            "activations": tokens * self.token_bytes(checkpointing, step) * (_HOLES if cpu else 1.0),
            "passing": max(logits, tokens * self.passing_bytes) + (0 if cpu else _LIBRARIES),
        }

    def process(self, weights: float, step: Step, checkpointing: bool = False) -> dict[str, float]:
        """The same of a CPU's whole process, with a backbone whose ``weights`` take so many bytes."""
        return {"process": float(_PROCESS), "backbone": weights, **self.training(step, checkpointing, cpu=True)}

    def loading(self, weights: float) -> float:
        """Bytes of a CPU's process while plain weights are as they were read and, joined, as they will be."""
        return _PROCESS + 2 * weights + self.joined

    # ---------------------------------------------------------------------------------- beside the weights

    @property
    def joined(self) -> float:
        """Bytes of the products that ``backbone/decoder.py`` joins, which a CPU keeps in both forms."""
        d, q, k, inner = self._widths
        return float(
            self.config.num_hidden_layers * d * (q + 2 * k + 2 * inner) * self.element if self.fused else 0
        )

    def rounded(self, fp8: str) -> float:
        """Bytes of the frozen products' second and third form, in 8 bits (``training.fp8``)."""
        d, q, k, inner = self._widths
        numbers = self.config.num_hidden_layers * d * (2 * q + 2 * k + 3 * inner)
        return float(numbers * {"off": 0, "forward": 1, "both": 2}[fp8] * self.fused)

    def unpacked(self, head: bool, cpu: bool = False) -> float:
        """Bytes in which quantised weights take turns; ``head``: the output layer is one of them."""
        d, q, k, inner = self._widths
        largest = max(d * (q + 2 * k), 2 * d * inner, head * d * self.config.vocab_size)
        return float(min(AT_ONCE["cpu" if cpu else "cuda"], largest) * self.element)


def in_all(parts: dict[str, float]) -> float:
    return sum(parts.values())
