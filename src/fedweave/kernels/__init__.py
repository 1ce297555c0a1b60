"""Fused operations of a training step, each with its gradient written out.

The backbone is frozen, so a layer's backward pass needs few of its activations and no weight gradients. Every
operation here has two versions of one formula: a Triton kernel for CUDA, which reads and writes each number
once, and plain torch for everything else, which is also the reference that tests compare with.
"""

import os
from typing import Protocol

import numpy as np
import torch

try:  # comes with torch's CUDA builds
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels on a CPU, for tests


class Context(Protocol):
    """What autograd hands from an operation's forward pass to its backward pass."""

    saved_tensors: tuple[torch.Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...

    def mark_dirty(self, *tensors: torch.Tensor) -> None: ...

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


def fused(x: torch.Tensor) -> bool:
    """Whether the Triton version runs on this tensor."""
    return triton is not None and (x.is_cuda or INTERPRETED)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def to_device(array: np.ndarray, device: torch.device, dtype: torch.dtype = torch.long) -> torch.Tensor:
    """Send an array without making the host wait."""
    tensor = torch.from_numpy(np.ascontiguousarray(array)).to(dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
