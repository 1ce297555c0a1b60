"""Numbers in fewer bytes: bfloat16, or int8 with one scale for every 256 of them.

All arithmetic is float32: casting is all that a device must know of bfloat16.
"""

from collections.abc import Mapping

import torch

GROUP = 256  # numbers that share a scale
_SCALE = ".scale"

Spec = tuple[tuple[int, ...], torch.dtype]


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
