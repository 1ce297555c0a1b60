"""Where the time of a training step goes on a GPU, kernel by kernel.

    python -m benchmarks.profile --shapes 135m 3b

Steps as the trainer runs them, recorded where that pays. Kernels that overlap count for themselves, so the sum may
be a little more than the time that a step takes.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.clock import seconds
from benchmarks.figures import keep
from benchmarks.workload import (
    SHAPES,
    backbone_of,
    make_clients,
    make_training,
    random_model,
    real_tokens,
    schedules,
)
from fedweave.backbone import packing

KINDS = {  # the first that a kernel's name contains
    "attention": ("attend_", "flash", "fmha"),
    "experts": ("lane_",),
    "norms": ("_norm",),
    "gated unit": ("_gated",),
    "rotary positions": ("_rotary", "turn_keys"),
    "rounding to 8 bits": ("_round_kernel",),
    "cross-entropy": ("_entropy",),
    "products with frozen weights": ("nvjet", "gemm", "cutlass", "cublas"),
    "optimiser": ("FusedAdam", "multi_tensor"),
}
STEPS = 10


def kind_of(kernel: str) -> str:
    return next((kind for kind, names in KINDS.items() if any(name in kernel for name in names)), "the rest")


def profile(shape: str, device: torch.device) -> dict[str, Any]:
    """Milliseconds of a step by kind of kernel, and the time that it takes when nobody looks."""
    clients = make_clients(SHAPES[shape], 20, 80)
    plan = schedules(clients, STEPS, 8)
    backbone = backbone_of(random_model(SHAPES[shape], device, torch.bfloat16), True)
    trainer, lanes = make_training(backbone, clients, plan, graphs=True)

    def round_() -> None:
        list(trainer.train(lanes, len(lanes)))

    spent = seconds(round_, device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as watched:
        round_()
        torch.cuda.synchronize()
    kinds: dict[str, float] = defaultdict(float)
    kernels = []
    for event in watched.key_averages():
        ms = event.self_device_time_total / 1e3 / STEPS
        kinds[kind_of(event.key)] += ms
        kernels.append(
            {"name": event.key[:100], "kind": kind_of(event.key), "ms": ms, "calls": event.count // STEPS}
        )
    trainer.mixture.detach()
    trainer.release()
    return {
        "step_ms": 1e3 * spent / STEPS,
        "tokens": real_tokens(clients, plan) / STEPS,
        "kinds_ms": dict(sorted(kinds.items(), key=lambda item: -item[1])),
        "kernels": sorted(kernels, key=lambda kernel: -kernel["ms"])[:30],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["135m"])
    parser.add_argument(
        "--flash", action="store_true", help="torch's attention instead of ours for short sequences"
    )
    parser.add_argument("--output", type=Path, help="a JSON file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("kernels are profiled on a CUDA device only.")
    if options.flash:
        packing.LONGEST = 0
    result = {}
    for shape in options.shapes:
        found = result[shape] = profile(shape, torch.device("cuda"))
        total = sum(found["kinds_ms"].values())
        print(f"{shape}: {found['step_ms']:.1f} ms a step of {found['tokens']:,.0f} tokens, kernels {total:.1f} ms")
        for kind, ms in found["kinds_ms"].items():
            print(f"  {kind:30s} {ms:7.2f} ms {100 * ms / total:5.1f} %", flush=True)
    keep(result, options.output)


if __name__ == "__main__":
    main()
