"""Weights as llama.cpp keeps them: an adapter, or a whole model, as one GGUF file.

An adapter's B has the rows of the layer that it is added to and changes their order with them
(``backbone/gguf_names.py``). Every file is read back and compared with what was to be written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedweave.backbone.gguf_names import ARCHITECTURES, added_to_norms, name_of, names_of, reordered
from fedweave.backbone.load import Backbone
from fedweave.backbone.quantised import kept_weights, tied
from fedweave.bundle.adapter import rank_and_alpha
from fedweave.bundle.card import base_model
from fedweave.bundle.gguf_tokens import write_tables
from fedweave.errors import UserError
from fedweave.schema import Description

if TYPE_CHECKING:
    from gguf import GGUFWriter, TensorNameMap
    from transformers import PretrainedConfig, PreTrainedModel

# What the gguf package can write, and how far off a tensor may be, root mean square by root mean square: half a
# step at most, where one number of a block of 32 is as large as all others together.
QUANTISATIONS = {
    "F32": 1e-6, "F16": 1e-3, "BF16": 4e-3, "Q8_0": 0.014, "Q5_1": 0.11, "Q5_0": 0.11, "Q4_1": 0.21, "Q4_0": 0.21,
}  # fmt: skip

Arrays = Iterator[tuple[str, str, np.ndarray]]  # (name, quantisation, float32 values) of every tensor


def write_lora(
    path: Path, tensors: Mapping[str, torch.Tensor], description: Description, backbone: Backbone
) -> None:
    """An adapter in PEFT's names and shapes as a GGUF LoRA file."""
    config = _config(backbone.model)
    names = names_of(config)

    def arrays() -> Arrays:
        for key, tensor in tensors.items():
            layer, factor = re.fullmatch(r"base_model\.model\.(.+)\.lora_(A|B)\.weight", key).groups()  # type: ignore[union-attr]
            if factor == "B":  # [out, r]
                tensor = reordered(f"{layer}.weight", tensor, config)
            yield f"{_named(names, f'{layer}.weight')}.lora_{factor.lower()}", "F32", _array(tensor)

    def describe(writer: GGUFWriter) -> None:
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", rank_and_alpha(tensors, description)[1])
        writer.add_name(f"{path.stem} of a FedWeave model on {base_model(description)}")

    _write(path, config, describe, arrays)


def write_model(path: Path, backbone: Backbone, quantisation: str, name: str) -> None:
    """A whole model, with its tokenizer and the template of training."""
    model, config = backbone.model, _config(backbone.model)
    names, factors = names_of(config), rotary_factors(model)
    shared = tied(model)

    def arrays() -> Arrays:
        if factors is not None:
            yield "rope_freqs.weight", "F32", factors
        for key, tensor in kept_weights(model, unpacked=True):
            if key == "lm_head.weight" and shared:
                continue
            array = _array(reordered(key, tensor, config)) + added_to_norms(key, config)
            yield _named(names, key), _kept_as(key, array, quantisation), array

    def describe(writer: GGUFWriter) -> None:
        from gguf import LlamaFileType

        writer.add_type("model")
        writer.add_name(name)
        writer.add_file_type(LlamaFileType[f"{'ALL' if quantisation == 'F32' else 'MOSTLY'}_{quantisation}"])
        writer.add_quantization_version(2)
        _shape(writer, config)
        write_tables(writer, backbone.prompts, len(backbone.head))

    _write(path, config, describe, arrays)


def rotary_factors(model: PreTrainedModel) -> np.ndarray | None:
    """[D / 2] by how much slower each pair rotates than its base says (Llama 3 stretches the slow ones); None: as
    fast."""
    config = _config(model)
    parameters = config.rope_parameters
    kinds = parameters.values() if "rope_theta" not in parameters else [parameters]
    if all(kind.get("rope_type", "default") == "default" for kind in kinds):
        return None
    rotary = model.base_model.rotary_emb
    if ARCHITECTURES[config.model_type] != "llama" or rotary.attention_scaling != 1:
        raise _unknown(f"rotary positions of the kind {parameters.get('rope_type')!r} in {config.model_type}")
    plain = parameters["rope_theta"] ** -np.linspace(0, 1, len(rotary.inv_freq), endpoint=False)
    return (plain / rotary.inv_freq.cpu().numpy()).astype(np.float32)


def _shape(writer: GGUFWriter, config: PretrainedConfig) -> None:
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    parameters = config.rope_parameters
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(_context(config))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(parameters.get("full_attention", parameters)["rope_theta"])
    if not config.model_type.startswith("gemma"):
        return
    if config.query_pre_attn_scalar != width:  # llama.cpp knows no other scale
        raise _unknown(f"attention scaled by {config.query_pre_attn_scalar} and not by the width of a head")
    if config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if "sliding_attention" in parameters:
        writer.add_rope_freq_base_swa(parameters["sliding_attention"]["rope_theta"])
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.attn_logit_softcapping:
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)


def _context(config: PretrainedConfig) -> int:
    """Tokens that a file is good for: llama.cpp knows windows of Gemma alone, and up to a window's length there is
    none."""
    window = None if config.model_type.startswith("gemma") else getattr(config, "sliding_window", None)
    return min(config.max_position_embeddings, window or config.max_position_embeddings)


# -------------------------------------------------------------------------------------- files


def _write(
    path: Path, config: PretrainedConfig, describe: Callable[[GGUFWriter], None], arrays: Callable[[], Arrays]
) -> None:
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
    from gguf.quants import dequantize, quantize

    writer = GGUFWriter(str(path), ARCHITECTURES[config.model_type])
    describe(writer)
    for name, kind, array in arrays():
        quantised = quantize(array, GGMLQuantizationType[kind])
        writer.add_tensor(name, quantised, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    written = {tensor.name: tensor for tensor in GGUFReader(str(path)).tensors}
    for name, kind, array in arrays():
        found = dequantize(written[name].data, written[name].tensor_type).reshape(array.shape)
        off = np.linalg.norm(found - array) / (np.linalg.norm(array) or 1.0)
        if not off <= QUANTISATIONS[kind]:
            raise UserError(f"{path.name}: {name} read back is off by {off:.1e}, more than {kind} loses.")


def _kept_as(key: str, array: np.ndarray, quantisation: str) -> str:
    """Vectors stay exact, rows that no block divides take 16 bits, and the vocabulary takes 8 at least."""
    if array.ndim == 1:
        return "F32"
    if quantisation.startswith("Q") and array.shape[-1] % 32:
        return "F16"
    if quantisation.startswith(("Q4", "Q5")) and key.split(".")[-2] in ("embed_tokens", "lm_head"):
        return "Q8_0"
    return quantisation


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().contiguous().numpy()


def _config(model: PreTrainedModel) -> PretrainedConfig:
    config: PretrainedConfig = model.config
    if config.model_type not in ARCHITECTURES:
        raise _unknown(f"the architecture {config.model_type}")
    return config


def _named(names: TensorNameMap, key: str) -> str:
    if (found := name_of(names, key)) is None:
        raise _unknown(f"a tensor {key}")
    return found


def _unknown(what: str) -> UserError:
    return UserError(
        f"FedWeave cannot write {what} as GGUF; export a dense model with --merge alone and convert that folder "
        "with llama.cpp's convert_hf_to_gguf.py, or a bundle's expert with its convert_lora_to_gguf.py."
    )
