"""A message: named tensors and a few plain facts. Everything that passes between server and clients is one.

In one process a message is handed over as it is; between processes it is safetensors and JSON, over Flower its
records (``engines/flower/transport.py``). Nothing in it is ever unpickled. Its numbers may travel in fewer bytes:
bfloat16, or int8 with one scale for every 256 of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from fedweave.errors import first_line

Facts = dict[str, Any]  # bool, int, float, str, or a list of one of these: checked at the door, not by a type
_HEADER = 8  # bytes that say how long the facts are
_ERROR = "error"  # the one fact of a message that is no answer
GROUP = 256  # numbers that share a scale
_SCALE = ".scale"
Spec = tuple[tuple[int, ...], torch.dtype]


class Refused(Exception):
    """Why a message is not used, as the second half of a sentence."""


class NoAnswer(Exception):
    """Why there is no message at all, as the second half of a sentence."""


@dataclass
class Message:
    """What one side tells the other."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    facts: Facts = field(default_factory=dict)

    @classmethod
    def silent(cls, why: str) -> Message:
        """What a client sends that has no answer."""
        return cls(facts={_ERROR: why})

    def spoken(self) -> Message:
        """The message, if it is an answer."""
        if _ERROR in self.facts:
            raise NoAnswer(str(self.facts[_ERROR])[:300].rstrip("."))
        return self

    @property
    def size(self) -> int:
        return tensor_bytes(self.tensors.values())

    def to_bytes(self) -> bytes:
        facts = json.dumps(self.facts).encode()
        held = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in self.tensors.items()}
        return len(facts).to_bytes(_HEADER, "big") + facts + save(held)

    @classmethod
    def from_bytes(cls, data: bytes) -> Message:
        end = _HEADER + int.from_bytes(data[:_HEADER], "big")
        try:
            return cls(load(data[end:]), json.loads(data[_HEADER:end]))
        except (SafetensorError, ValueError) as error:
            raise Refused(f"it cannot be read ({first_line(error)})") from None

    def rows(self) -> list[tuple[str, str, int]]:
        """(name, what it is, bytes) of everything inside, for a person to read."""
        shown = [
            (name, f"{dtype_name(t.dtype)} {list(t.shape)}", tensor_bytes([t])) for name, t in self.tensors.items()
        ]
        return shown + [(name, str(fact)[:60], len(json.dumps(fact))) for name, fact in self.facts.items()]


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -------------------------------------------------------------------------------------- precision
# All arithmetic is float32: casting is all that a device must know of bfloat16.


def encoded_specs(name: str, size: int, dtype: str) -> dict[str, Spec]:
    """Shapes and dtypes of the tensors that carry ``size`` numbers."""
    if dtype == "bfloat16":
        return {name: ((size,), torch.bfloat16)}
    if dtype == "int8":
        return {name: ((size,), torch.int8), name + _SCALE: ((-(-size // GROUP),), torch.float32)}
    return {name: ((size,), torch.float32)}


def encode(name: str, values: torch.Tensor, dtype: str) -> dict[str, torch.Tensor]:
    """values [n] as the tensors that travel."""
    values = values.float()
    if dtype == "bfloat16":
        return {name: values.to(torch.bfloat16)}
    if dtype == "int8":
        rows = _rows(values)  # [groups, GROUP]
        scale = rows.abs().amax(1) / 127  # [groups]
        whole = (rows / scale.clamp(min=1e-30)[:, None]).round().clamp(-127, 127)
        return {name: whole.flatten()[: len(values)].to(torch.int8), name + _SCALE: scale}
    return {name: values}


def decode(name: str, tensors: Mapping[str, torch.Tensor], dtype: str) -> torch.Tensor:
    """The inverse, up to rounding: [n] float32."""
    values = tensors[name]
    if dtype == "int8":
        return (_rows(values.float()) * tensors[name + _SCALE][:, None]).flatten()[: len(values)]
    return values.float()


def _rows(values: torch.Tensor) -> torch.Tensor:
    """[n] in groups, the last one filled up with zeros: [groups, GROUP]."""
    return torch.nn.functional.pad(values, (0, -len(values) % GROUP)).view(-1, GROUP)
