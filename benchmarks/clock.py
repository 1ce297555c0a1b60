"""Timing: the median of repeated calls, after a warm-up, with the device waited for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def once(call: Callable[[], Any], device: torch.device) -> float:
    wait(device)
    start = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - start


def seconds(call: Callable[[], Any], device: torch.device, repeats: int = 3, warm: int = 1) -> float:
    """The median of up to ``repeats`` calls; after 10 s there are no further ones, since long calls vary little."""
    for _ in range(warm):
        call()
    spent: list[float] = []
    while len(spent) < repeats and sum(spent) < 10:
        spent.append(once(call, device))
    return statistics.median(spent)


def peak_gib(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
