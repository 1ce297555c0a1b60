"""Products of float32 matrices on a CPU.

torch multiplies float32 with MKL, which uses 512-bit instructions on Intel's processors alone. oneDNN, which torch
has as well, uses them wherever they are: on an AMD processor that has them it takes half of the time. What it
compiles for a number of rows it keeps for good (about half a megabyte for each matrix shape), so it is asked for a
few numbers of rows only: blocks, and a rest that is filled up with zeros.
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128  # rows; more at once are no faster
_REST = 32  # what is left has a multiple of so many rows
_FEW = 16  # or these
_LEAST = 8  # with fewer rows reading the weight is what takes time, and both read alike
_SMALL = 1 << 16  # numbers of a weight for which compiling would not pay


def times(x: Tensor, w: Tensor, bias: Tensor | None = None, out: Tensor | None = None, add: bool = False) -> Tensor:
    """x wᵀ + bias without a gradient, of [..., n] and [m, n] that are suited; into ``out`` or added to it."""
    # not a view of what is computed: experts are added to it in place, and autograd allows no view of ours
    y = x.new_empty(*x.shape[:-1], len(w)) if out is None else out
    for place, part in zip(y.flatten(0, -2).split(BLOCK), x.flatten(0, -2).split(BLOCK), strict=True):
        filled = F.pad(part, (0, 0, 0, _room(len(part)) - len(part))).contiguous()
        found = torch.ops.mkldnn._linear_pointwise(filled, w, bias, "none", [], "")[: len(part)]
        place.add_(found) if add else place.copy_(found)
    return y


def suits(x: Tensor, w: Tensor) -> bool:
    """Whether oneDNN multiplies these sooner."""
    plain = x.device.type == "cpu" and x.dtype == w.dtype == torch.float32
    return plain and w.numel() >= _SMALL and x.numel() >= _LEAST * w.shape[1] and _sooner()


def _room(rows: int) -> int:
    return _FEW if rows <= _FEW else -(-rows // _REST) * _REST


@cache
def _sooner() -> bool:
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    there = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return wide and there and "GenuineIntel" not in _maker()


def _maker() -> str:
    """Whose processor this is, among other things."""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:  # no Linux
        return platform.processor()
