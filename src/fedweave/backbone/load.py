"""The frozen backbone: loaded once, checked once, and never changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedweave.backbone import packing
from fedweave.backbone.announced import check_announced, in_folder, in_gguf
from fedweave.backbone.catalog import Located, locate
from fedweave.backbone.decoder import Decoder, Eight
from fedweave.backbone.device import pick_device, pick_dtype
from fedweave.backbone.library import LibraryLayers
from fedweave.backbone.packing import Packed
from fedweave.backbone.positions import steady_positions
from fedweave.backbone.prompts import PromptFormat
from fedweave.backbone.quantised import QuantisedLinear, numbers_of, packed_weights
from fedweave.backbone.targets import linear_layers
from fedweave.backbone.weights import load_model, weights_hash
from fedweave.config import BackboneConfig
from fedweave.errors import UserError, first_line
from fedweave.kernels.frozen import Weight, times
from fedweave.kernels.lanes import Rows

NOTES = {"nf4": "its linear layers in 4 bits (NF4)", "nf4-double": "its linear layers in 4 bits (NF4, double)"}

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerFast


@dataclass
class Backbone:
    """A causal language model with every parameter frozen, its tokenizer and its prompt format."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    prompts: PromptFormat
    name: str
    note: str
    device: torch.device
    fused: bool = True  # run known architectures through fused operations

    def __post_init__(self) -> None:
        packing.register()
        self.model.requires_grad_(False)
        self.model.eval()
        self.width = self.model.config.get_text_config().hidden_size
        output = self.model.get_output_embeddings()
        self.head: Weight = output.resident if isinstance(output, QuantisedLinear) else output.weight  # [V, d]
        self.softcap = getattr(self.model.config, "final_logit_softcapping", None)
        # SDPA ignores Gemma-2's attention soft-cap, so that family decodes with the written-out kernel.
        capped = getattr(self.model.config, "attn_logit_softcapping", None) is not None
        self._decode_attention = "eager" if capped else "sdpa"
        self.model.set_attn_implementation(packing.ATTENTION)
        self.decoder = Decoder(self.model) if self.fused and Decoder.fits(self.model) else None
        self._library = LibraryLayers(self.model)
        # tokens that the model was made for, where it says so
        self.longest = steady_positions(self.model, self.prompts.max_length, self.name)
        self._check_logits()

    @property
    def dtype(self) -> torch.dtype:
        return self.head.dtype

    @cached_property
    def parameters(self) -> int:
        """How many weights there are."""
        return numbers_of(self.model)

    @cached_property
    def quantised(self) -> bool:
        """Whether some weights stay so."""
        return bool(packed_weights(self.model))

    @cached_property
    def weights_hash(self) -> str:
        """Every bit of the weights, for a run that looks before and after; use alone does not wait for it."""
        return weights_hash(self.model)

    @cached_property
    def identity(self) -> dict[str, str]:
        """Hashes of the weights and of the tokenizer with its rendering: what all sites share. They are
        the same in float32 and bfloat16, so that a model trained on a GPU answers on a laptop."""
        rendering = json.dumps([self._vocabulary, self.prompts.settings()], sort_keys=True)
        return {
            "backbone": weights_hash(self.model, portable=True),
            "tokenizer": hashlib.sha256(rendering.encode()).hexdigest(),
        }

    @cached_property
    def fingerprint(self) -> str:
        """One name for weights, tokenizer and rendering: what must be equal for a checkpoint to fit."""
        parts = [self.identity["backbone"], self._vocabulary, self.prompts.settings()]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]

    @cached_property
    def _vocabulary(self) -> str:
        return hashlib.sha256(json.dumps(self.tokenizer.get_vocab(), sort_keys=True).encode()).hexdigest()

    def check_fp8(self, asked: Eight) -> None:
        """A backbone that cannot be multiplied in 8 bits says so before anything is computed."""
        if asked == "off":
            return
        if self.decoder is None:
            raise UserError(
                f"training.fp8={asked}: {self.name} runs through transformers' layers, which know no FP8."
            )
        if self.device.type != "cuda" or torch.cuda.get_device_capability(self.device) < (8, 9):
            raise UserError(
                f"training.fp8={asked} needs a GPU of NVIDIA's Ada, Hopper or later; leave it off here."
            )
        if self.dtype != torch.bfloat16:
            raise UserError(f"training.fp8={asked} needs backbone.dtype=bfloat16, not {self.dtype}.")

    @property
    def end_ids(self) -> list[int]:
        """Tokens that end an answer: the one that was trained, and the tokenizer's own end of text."""
        ends = [self.prompts.end_id, self.tokenizer.eos_token_id]
        return list(dict.fromkeys(i for i in ends if i is not None))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, d] to logits [n, V], with the soft-cap of the families that have one."""
        logits = times(hidden, self.head)
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits

    def hidden(
        self,
        packed: Packed,
        cache: Cache | None = None,
        again: bool = False,
        fp8: Eight = "off",
        read: Rows | None = None,
    ) -> torch.Tensor:
        """Last hidden states after the final norm, [T, d] or those that are ``read`` [n, d]; a cache keeps every
        layer's keys and values. ``again``: a layer keeps its input alone for the backward pass, and runs a second
        time there."""
        if self.decoder is not None and cache is None:
            return self.decoder.hidden(packed, again, fp8, read)
        with self._library.running(again):
            out = self.model.base_model(
                input_ids=packed.ids,
                position_ids=packed.positions,
                past_key_values=cache,
                use_cache=cache is not None,
                packed=packed,
            )
        hidden = out.last_hidden_state[0]
        return hidden if read is None else read.of(hidden)

    def next_hidden(self, ids: torch.Tensor, positions: torch.Tensor, cache: Cache) -> torch.Tensor:
        """One decoding step: newest tokens [rows] at their positions [rows] to hidden states [rows, d]."""
        out = self.model.base_model(
            input_ids=ids[:, None],
            position_ids=positions[:, None],
            past_key_values=cache,
            use_cache=True,
            last=positions,
        )
        return out.last_hidden_state[:, 0]

    @contextmanager
    def decoding(self) -> Iterator[PreTrainedModel]:
        """The model with an attention that knows padding and a key-value cache."""
        self.model.set_attn_implementation(self._decode_attention)
        try:
            yield self.model
        finally:
            self.model.set_attn_implementation(packing.ATTENTION)

    def longest_prompt(self, max_new_tokens: int) -> int:
        """Tokens of a prompt that leave room for an answer: as many as in training at least."""
        return max(self.prompts.max_length, (self.longest or 0) - max_new_tokens)

    def check_answer(self, max_new_tokens: int, named: str = "max_new_tokens") -> None:
        """An answer must fit what the model was made for."""
        if self.longest and max_new_tokens > self.longest:
            takes = f"the {self.longest} tokens that {self.name} takes"
            raise UserError(f"{named}={max_new_tokens} is more than {takes}.")

    def linear_layers(self, targets: Sequence[str]) -> dict[str, torch.nn.Linear]:
        """The layers named by ``experts.target_modules``, in model order."""
        return linear_layers(self.model, targets, self.name)

    def _check_logits(self) -> None:
        """Loss takes the LM head apart; make sure that this model's head is nothing but that."""
        # Ordinary words: on special tokens a model can be so ill-conditioned that bfloat16 rounding decides.
        vocabulary = self.head.shape[0]
        ids = np.linspace(0.1 * vocabulary, 0.6 * vocabulary, 16).astype(np.int32)
        with torch.no_grad(), self.decoding() as model:
            expected = model(input_ids=torch.from_numpy(ids).long()[None].to(self.device)).logits[0].float()
        with torch.no_grad():
            logits = self.logits(self.hidden(packing.pack([[ids]], self.device))).float()
        close = torch.nn.functional.cosine_similarity(logits, expected, dim=-1).median().item()
        scale = (logits.norm() / expected.norm()).item()
        if not (close > 0.99 and abs(scale - 1) < 0.02):
            raise UserError(
                f"{self.name} computes its logits in a way that FedWeave does not know "
                f"({self.model.config.model_type}); Llama, Qwen, Gemma, Mistral, Phi-3 and SmolLM are tested."
            )


def _located(config: BackboneConfig) -> Located:
    return locate(config.model, config.revision, config.weights == "stored")


def load_backbone(config: BackboneConfig) -> Backbone:
    from transformers import AutoConfig
    from transformers.utils import logging as hf_logging

    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    located = _located(config)
    hf_logging.disable_progress_bar()
    tokenizer = load_tokenizer(located.path, config.model)
    try:
        announced = AutoConfig.from_pretrained(located.path, trust_remote_code=False)
        found = in_folder(Path(located.path)) if located.gguf is None else in_gguf(located.gguf)
        check_announced(announced, found, f"backbone.model={config.model}")
        model = load_model(config, located, announced, dtype, device)
    except UserError:
        raise
    except Exception as error:  # damaged files fail in as many ways as there are lines in a library
        reason = first_line(error)
        raise UserError(f"backbone.model={config.model} cannot be loaded: {reason}") from error
    if not getattr(model, "_supports_attention_backend", False):
        raise UserError(
            f"backbone.model={config.model}: the architecture {type(model).__name__} does not let its attention "
            "be replaced, which packed training needs; choose a Llama, Qwen, Gemma or Mistral type model."
        )
    return Backbone(
        model=model,
        tokenizer=tokenizer,
        prompts=PromptFormat(tokenizer, config),
        name=config.model,
        note="; ".join(filter(None, [located.note, NOTES.get(config.weights, "")])),
        device=device,
        fused=config.fused,
    )


def load_prompts(config: BackboneConfig) -> PromptFormat:
    """How the model that ``config`` names reads text, without its weights."""
    return PromptFormat(load_tokenizer(_located(config).path, config.model), config)


def load_tokenizer(path: str, name: str) -> PreTrainedTokenizerFast:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:
        raise UserError(f"backbone.model={name} cannot be loaded: {first_line(error)}") from error
    if isinstance(length := tokenizer.model_max_length, bool) or not isinstance(length, (int, float)):
        raise UserError(
            f"backbone.model={name}: model_max_length in its tokenizer_config.json is {length!r} and no number; "
            "correct it, or remove that line."
        )
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(f"backbone.model={name} has no fast tokenizer, which FedWeave needs.")
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        raise UserError(f"backbone.model={name}: its tokenizer has neither a padding nor an end token.")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
