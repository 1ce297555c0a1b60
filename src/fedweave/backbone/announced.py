"""What the files of a model announce, checked before anything of that size is allocated.

Weights are safetensors or GGUF: other formats are pickles, which run code when they are read. A file of some bytes
that speaks of billions of weights is refused here; transformers would make room for them first.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from fedweave.errors import UserError, first_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_MOST = {"settings": 1 << 12, "tensors": 1 << 16, "items of a list": 1 << 22, "dimensions": 8}


class Announced(NamedTuple):
    """What lies in a model's files."""

    tensors: int
    numbers: int


# -------------------------------------------------------------------------------------- folders


def in_folder(folder: Path) -> Announced:
    """The weights of a folder, by the headers of its safetensors files."""
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = [path.name for kind in PICKLES for path in sorted(folder.glob(kind))]
        why = f"; {pickles[0]} is a pickle, which can run code: convert it first" if pickles else ""
        raise ValueError(f"there are no weights in the safetensors format{why}")
    sizes = []
    for file in files:
        with safe_open(file, "pt") as tensors:
            sizes += [math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys()]  # noqa: SIM118
    return Announced(len(sizes), sum(sizes))


# -------------------------------------------------------------------------------------- GGUF

_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # type -> bytes
_TEXT, _LIST = 8, 9


class _Header:
    """Reads on in a file, and never beyond its end."""

    def __init__(self, data: mmap.mmap):
        self.data, self.at = data, 0

    def take(self, size: int) -> int:
        """Pass over so many bytes; where they begin."""
        if size > len(self.data) - self.at:
            raise ValueError("it ends before what it announces")
        self.at += size
        return self.at - size

    def number(self, size: int = 8) -> int:
        return int.from_bytes(self.data[self.take(size) : self.at], "little")

    def text(self) -> str:
        size = self.number()
        return self.data[self.take(size) : self.at].decode(errors="replace")

    def count(self, what: str, size: int = 8) -> int:
        found = self.number(size)
        if found > _MOST[what]:
            raise ValueError(f"it announces {found} {what}")
        return found

    def value(self, kind: int, within: bool = False) -> None:
        if kind == _TEXT:
            self.take(self.number())
        elif kind == _LIST and not within:
            inner, items = self.number(4), self.count("items of a list")
            if inner in _SCALARS:
                self.take(items * _SCALARS[inner])
            else:
                for _ in range(items):
                    self.value(inner, within=True)
        elif kind in _SCALARS:
            self.take(_SCALARS[kind])
        else:
            raise ValueError(f"it holds a value of an unknown kind ({kind})")


class Stored(NamedTuple):
    """A tensor of a GGUF file."""

    name: str
    shape: tuple[int, ...]  # rows first
    kind: str  # F32, Q4_K, …
    start: int  # of its bytes in the file
    size: int


def in_gguf(path: Path) -> Announced:
    """The weights of a GGUF file, by its header, all of which lies within the file."""
    tensors = stored_tensors(path)
    return Announced(len(tensors), sum(math.prod(tensor.shape) for tensor in tensors))


def stored_tensors(path: Path) -> list[Stored]:
    """Where the tensors of a GGUF file lie, all of them within it."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    with open(path, "rb") as source, mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) as data:
        header = _Header(data)
        magic, version = struct.unpack_from("<4sI", data, header.take(8))
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError("it is no GGUF file of version 2 or 3")
        tensors, settings = header.count("tensors"), header.count("settings")
        alignment = 32
        for _ in range(settings):
            key, kind, at = header.text(), header.number(4), header.at
            header.value(kind)
            if key == "general.alignment":
                alignment = int.from_bytes(data[at : header.at], "little") or 1
        found = []
        for _ in range(tensors):
            name = header.text()
            shape = tuple(header.number() for _ in range(header.count("dimensions", 4)))[::-1]
            kind = GGMLQuantizationType(header.number(4))
            block, size = GGML_QUANT_SIZES[kind]
            found.append(Stored(name, shape, kind.name, header.number(), math.prod(shape) // block * size))
        header.take(-header.at % alignment if found else 0)
        first = header.at
        header.take(max((tensor.start + tensor.size for tensor in found), default=0))
        if sum(tensor.size for tensor in found) > len(data) - first:
            raise ValueError("its tensors overlap")
        return [tensor._replace(start=first + tensor.start) for tensor in found]


# -------------------------------------------------------------------------------------- models


def skeleton(config: PretrainedConfig, name: str) -> PreTrainedModel:
    """The model of a configuration, without its weights."""
    from transformers import AutoModelForCausalLM

    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > 10_000:
        raise UserError(f"{name} announces {layers} layers; its config is damaged.")
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # damaged files fail in as many ways as there are lines in a library
        raise UserError(
            f"{name} is no causal language model that transformers knows: {first_line(error)}."
        ) from None


def check_announced(config: PretrainedConfig, found: Announced, name: str) -> None:
    """A configuration may not speak of much more than the files hold: room is made for it before it is missed."""
    numbers = sum(parameter.numel() for parameter in skeleton(config, name).parameters())
    packed = 8 if getattr(config, "quantization_config", None) else 1  # four bits or fewer a number
    if numbers > 2 * packed * found.numbers:
        raise ValueError(f"it announces {numbers:,} weights, and its files hold {found.numbers:,}")


def check_read(model: PreTrainedModel, left: Iterable[str]) -> None:
    """Of what is ``left`` of the files nothing may belong to a layer (a bias, a norm of heads, one more layer): the
    weights are of another model than the configuration says. Parts beside the layers are no business of ours."""
    parts = (name for name in left if name.startswith(f"{model.base_model_prefix}.layers."))
    if lost := sorted(name for name in parts if name.endswith((".weight", ".bias"))):
        raise ValueError(f"its config has no place for {lost[0]}")


def check_room(needed: float, device: torch.device, name: str) -> None:
    """A backbone lies on one card, whole."""
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    if needed > free:
        raise UserError(
            f"backbone.model={name} takes {needed / 2**30:.1f} GiB, and {device} has {free / 2**30:.1f} of its "
            f"{total / 2**30:.1f} GiB free. FedWeave keeps a backbone on one card (torchrun shares clients between "
            "cards, not the model): choose a smaller model or a larger card; `fedweave budget` says what fits."
        )


@torch.no_grad()
def check_finite(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """One infinite weight, and every answer that touches it is none."""
    for name, weights in named:
        if weights.is_floating_point() and not weights.sum(dtype=torch.float32).isfinite():
            raise ValueError(f"{name} holds numbers that are not finite")
