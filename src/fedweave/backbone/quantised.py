"""A backbone whose matrices stay quantised (``backbone.weights``): as a GGUF file has them, or as NF4 made here.

Linear layers are quantised. Norms and biases are plain numbers. The embedding and the output layer are as the GGUF
file has them; with NF4 they are plain numbers. No more than one matrix is ever unpacked: reading goes tensor by
tensor, and a product unpacks its weight into scratch memory that all share (``kernels/frozen.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fedweave.backbone.announced import check_read, stored_tensors
from fedweave.backbone.blocks import GGUF, kept_bytes, make_nf4, nf4_bits, read_blocks
from fedweave.backbone.gguf_names import ARCHITECTURES, added_to_norms, name_of, names_of, order_of
from fedweave.kernels import INTERPRETED
from fedweave.kernels.dequantise import Quantised, unpacks_groups
from fedweave.kernels.frozen import Resident, Scratch, linear

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# From transformers' name and shape of a weight to what it is
Source = Callable[[str, tuple[int, ...]], "Quantised | torch.Tensor"]


class QuantisedLinear(nn.Linear):
    """A frozen linear layer whose weight stays quantised."""

    def __init__(self, packed: Quantised, scratch: Scratch, bias: torch.Tensor | None = None):
        nn.Module.__init__(self)  # a Linear's own would make room for its numbers
        self.scratch = scratch
        self.out_features, self.in_features = packed.shape
        self.keep(packed)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))

    def keep(self, packed: Quantised) -> None:
        """The weight as it is kept from now on."""
        self.packed, self.resident = packed, Resident([packed], self.scratch)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """Its numbers, in memory of their own: for those who look at it, not for products."""
        return self.packed.dense(self.scratch.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.packed.format.name}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.resident, self.bias)


def joined(layers: Sequence[QuantisedLinear]) -> Quantised | None:
    """The layers' weights below one another, if their groups can lie so; then each layer keeps its rows of it."""
    joint = Quantised.joined([layer.packed for layer in layers])
    if joint is not None:
        start = 0
        for layer in layers:
            layer.keep(joint.rows(slice(start, start + layer.out_features)))
            start += layer.out_features
    return joint


SCALED = ("Gemma2TextScaledWordEmbedding", "Gemma3TextScaledWordEmbedding")  # embeddings times embed_scale


class QuantisedEmbedding(nn.Embedding):
    """An embedding of which only the rows that are asked for are unpacked."""

    def __init__(self, packed: Quantised, dtype: torch.dtype, like: nn.Embedding):
        nn.Module.__init__(self)
        self.packed, self.dtype, self.padding_idx = packed, dtype, like.padding_idx
        self.num_embeddings, self.embedding_dim = packed.shape
        self.plain = [like]  # what it is without its weight; in a list, for it is no part of the model
        self.register_buffer("embed_scale", getattr(like, "embed_scale", None), persistent=False)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        return self.packed.dense(self.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.packed.format.name}"

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.packed.rows(ids.flatten()).dense(self.dtype).unflatten(0, ids.shape)
        return rows if self.embed_scale is None else rows * self.embed_scale.to(self.dtype)


# -------------------------------------------------------------------------------------- loading


def load_quantised(
    config: PretrainedConfig, source: Source, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """The model of a configuration, every weight from ``source`` as it comes."""
    from transformers import AutoModelForCausalLM

    with _MatricesLater():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    scratch = Scratch(device, dtype)
    for name, parameter in list(model.named_parameters()):  # what is tied comes once
        place, leaf = name.rpartition(".")[::2]
        module, found = model.get_submodule(place), source(name, tuple(parameter.shape)).to(device)
        if isinstance(found, Quantised) and in_groups(device):
            found = found.beside()
        if isinstance(found, Quantised) and type(module) is nn.Linear:
            model.set_submodule(place, QuantisedLinear(found, scratch, module.bias))
        elif isinstance(found, Quantised) and _known(module):
            model.set_submodule(place, QuantisedEmbedding(found, dtype, module))
        else:
            numbers = found.dense(dtype) if isinstance(found, Quantised) else found.to(dtype)
            setattr(module, leaf, nn.Parameter(numbers, requires_grad=False))
    _tie(model, scratch)
    return model.to(device)


def in_groups(device: torch.device) -> bool:
    """Whether weights that may lie in groups do so here: where no Triton kernel unpacks them."""
    return device.type == "cpu" and not INTERPRETED and unpacks_groups()


def _known(module: nn.Module) -> bool:
    """Whether this is an embedding whose rows are its weights', or Gemma's, which scales them."""
    return type(module) is nn.Embedding or type(module).__name__ in SCALED


def _tie(model: PreTrainedModel, scratch: Scratch) -> None:
    if not model.config.get_text_config().tie_word_embeddings:
        return
    embedding = model.get_input_embeddings()
    if isinstance(embedding, QuantisedEmbedding):
        model.set_output_embeddings(QuantisedLinear(embedding.packed, scratch))
    else:
        model.tie_weights()


class _MatricesLater(TorchFunctionMode):
    """In here a module's matrices take no memory; vectors and what is computed from a config are there."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.empty and args and isinstance(args[0], tuple) and len(args[0]) == 2:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def from_gguf(path: Path, config: PretrainedConfig) -> Source:
    """The weights of a GGUF file, as they are kept there."""
    if config.model_type not in ARCHITECTURES:
        raise ValueError(f"its architecture, {config.model_type}, is read with backbone.weights=dense alone")
    tensors = {tensor.name: tensor for tensor in stored_tensors(path)}
    names = names_of(config)

    def source(key: str, shape: tuple[int, ...]) -> Quantised | torch.Tensor:
        stored = tensors.get(name_of(names, key) or "")
        if stored is None:
            raise ValueError(f"it lacks {key}")
        if stored.shape != shape:
            raise ValueError(f"{stored.name} has another shape than the config says")
        data = torch.from_numpy(np.fromfile(path, np.uint8, stored.size, offset=stored.start))
        if stored.kind in _PLAIN:
            numbers = data.view(_PLAIN[stored.kind]).view(stored.shape)
            order = order_of(key, len(numbers), config)
            return (numbers if order is None else numbers[order]).float() - added_to_norms(key, config)
        if stored.kind not in GGUF:
            raise ValueError(
                f"it holds {stored.name} as {stored.kind}, which is read with backbone.weights=dense alone"
            )
        if len(shape) != 2 or shape[1] % GGUF[stored.kind][1]:
            raise ValueError(f"the rows of {stored.name} are no whole blocks")
        packed = read_blocks(stored.kind, data.view(shape[0], -1))
        order = order_of(key, shape[0], config)
        return packed if order is None else packed.rows(order)

    return source


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


_PLAIN_IN_NF4 = ("embed_tokens", "lm_head")


def as_nf4(folder: Path, double: bool, device: torch.device, shapes: PreTrainedModel) -> Source:
    """The weights of a folder of safetensors, those of linear layers as NF4, for a model of these ``shapes``."""
    from safetensors import safe_open

    files = [safe_open(file, "pt") for file in sorted(folder.glob("*.safetensors"))]
    places = {name: file for file in files for name in file.keys()}  # noqa: SIM118
    check_read(shapes, places.keys() - dict(shapes.named_parameters()).keys())
    plain = tuple(f"{layer}.weight" for layer in _PLAIN_IN_NF4)
    ends = [places[name].get_tensor(name) for name in places if name.endswith(plain)]
    if tied(shapes) and not all(torch.equal(end, ends[0]) for end in ends):
        raise ValueError("its output layer is not the embedding, as its config says: set tie_word_embeddings=false")

    def source(key: str, shape: tuple[int, ...]) -> Quantised | torch.Tensor:
        if key not in places:
            raise ValueError(f"the files lack {key}")
        found = places[key].get_tensor(key)
        if tuple(found.shape) != shape:
            raise ValueError(f"{key} has another shape than the config says")
        if not found.is_floating_point():
            raise ValueError(f"{key} is quantised already; NF4 is made of plain weights")
        if found.ndim != 2 or key.split(".")[-2] in _PLAIN_IN_NF4:
            return found
        if found.shape[1] % 64:
            raise ValueError(f"the rows of {key} are no multiple of 64, of which NF4 makes groups")
        return make_nf4(found.to(device), double)

    return source


# -------------------------------------------------------------------------------------- looking at a model


def tied(model: PreTrainedModel) -> bool:
    """Whether the output layer is the embedding; a config may say so of one that has weights of its own."""
    ends = (model.get_output_embeddings(), model.get_input_embeddings())
    output, embedding = (end.packed if hasattr(end, "packed") else end.weight for end in ends)
    return output is embedding


def packed_weights(model: nn.Module) -> dict[str, Quantised]:
    """What stays quantised, by transformers' names; what two layers share is there twice."""
    kinds = (QuantisedLinear, QuantisedEmbedding)
    return {f"{name}.weight": m.packed for name, m in model.named_modules() if isinstance(m, kinds)}


def kept_weights(model: nn.Module, unpacked: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every weight and buffer; quantised ones unpacked, or as the arrays that are kept."""
    yield from model.state_dict().items()
    for name, packed in packed_weights(model).items():
        if unpacked:
            yield name, packed.dense(torch.float32)
        else:
            yield from ((f"{name}.{part}", array) for part, array in packed.arrays())


def numbers_of(model: nn.Module) -> int:
    """How many weights a model has, quantised or not; those that two layers share count once."""
    packed = {id(q): math.prod(q.shape) for q in packed_weights(model).values()}
    return sum(p.numel() for p in model.parameters()) + sum(packed.values())


def bytes_of(model: nn.Module) -> int:
    """Memory that a model's weights take for as long as it is loaded."""
    packed = {id(q): q.bytes for q in packed_weights(model).values()}
    return sum(p.nbytes for p in model.parameters()) + sum(packed.values())


def predicted_bytes(
    model: PreTrainedModel, weights: str, element_size: int, gguf: Path | None = None, groups: bool = False
) -> int:
    """What :func:`bytes_of` will be of a model whose shapes alone are there, kept as ``backbone.weights`` says, and
    as :func:`in_groups` does."""
    if weights == "stored" and gguf is not None:
        return sum(
            kept_bytes(t.kind, t.size, groups) if t.kind in GGUF else math.prod(t.shape) * element_size
            for t in stored_tensors(gguf)
        )
    total = 0.0
    for name, parameter in model.named_parameters():
        small = weights.startswith("nf4") and parameter.ndim == 2 and name.split(".")[-2] not in _PLAIN_IN_NF4
        bits = nf4_bits(parameter.shape[1], weights == "nf4-double") if small else 8 * element_size
        total += parameter.numel() * bits / 8
    return round(total)


def unpack(model: PreTrainedModel) -> None:
    """Make a model plain for good: every quantised layer gets its numbers."""
    shared = tied(model)
    for name, module in list(model.named_modules()):
        plain: nn.Linear | nn.Embedding
        if isinstance(module, QuantisedLinear):
            plain = nn.Linear(module.in_features, module.out_features, module.bias is not None, device="meta")
            plain.bias = module.bias
        elif isinstance(module, QuantisedEmbedding):
            plain = module.plain[0]
        else:
            continue
        plain.weight = nn.Parameter(module.weight, requires_grad=False)
        model.set_submodule(name, plain)
    if shared:
        model.tie_weights()
