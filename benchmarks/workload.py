"""What the speed tests run: named model shapes with random weights, clients with a fixed length profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from fedweave.backbone.blocks import make_nf4
from fedweave.backbone.load import Backbone
from fedweave.backbone.prompts import Encoded, EncodedPrompt, PromptFormat
from fedweave.backbone.quantised import load_quantised
from fedweave.config import BackboneConfig, TrainingConfig
from fedweave.experts.layout import AdapterLayout
from fedweave.experts.mixture import Mixture
from fedweave.kernels.dequantise import Quantised
from fedweave.router.mlp import RouterLayout
from fedweave.training.batch import ClientData, Lane
from fedweave.training.lockstep import LockstepTrainer

TARGETS = ("q_proj", "v_proj")
EVERY = ("all-linear",)
EXPERTS, RANK, ALPHA, DROPOUT = 4, 8, 16, 0.1
MANY = 32  # experts, where there are many

# (prompt mean, sd, answer mean, sd) in tokens: CoEdIT, GSM8K, TweetEval, ARC-C
PROFILE = ((60, 25, 30, 12), (95, 30, 120, 50), (65, 12, 2, 0), (85, 25, 2, 0))


@dataclass(frozen=True)
class Shape:
    """A Llama-type architecture by its sizes."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    inner: int
    vocabulary: int


SHAPES = {
    "tiny": Shape(128, 4, 4, 2, 32, 384, 2048),
    "135m": Shape(576, 30, 9, 3, 64, 1536, 49_152),  # SmolLM2-135M
    "0.5b": Shape(896, 24, 14, 2, 64, 4864, 151_936),  # Qwen2.5-0.5B
    "3b": Shape(3072, 28, 24, 8, 128, 8192, 128_256),  # Llama-3.2-3B
    "8b": Shape(4096, 32, 32, 8, 128, 14_336, 128_256),  # Llama-3.1-8B, but one matrix for input and output
}


def random_model(shape: Shape, device: torch.device, dtype: torch.dtype):
    """A frozen model of this shape; the weights' values do not matter for speed, only that they are not zero."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_width,
        intermediate_size=shape.inner,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(default)
    return model.requires_grad_(False).eval()


def in_four_bits(model):
    """The same model with linear layers that stay in 4 bits (NF4, double)."""
    weights = dict(model.named_parameters())

    def source(name: str, shape: tuple[int, ...]) -> Quantised | torch.Tensor:
        weight = weights[name]
        plain = weight.ndim != 2 or name.split(".")[-2] in ("embed_tokens", "lm_head")
        return weight.data if plain else make_nf4(weight.data, double=True)

    return load_quantised(model.config, source, model.dtype, model.device).requires_grad_(False).eval()


def backbone_of(model, fused: bool) -> Backbone:
    """A random model as a backbone; its tokenizer knows every token by its number."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = WordLevel({str(i): i for i in range(model.config.vocab_size)}, unk_token="0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="0")
    prompts = PromptFormat(tokenizer, BackboneConfig(prompt="plain"))
    return Backbone(model, tokenizer, prompts, "random", "", next(model.parameters()).device, fused)


def make_training(
    backbone: Backbone,
    clients: list[ClientData],
    plan: list[list[np.ndarray]],
    graphs: bool,
    targets: Sequence[str] = TARGETS,
    checkpointing: Literal["on", "off"] = "off",
    experts: int = EXPERTS,
    rank: int = RANK,
    fp8: Literal["off", "forward", "both"] = "off",
) -> tuple[LockstepTrainer, list[Lane]]:
    """FedWeave's trainer with a soft mixture on the backbone, and a lane for every client."""
    layers, device = backbone.linear_layers(targets), backbone.device
    layout, router = AdapterLayout.of(layers, rank, experts), RouterLayout(backbone.width, 512, experts)
    config = TrainingConfig(lr=1e-4, cuda_graphs=graphs, checkpointing=checkpointing, fp8=fp8)
    trainer = LockstepTrainer(backbone, Mixture(layers, layout, ALPHA), router, config, DROPOUT, 5e-5)
    theta, phi = layout.initial(0).to(device), router.initial(0).to(device)
    return trainer, [Lane(c, p, theta, phi, (k,)) for k, (c, p) in enumerate(zip(clients, plan, strict=True))]


def make_clients(shape: Shape, clients: int, examples: int, seed: int = 0) -> list[ClientData]:
    """Clients that cycle through the four tasks' lengths, with random tokens and random features."""
    rng = np.random.default_rng(seed)
    out = []
    for k in range(clients):
        rows = []
        for i in range(examples):
            prompt, prompt_sd, answer, answer_sd = PROFILE[i % 4]
            p = max(8, round(rng.normal(prompt, prompt_sd)))
            a = max(2, round(rng.normal(answer, answer_sd)))
            rows.append(_example(rng.integers(3, shape.vocabulary, p + a), p))
        features = torch.from_numpy(rng.standard_normal((examples, shape.width))).float()
        out.append(ClientData(f"client-{k}", rows, features))
    return out


def _example(ids: np.ndarray, prompt: int) -> Encoded:
    ids = ids.astype(np.int32)
    return Encoded(EncodedPrompt(ids[:prompt], (0, prompt), False), ids, prompt)


def schedules(clients: list[ClientData], steps: int, batch: int, seed: int = 1) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [[rng.choice(len(c), batch, replace=False) for _ in range(steps)] for c in clients]


def filled_up(
    clients: list[ClientData], plan: list[list[np.ndarray]]
) -> tuple[list[ClientData], list[list[np.ndarray]]]:
    """The same work as padding every step to its longest sequence: prompts grow to that length."""
    rng = np.random.default_rng(2)
    steps, batch = len(plan[0]), len(plan[0][0])
    longest = [
        max(len(c.examples[i].ids) for c, p in zip(clients, plan, strict=True) for i in p[s]) for s in range(steps)
    ]
    grown = []
    for client, own in zip(clients, plan, strict=True):
        rows = []
        for s, indices in enumerate(own):
            for i in indices:
                example = client.examples[i]
                extra = longest[s] - len(example.ids)
                ids = np.concatenate([rng.integers(3, 1000, extra), example.ids])
                rows.append(_example(ids, example.answer_start + extra))
        features = client.features[np.concatenate(own)]
        grown.append(ClientData(client.name, rows, features))
    order = [[np.arange(s * batch, (s + 1) * batch) for s in range(steps)] for _ in clients]
    return grown, order


def real_tokens(clients: list[ClientData], plan: list[list[np.ndarray]]) -> int:
    return sum(len(c.examples[i].ids) for c, p in zip(clients, plan, strict=True) for step in p for i in step)


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measured FLOP/s of one large matrix product: the machine's ceiling."""
    from benchmarks.clock import seconds

    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / seconds(lambda: a @ b, device, repeats=10)
