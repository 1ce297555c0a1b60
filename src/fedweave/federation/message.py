"""A message: named tensors and a few plain facts. Everything that passes between server and clients is one.

In one process a message is handed over as it is; between processes it is safetensors and JSON, over Flower its
records (``engines/flower/transport.py``). Nothing in it is ever unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from fedweave.errors import first_line

Facts = dict[str, Any]  # bool, int, float, str, or a list of one of these: checked at the door, not by a type
_HEADER = 8  # bytes that say how long the facts are


class Refused(Exception):
    """Why a message is not used, as the second half of a sentence."""


class NoAnswer(Exception):
    """Why there is no message at all, as the second half of a sentence."""


@dataclass
class Message:
    """What one side tells the other."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    facts: Facts = field(default_factory=dict)

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
