"""What a run did cost, beside what its shapes predicted."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedweave.analysis.budget import Budget, predict
from fedweave.analysis.shapes import ModelShape, model_shape
from fedweave.errors import UserError
from fedweave.experts.layout import AdapterLayout
from fedweave.methods import method_class
from fedweave.runs.reading import RunRecord
from fedweave.training.fit import cpu_lanes, cpu_tokens
from fedweave.training.memory import Step, in_all

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


def run_costs(run: RunRecord, precision: str | None = None) -> RunCosts:
    """Costs of a run that has been through discovery; figures of the end are missing until it ends."""
    config, clients = run.config, list(run.clients.values())
    if not clients:
        raise UserError(f"{run.path} has not been through discovery yet; finish it with `{run.resume}`.")
    discovers = method_class(config.method).discovers
    experts = run.experts if discovers else 4  # for the table's other methods
    served = [len(set(client["experts"])) for client in clients]
    buckets = float(np.mean([len(client["buckets"]) for client in clients]))
    shape = model_shape(config.backbone.model, config.backbone.revision)
    budget = predict(shape, config, experts, buckets, precision, max(served))
    trained = budget.methods[config.method].trainable
    counted = run.summary["trained_parameters"] if run.summary else None
    spent = [Spent("trained parameters", "numbers", trained, counted)]
    if discovers:
        ratio, warmup, rounds = budget.discovery.warmup_ratio, run.phases.get("warmup"), run.phases.get("round")
        measured = warmup / rounds if warmup and rounds else None
        spent.append(Spent("warmup against training", "ratio", ratio, measured, "steps; seconds"))
    spent += [
        _tokens(run),
        *_bytes(run, budget, shape, experts, served),
        _memory(run, budget, shape),
        *_time(run, shape),
    ]
    return RunCosts(budget, discovers, spent)


def _steps(run: RunRecord) -> int:
    """Local steps of all participants so far."""
    return sum(len(event["participants"]) for event in run.rounds) * run.config.training.local_steps


def _tokens(run: RunRecord) -> Spent:
    """Every step draws a full batch of average examples; small buckets give less."""
    measured = sum(event["tokens"] for event in run.rounds)
    summary, predicted = run.summary, None
    if summary and summary["train_tokens"] is not None:  # sites do not tell how long their examples are
        predicted = _steps(run) * run.config.training.batch_size * summary["train_tokens"] / summary["examples"]
    return Spent("tokens trained on", "tokens", predicted, measured, f"{len(run.rounds)} rounds")


def _bytes(run: RunRecord, budget: Budget, shape: ModelShape, experts: int, served: Sequence[int]) -> list[Spent]:
    """Traffic of all clients and rounds, if every client took part every time; a simulation may count its own."""
    config, rounds, buckets = run.config, run.rounds, budget.discovery.buckets
    budgets = [predict(shape, config, experts, buckets, budget.precision, n) for n in served]
    each = [own.round_bytes(config.method) for own in budgets]
    taking_part = float(np.mean([len(event["participants"]) for event in rounds])) / len(served) if rounds else 1.0
    up = sum(sum(event["bytes_up"].values()) for event in rounds)
    down = sum(event["bytes_down"] * len(event["participants"]) for event in rounds)
    everyone = len(rounds) * taking_part
    note = "all clients, all rounds"
    found = [
        Spent("sent by clients", "bytes", everyone * sum(u for u, _ in each), up or None, note),
        Spent("sent to clients", "bytes", everyone * sum(d for _, d in each), down or None, note),
    ]
    if between := run.between_rounds:  # nobody can predict what comes
        found.append(Spent("between rounds", "bytes", None, between, "what changed; both directions"))
    return found


def _memory(run: RunRecord, budget: Budget, shape: ModelShape) -> Spent:
    """The largest of loading, warmup and rounds."""
    config, rounds = run.config, run.rounds
    measured = run.summary["timing"]["peak_memory_bytes"] if run.summary else None
    if run.elsewhere:
        return Spent("peak memory", "bytes", None, measured, "the server's process; clients train elsewhere")
    device = run.summary["environment"]["device"] if run.summary else "cpu"
    cpu = not device.startswith("cuda")
    element_size = 4 if cpu or config.backbone.dtype == "float32" else 2
    each = sum(event["tokens"] for event in rounds) / max(1, _steps(run))  # tokens of one client's step
    asked, again = config.training.clients_per_step, config.training.checkpointing == "on"
    targets, own = config.experts.target_modules, budget.methods[config.method]
    kept = config.backbone.weights
    peaks: list[float] = []

    def add(layout: AdapterLayout, trained: int, lanes: int, tokens: float, examples: float) -> None:
        """A phase of so many lanes, each with so many tokens a step, as many of them at once as are allowed."""
        memory = shape.memory(layout, element_size)
        at_once = lanes if asked == "auto" else min(lanes, int(asked))
        if cpu and asked == "auto" and tokens:
            at_once = cpu_lanes(lanes, tokens, cpu_tokens(memory.token_bytes(again), kept != "dense"))
        step = Step(at_once, at_once * tokens, trained, mean=max(1.0, tokens / examples))
        weights, dense = shape.backbone_bytes(kept, memory, cpu), kept == "dense"
        if cpu:
            peaks.append(memory.loading(weights) if dense else 0.0)
            peaks.append(in_all(memory.process(weights + (memory.joined if dense else 0), step, again)))
        else:
            peaks.append(weights + in_all(memory.training(step, again)))

    participants = [len(event["participants"]) for event in rounds] or [len(run.clients)]
    layout = shape.layout(targets, own.rank, own.experts, config.experts.shared_rank if own.experts > 1 else 0)
    add(layout, own.down, round(float(np.mean(participants))), each, config.training.batch_size)
    if method_class(config.method).discovers:
        sizes = [size for client in run.clients.values() for size in client["buckets"]]
        drawn = float(np.mean([min(size, config.discovery.warmup_batch) for size in sizes]))
        single = shape.layout(targets, config.experts.rank, 1)
        add(single, single.size, len(sizes), each * drawn / config.training.batch_size, drawn)
    return Spent("peak memory", "bytes", max(peaks), measured, "the whole process" if cpu else "tensors on the GPU")


def _time(run: RunRecord, shape: ModelShape) -> list[Spent]:
    if run.summary is None:
        return []
    # clients elsewhere train while the server waits: there is only the time of whole rounds
    seconds = run.phases.get("rounds" if run.elsewhere else "round", 0.0)
    work = FLOP_PER_PARAMETER * shape.parameters * sum(event["tokens"] for event in run.rounds)
    return [
        Spent("total time", "seconds", None, run.summary["timing"]["total_s"]),
        Spent("rounds' time", "seconds", None, seconds),
        Spent(
            "rate of the rounds", "FLOP/s", None, work / seconds if seconds else None, "4 per parameter and token"
        ),
    ]
