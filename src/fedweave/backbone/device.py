"""Where a backbone lies and in which precision: ``backbone.device``, ``backbone.dtype``, and who else is there."""

import math

import torch

from fedweave.errors import UserError
from fedweave.settings import environment_number


def pick_device(name: str) -> torch.device:
    if name in ("auto", "cuda") and torch.cuda.is_available():
        # torchrun gives every process a GPU of its own; where it starts more of them, they share
        torch.cuda.set_device(environment_number("LOCAL_RANK", 0) % torch.cuda.device_count())
        return torch.device("cuda", torch.cuda.current_device())
    if name == "auto":
        return torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"backbone.device={name!r} is no device; use auto, cpu, cuda or cuda:N.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"backbone.device={name}, but this machine has no usable CUDA device; use cpu or auto.")
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"backbone.device={name!r} is not supported; use auto, cpu, cuda or cuda:N.")
    return device


def processes_on(device: torch.device) -> int:
    """How many processes that torchrun started share this device: all alike."""
    if device.type != "cuda":
        return 1
    return math.ceil(environment_number("LOCAL_WORLD_SIZE", 1) / torch.cuda.device_count())


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name == "bfloat16" and device.type == "cpu" and not multiplies_bfloat16():
        raise UserError(
            "backbone.dtype=bfloat16 needs a CUDA device, or a processor that multiplies bfloat16 itself (AVX-512 "
            "BF16 or AMX): on this one it is many times slower or fails outright; use float32 or auto."
        )
    return getattr(torch, name)


def multiplies_bfloat16() -> bool:
    """Whether the processor does; others imitate it, or end with an illegal instruction."""
    known = (getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile"))
    return any(supported() for supported in known if supported is not None)
