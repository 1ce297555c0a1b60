"""Fused operations of a training step, each with its gradient written out.

The backbone is frozen, so a layer's backward pass needs few of its activations and no weight gradients. Every
operation here has two versions of one formula: a Triton kernel for CUDA, which reads and writes each number
once, and plain torch for everything else, which is also the reference that tests compare with.
"""

from __future__ import annotations

import os

import numpy as np
import torch

try:
    import triton  # noqa: F401  (comes with torch's CUDA builds)

    TRITON = True
except ImportError:
    TRITON = False

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels on a CPU, for tests


def fused(x: torch.Tensor) -> bool:
    """Whether the Triton version runs on this tensor."""
    return TRITON and (x.is_cuda or INTERPRETED)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def to_device(array: np.ndarray, device: torch.device, dtype: torch.dtype = torch.long) -> torch.Tensor:
    """Send an array without making the host wait."""
    tensor = torch.from_numpy(np.ascontiguousarray(array)).to(dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
