"""What a run did cost, beside what its shapes predicted."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedweave.analysis.budget import Budget, predict, training_memory
from fedweave.analysis.shapes import ModelShape, model_shape
from fedweave.config import Config
from fedweave.errors import UserError
from fedweave.methods import method_class
from fedweave.runs.folder import RunFolder

FLOP_PER_PARAMETER = 4  # forward 2, backward through frozen weights 2


@dataclass
class Spent:
    """One figure, predicted and measured; None where a run does not tell."""

    what: str
    unit: str  # "numbers", "tokens", "bytes", "ratio", "seconds" or "FLOP/s"
    predicted: float | None
    measured: float | None
    note: str = ""


@dataclass
class RunCosts:
    """A run's budget with its own buckets and experts, and what it spent."""

    budget: Budget
    discovers: bool  # whether its method has buckets and signatures at all
    spent: list[Spent]


def run_costs(folder: Path, precision: str | None = None) -> RunCosts:
    """Costs of a run that has been through discovery; figures of the end are missing until it ends."""
    run, config = RunFolder.open(folder)
    discovery = _read(folder / "discovery.json")
    if discovery is None:
        raise UserError(f"{folder} has not been through discovery yet; finish it with `fedweave resume {folder}`.")
    summary = _read(folder / "summary.json") or {}
    events = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
    rounds = [event for event in events if event["event"] == "round"]
    clients = list(discovery["clients"].values())
    discovers = method_class(config.method).discovers
    experts = int(discovery["experts"]) if discovers else 4  # for the table's other methods
    served = [len(set(client["experts"])) for client in clients]
    buckets = float(np.mean([len(client["buckets"]) for client in clients]))
    shape = model_shape(config.backbone.model, config.backbone.revision)
    budget = predict(shape, config, experts, buckets, precision, max(served))
    trained = budget.methods[config.method].trainable
    spent = [Spent("trained parameters", "numbers", trained, summary.get("trained_parameters"))]
    if discovers:
        ratio = budget.discovery.warmup_ratio
        spent.append(Spent("warmup against training", "ratio", ratio, _warmup(summary), "steps; seconds"))
    spent += [
        _tokens(config, summary, rounds),
        *_bytes(config, budget, shape, experts, served, rounds),
        _memory(config, budget, shape, summary, rounds, len(clients)),
        *_time(shape, summary, rounds),
    ]
    return RunCosts(budget, discovers, spent)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        raise UserError(f"{path} is damaged.") from None


def _warmup(summary: dict[str, Any]) -> float | None:
    phases = summary.get("timing", {}).get("phases_s", {})
    return phases["warmup"] / phases["round"] if phases.get("warmup") and phases.get("round") else None


def _tokens(config: Config, summary: dict[str, Any], rounds: list[dict]) -> Spent:
    """Every step draws a full batch of average examples; small buckets give less."""
    measured = sum(event["tokens"] for event in rounds)
    predicted = None
    if "train_tokens" in summary:
        steps = sum(len(event["participants"]) for event in rounds) * config.training.local_steps
        predicted = steps * config.training.batch_size * summary["train_tokens"] / summary["examples"]
    return Spent("tokens trained on", "tokens", predicted, measured, f"{len(rounds)} rounds")


def _bytes(
    config: Config, budget: Budget, shape: ModelShape, experts: int, served: list[int], rounds: list[dict]
) -> list[Spent]:
    """Traffic of all clients and rounds, if every client took part every time; a simulation may count its own."""
    each = [
        predict(shape, config, experts, budget.discovery.buckets, budget.precision, n).round_bytes(config.method)
        for n in served
    ]
    taking_part = float(np.mean([len(event["participants"]) for event in rounds])) / len(served) if rounds else 1.0
    up = [sum(event["bytes_up"].values()) for event in rounds if "bytes_up" in event]
    down = [event["bytes_down"] * len(event["participants"]) for event in rounds if "bytes_down" in event]
    everyone = len(rounds) * taking_part
    note = "all clients, all rounds"
    return [
        Spent("sent by clients", "bytes", everyone * sum(u for u, _ in each), sum(up) or None, note),
        Spent("sent to clients", "bytes", everyone * sum(d for _, d in each), sum(down) or None, note),
    ]


def _memory(
    config: Config, budget: Budget, shape: ModelShape, summary: dict[str, Any], rounds: list[dict], clients: int
) -> Spent:
    """Predicted for all participants in one step, or as many as training.clients_per_step says."""
    device = summary.get("environment", {}).get("device", "cpu")
    lanes = int(np.mean([len(event["participants"]) for event in rounds])) if rounds else clients
    if config.training.clients_per_step != "auto":
        lanes = min(lanes, int(config.training.clients_per_step))
    steps = sum(len(event["participants"]) for event in rounds) * config.training.local_steps
    tokens = lanes * sum(event["tokens"] for event in rounds) / steps if steps else 0.0
    element_size = 2 if device.startswith("cuda") and config.backbone.dtype != "float32" else 4
    trained = budget.methods[config.method].down
    total = training_memory(shape, trained, lanes, tokens, element_size)["total"]
    where = "tensors on the GPU" if device.startswith("cuda") else "tensors; the whole process"
    return Spent("peak memory", "bytes", total, summary.get("timing", {}).get("peak_memory_bytes"), where)


def _time(shape: ModelShape, summary: dict[str, Any], rounds: list[dict]) -> list[Spent]:
    timing = summary.get("timing")
    if timing is None:
        return []
    seconds = timing["phases_s"].get("round", 0.0)
    work = FLOP_PER_PARAMETER * shape.parameters * sum(event["tokens"] for event in rounds)
    return [
        Spent("total time", "seconds", None, timing["total_s"]),
        Spent("rounds' time", "seconds", None, seconds),
        Spent(
            "rate of the rounds", "FLOP/s", None, work / seconds if seconds else None, "4 per parameter and token"
        ),
    ]
