"""Peak memory of a round on a GPU beside what ``fedweave budget`` and ``clients_per_step=auto`` count.

    python -m benchmarks.memory                                   # about three minutes on an H200
    python -m benchmarks.memory --shapes 8b --output benchmarks/results/memory-h200.json

Every case is a round of ten steps: shapes, layers that carry experts, numbers and ranks of experts, clients, fused
operations or transformers' layers, all activations kept or layers that run twice, plain weights or 4-bit ones.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.clock import peak_gib, reset_peak
from benchmarks.figures import keep
from benchmarks.workload import (
    EVERY,
    SHAPES,
    TARGETS,
    backbone_of,
    in_four_bits,
    make_clients,
    make_training,
    random_model,
    schedules,
)
from fedweave.backbone.quantised import bytes_of, packed_weights
from fedweave.training.batch import Lane
from fedweave.training.fit import one_lane, step_memory
from fedweave.training.lockstep import LockstepTrainer
from fedweave.training.memory import in_all

STEPS = 10  # the longest of as many is what is predicted


@dataclass(frozen=True)
class Case:
    """One round."""

    shape: str
    clients: int = 20
    batch: int = 8
    every: bool = False  # experts on every linear layer, or on q and v
    experts: int = 4
    rank: int = 8
    fused: bool = True
    checkpointing: Literal["on", "off"] = "off"
    four_bits: bool = False


def cases(shapes: Sequence[str]) -> Iterator[Case]:
    for shape in shapes:
        for every in (False, True):
            yield Case(shape, every=every)
            yield Case(shape, every=every, checkpointing="on")
        yield Case(shape, four_bits=True, checkpointing="on")
        yield Case(shape, clients=5)
        yield Case(shape, clients=40, batch=4, checkpointing="on")
        yield Case(shape, experts=8, rank=16)
        yield Case(shape, clients=10, fused=False)
        yield Case(shape, clients=10, fused=False, every=True, checkpointing="on")


def predicted_gib(trainer: LockstepTrainer, lanes: Sequence[Lane]) -> float:
    """Of these lanes together, with the weights."""
    backbone, step = trainer.backbone, one_lane(lanes).times(len(lanes))
    memory = step_memory(backbone, trainer.mixture.layout)
    weights = bytes_of(backbone.model) + memory.rounded(trainer.config.fp8)
    if packed_weights(backbone.model):
        weights += memory.unpacked(head=False)
    return (weights + in_all(memory.training(step, trainer.checkpointing))) / 2**30


def measure(case: Case, device: torch.device) -> dict[str, Any]:
    gc.collect()
    reset_peak(device)
    shape = SHAPES[case.shape]
    clients = make_clients(shape, case.clients, 80)
    plan = schedules(clients, STEPS, case.batch)
    model = random_model(shape, device, torch.bfloat16)
    backbone = backbone_of(in_four_bits(model) if case.four_bits else model, case.fused)
    del model
    gc.collect()
    trainer, lanes = make_training(
        backbone, clients, plan, True, EVERY if case.every else TARGETS, case.checkpointing, case.experts, case.rank
    )
    row: dict[str, Any] = {**asdict(case), "predicted_gib": predicted_gib(trainer, lanes)}
    reset_peak(device)
    try:
        list(trainer.train(lanes, len(lanes)))
        row["peak_gib"] = peak_gib(device)
        row["error"] = row["predicted_gib"] / row["peak_gib"] - 1
    except torch.OutOfMemoryError:
        row["failed"] = "out of memory"
    trainer.mixture.detach()
    trainer.release()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["135m", "3b", "8b"])
    parser.add_argument("--output", type=Path, help="a JSON file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("memory is measured on a GPU; a CPU's process stands in `fedweave budget RUN`.")
    device, rows = torch.device("cuda"), []
    print("shape clients × batch  experts × rank on            activations           predicted     real   error")
    for case in cases(options.shapes):
        row = measure(case, device)
        rows.append(row)
        kept = ("fused, " if case.fused else "plain, ") + ("twice" if case.checkpointing == "on" else "kept")
        kept += ", 4 bits" if case.four_bits else ""
        real = f"{row['peak_gib']:6.2f} GiB  {row['error']:+.1%}" if "error" in row else row["failed"]
        print(
            f"{case.shape:5s} {case.clients:7d} × {case.batch:<5d} {case.experts:8d} × {case.rank:<4d} "
            f"{'every layer' if case.every else 'q and v':12s} {kept:20s} {row['predicted_gib']:6.2f} GiB  {real}",
            flush=True,
        )
    worst = max((abs(row["error"]) for row in rows if "error" in row), default=0.0)
    print(f"farthest off: {worst:.1%} of {sum('error' in row for row in rows)} cases")
    keep({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cases": rows}, options.output)


if __name__ == "__main__":
    main()
