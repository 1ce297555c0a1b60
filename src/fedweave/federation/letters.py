"""A letter: named arrays and a few plain facts. Everything that passes between a server and a site is one.

A letter is safetensors and JSON, or Flower records; nothing in it is ever unpickled. This module needs no torch,
so that a process which only forwards letters starts quickly.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import numpy as np

Fact = bool | int | float | str | list[int] | list[float] | list[str]
_HEADER = 8  # bytes that say how long the facts are


@dataclass
class Letter:
    """What one side tells the other."""

    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    facts: dict[str, Fact] = field(default_factory=dict)

    @property
    def array_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def to_bytes(self) -> bytes:
        from safetensors.numpy import save

        facts = json.dumps(self.facts).encode()
        contiguous = {name: np.ascontiguousarray(array) for name, array in self.arrays.items()}
        return len(facts).to_bytes(_HEADER, "big") + facts + save(contiguous)

    @classmethod
    def from_bytes(cls, data: bytes) -> Letter:
        from safetensors.numpy import load

        end = _HEADER + int.from_bytes(data[:_HEADER], "big")
        return cls(load(data[end:]), json.loads(data[_HEADER:end]))

    def rows(self) -> list[tuple[str, str, int]]:
        """(name, what it is, bytes) of everything inside, for a person to read."""
        shown = [(name, f"{a.dtype} {list(a.shape)}", a.nbytes) for name, a in self.arrays.items()]
        return shown + [(name, str(fact)[:60], len(json.dumps(fact))) for name, fact in self.facts.items()]
