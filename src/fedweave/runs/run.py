"""A whole run: prepare, discover, federate, test. Interrupted anywhere, it goes on where it stopped."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Protocol

import torch

from fedweave.backbone.load import weights_hash
from fedweave.config import Config, dump_config
from fedweave.console import Console
from fedweave.errors import UserError
from fedweave.evaluation.audit import alignment_audit, per_task
from fedweave.evaluation.losses import example_losses
from fedweave.federation.checkpoint import write_atomic
from fedweave.federation.intake import RoundReport
from fedweave.federation.rounds import federate
from fedweave.methods import build_method
from fedweave.methods.base import ServerState
from fedweave.router.mlp import sparsify
from fedweave.runs.folder import Progress, RunFolder
from fedweave.runs.report import final_report
from fedweave.runs.summary import served_models, summarise
from fedweave.runs.workspace import Kept, Prepared, Workspace, prepare


def start(config: Config, output: Path, console: Console, kept: Kept | None = None) -> dict[str, Any]:
    """A new run in ``output``."""
    if output.exists():
        raise UserError(
            f"the run folder {output} exists; continue it with `fedweave resume {output}` or choose another output."
        )
    prepared = prepare(config, console, kept)
    run = RunFolder.create(output, config, prepared.data.manifest)
    console.say(f"run folder: {output}")
    return _execute(run, prepared, console)


def resume(path: Path, overrides: list[str], console: Console, kept: Kept | None = None) -> dict[str, Any]:
    """Continue a run from its newest checkpoint."""
    run, config = RunFolder.open(path, overrides)
    prepared = prepare(config, console, kept)
    run.check_manifest(prepared.data.manifest)
    if overrides:  # more rounds stay asked for, even if this session is killed too
        write_atomic(path / "config.yaml", dump_config(config))
    return _execute(run, prepared, console)


class Ground(Protocol):
    """What a run stands on: an engine, and what can be measured beside it."""

    config: Config
    backbone: Any  # a Backbone, or as much of one as the server knows: name, fingerprint, device

    @property
    def engine(self) -> Any: ...

    def validate(self, state: ServerState, completed: int) -> dict[str, Any]:
        """Validation ``loss`` and what else the log keeps."""

    def audit(self) -> dict[str, Any] | None:
        """How buckets and experts match true labels, where somebody has them."""

    def summarise(self, run: RunFolder, progress: Progress, console: Console) -> dict[str, Any]:
        """Everything that summary.json holds, but for the timing."""

    def close(self) -> None: ...


class Bench:
    """The ground of a run whose clients are all in this process."""

    def __init__(self, workspace: Workspace):
        self.workspace, self.config, self.engine = workspace, workspace.config, workspace.engine
        self.backbone = workspace.backbone

    def validate(self, state: ServerState, completed: int) -> dict[str, Any]:
        """The plain mean over examples: choosing a round uses no label. Labels only sort the log."""
        held = self.workspace.validation
        losses = torch.zeros(len(held.encoded))
        models = served_models(self.workspace, state)
        for model in models:
            weights = model.weights(held.features)
            gates = sparsify(weights, build_method(self.config).selection)
            losses += example_losses(self.backbone, held.encoded, model.mixture, model.theta, gates) / len(models)
        entropy = -(weights.clamp(min=1e-12).log() * weights).sum(1).mean().item()
        return {
            "loss": losses.mean().item(),
            "tasks": per_task(losses, held.labels),
            "router_entropy": entropy,
        }

    def audit(self) -> dict[str, Any] | None:
        if len(self.workspace.tasks) < 2:
            return None
        clients = self.engine.clients
        return alignment_audit(
            [c.buckets for c in clients], [c.assignment for c in clients], self.workspace.client_labels
        )

    def summarise(self, run: RunFolder, progress: Progress, console: Console) -> dict[str, Any]:
        return summarise(run, self, self.workspace, progress, console)

    def close(self) -> None:
        self.engine.detach()
        if weights_hash(self.backbone.model) != self.backbone.weights_hash:
            raise RuntimeError("the backbone changed during the run, which must never happen")


def _execute(run: RunFolder, prepared: Prepared, console: Console) -> dict[str, Any]:
    console.spent.clear()
    if prepared.config.engine == "flower":
        from fedweave.runs.simulated import simulate

        return simulate(run, prepared, console)
    started = time.monotonic()
    workspace = prepared.build(console)
    if build_method(workspace.config).uses_labels:
        console.warn(f"{workspace.config.method} is told every task label: an upper bound, not a method.")
        workspace.reveal_labels()
    return carry_out(run, Bench(workspace), console, started)


def carry_out(run: RunFolder, ground: Ground, console: Console, started: float) -> dict[str, Any]:
    """All phases of a run, from wherever its folder says it stands."""
    method = build_method(ground.config)
    progress = run.load(ground, console)
    earlier = progress.seconds if progress else 0.0
    if progress is None:
        state = method.prepare(ground.engine)
        loss = _validate(ground, state, run, 0)
        progress = Progress(state, 0, state, 0, loss, time.monotonic() - started)
        _record_discovery(run, ground, state, console)
        run.save(ground, progress)
    else:
        console.say(f"resuming after round {progress.completed}")
    bar = console.progress("rounds", ground.config.training.rounds, "rounds")
    bar.advance(progress.completed)

    def after_round(state: ServerState, report: RoundReport) -> None:
        """Validate, remember the best, save."""
        completed = report.t + 1
        run.log(
            "round",
            round=completed,
            train_loss=report.train_loss,
            tokens=report.tokens,
            participants=[c.name for c in report.participants],
            refused=[{"client": name, "reason": reason} for name, reason in report.refused],
            clipped=report.clipped,
            bytes_up=report.bytes_up,
            bytes_down=report.bytes_down,
        )
        rounds, every = ground.config.training.rounds, ground.config.evaluation.every
        note = f"train loss {report.train_loss:.3f}"
        progress.state, progress.completed = state, completed
        if completed % every == 0 or completed == rounds:
            loss = _validate(ground, state, run, completed)
            note += f", validation {loss:.3f}"
            if loss < progress.best_loss:
                progress.best, progress.best_round, progress.best_loss = state, completed, loss
        progress.seconds = earlier + time.monotonic() - started
        run.save(ground, progress)
        bar.advance(1, note)

    remaining = range(progress.completed, ground.config.training.rounds)
    federate(method, ground.engine, progress.state, remaining, after_round)
    bar.close()
    training_seconds = progress.seconds
    summary = ground.summarise(run, progress, console)
    ground.close()
    summary["timing"] = {
        "until_last_round_s": round(training_seconds, 2),
        "total_s": round(earlier + time.monotonic() - started, 2),
        "phases_s": {label: round(seconds, 2) for label, seconds in console.spent.items()},
    }
    run.write_json("summary.json", summary)
    console.say(final_report(summary))
    return summary


def _validate(ground: Ground, state: ServerState, run: RunFolder, completed: int) -> float:
    """The validation loss, which is logged."""
    measured = ground.validate(state, completed)
    run.log("validation", round=completed, **measured)
    return measured["loss"]


def _record_discovery(run: RunFolder, ground: Ground, state: ServerState, console: Console) -> None:
    """discovery.json, and in a few words what came out."""
    clients = ground.engine.clients
    record: dict[str, Any] = {
        **state.report,
        "clients": {
            c.name: {
                "examples": len(c),
                "buckets": c.sizes,
                "experts": c.assignment,
                "note": c.note,
            }
            for c in clients
        },
    }
    if (audit := ground.audit()) is not None:
        record["audit"] = audit
    run.write_json("discovery.json", record)
    for client in clients:
        if client.note:
            console.warn(f"client {client.name!r}: {client.note}; it has one bucket.")
    if state.report.get("alignment_note"):
        console.warn(str(state.report["alignment_note"]))
    buckets = sum(len(c.sizes) for c in clients)
    console.say(f"discovery: {len(clients)} clients, {buckets} buckets, {state.layout.experts} experts")
