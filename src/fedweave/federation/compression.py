"""Updates in fewer bytes: bfloat16 or int8, with error feedback.

What rounding takes from one update the client remembers and adds to the next (error feedback), so that rounding
delays a change but never loses it. int8 has one scale for every 256 numbers. All arithmetic is float32: casting is
all that a device must know of bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

GROUP = 256  # numbers that share a scale
_SCALE = ".scale"

Spec = tuple[tuple[int, ...], torch.dtype]


def encoded_specs(name: str, size: int, dtype: str) -> dict[str, Spec]:
    """Shapes and dtypes of the arrays that carry ``size`` numbers."""
    if dtype == "bfloat16":
        return {name: ((size,), torch.bfloat16)}
    if dtype == "int8":
        return {name: ((size,), torch.int8), name + _SCALE: ((-(-size // GROUP),), torch.float32)}
    return {name: ((size,), torch.float32)}


def encode(name: str, values: torch.Tensor, dtype: str) -> dict[str, torch.Tensor]:
    """values [n] as the arrays that travel."""
    values = values.float()
    if dtype == "bfloat16":
        return {name: values.to(torch.bfloat16)}
    if dtype == "int8":
        rows = _rows(values)  # [groups, GROUP]
        scale = rows.abs().amax(1) / 127  # [groups]
        whole = (rows / scale.clamp(min=1e-30)[:, None]).round().clamp(-127, 127)
        return {name: whole.flatten()[: len(values)].to(torch.int8), name + _SCALE: scale}
    return {name: values}


def decode(name: str, arrays: Mapping[str, torch.Tensor], dtype: str) -> torch.Tensor:
    """The inverse, up to rounding: [n] float32."""
    values = arrays[name]
    if dtype == "int8":
        return (_rows(values.float()) * arrays[name + _SCALE][:, None]).flatten()[: len(values)]
    return values.float()


def _rows(values: torch.Tensor) -> torch.Tensor:
    """[n] in groups, the last one filled up with zeros: [groups, GROUP]."""
    return torch.nn.functional.pad(values, (0, -len(values) % GROUP)).view(-1, GROUP)


class Residuals:
    """What rounding has taken from a client's updates so far, by part. A round that is repeated starts from what it
    started from the first time."""

    def __init__(self) -> None:
        self.round = -1
        self.before: dict[str, torch.Tensor] = {}
        self.after: dict[str, torch.Tensor] = {}

    def encode(self, t: int, parts: Mapping[str, torch.Tensor], dtype: str) -> dict[str, torch.Tensor]:
        """Everything that the client sends in round t; what is lost of it stays here."""
        if dtype == "float32":
            return {name: part.float() for name, part in parts.items()}
        if t != self.round:
            self.before, self.round = self.after if t > self.round else {}, t
        self.after = dict(self.before)
        arrays: dict[str, torch.Tensor] = {}
        for name, part in parts.items():
            owed = self.before.get(name)
            full = part.float() if owed is None else part.float() + owed.to(part.device)
            sent = encode(name, full, dtype)
            arrays |= sent
            # a NaN is refused by the server; it must not spoil the rounds after it
            self.after[name] = (full - decode(name, sent, dtype)).nan_to_num(0.0, 0.0, 0.0)
        return arrays

    def restore(self, parts: Mapping[str, torch.Tensor]) -> None:
        """Back to the end of a checkpoint's round."""
        self.round, self.before, self.after = -1, {}, dict(parts)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a site writes down after round :attr:`round`, which may yet be repeated."""
        return {f"before.{k}": v for k, v in self.before.items()} | {f"after.{k}": v for k, v in self.after.items()}

    def load(self, tensors: Mapping[str, torch.Tensor], t: int) -> None:
        self.round = t
        self.before, self.after = (
            {name.removeprefix(when): x for name, x in tensors.items() if name.startswith(when)}
            for when in ("before.", "after.")
        )
