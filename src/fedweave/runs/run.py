"""A whole run: prepare, discover, federate, test. Interrupted anywhere, it goes on where it stopped."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from fedweave.backbone.load import weights_hash
from fedweave.config import Config, dump_config
from fedweave.console import Console
from fedweave.errors import UserError
from fedweave.evaluation.audit import alignment_audit, per_task
from fedweave.evaluation.losses import example_losses
from fedweave.federation.checkpoint import write_atomic
from fedweave.federation.rounds import RoundReport, federate
from fedweave.methods import build_method
from fedweave.methods.base import ServerState
from fedweave.router.mlp import sparsify
from fedweave.runs.continuing import initial_state
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
    if config.init:
        initial_state(config, prepared.backbone)  # a bundle that does not fit shows before anything is written
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


def _execute(run: RunFolder, prepared: Prepared, console: Console) -> dict[str, Any]:
    started = time.monotonic()
    console.spent.clear()
    workspace = prepared.build(console)
    method = build_method(workspace.config)
    if method.uses_labels:
        console.warn(f"{workspace.config.method} is told every task label: an upper bound, not a method.")
        workspace.reveal_labels()
    progress = run.load(workspace, console)
    earlier = progress.seconds if progress else 0.0
    if progress is None:
        if workspace.config.init:
            state = method.restart(workspace.engine, initial_state(workspace.config, workspace.backbone))
        else:
            state = method.prepare(workspace.engine)
        loss = _validate(workspace, state, run, 0)
        progress = Progress(state, 0, state, 0, loss, time.monotonic() - started)
        _record_discovery(run, workspace, state, console)
        run.save(workspace, progress)
    else:
        console.say(f"resuming after round {progress.completed}")
    bar = console.progress("rounds", workspace.config.training.rounds, "rounds")
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
        )
        rounds, every = workspace.config.training.rounds, workspace.config.evaluation.every
        note = f"train loss {report.train_loss:.3f}"
        progress.state, progress.completed = state, completed
        if completed % every == 0 or completed == rounds:
            loss = _validate(workspace, state, run, completed)
            note += f", validation {loss:.3f}"
            if loss < progress.best_loss:
                progress.best, progress.best_round, progress.best_loss = state, completed, loss
        progress.seconds = earlier + time.monotonic() - started
        run.save(workspace, progress)
        bar.advance(1, note)

    remaining = range(progress.completed, workspace.config.training.rounds)
    federate(method, workspace.engine, progress.state, remaining, after_round)
    bar.close()
    training_seconds = progress.seconds
    summary = summarise(run, workspace, progress, console)
    workspace.engine.detach()
    if weights_hash(workspace.backbone.model) != workspace.backbone.weights_hash:
        raise RuntimeError("the backbone changed during the run, which must never happen")
    summary["timing"] = {
        "until_last_round_s": round(training_seconds, 2),
        "total_s": round(earlier + time.monotonic() - started, 2),
        "phases_s": {label: round(seconds, 2) for label, seconds in console.spent.items()},
    }
    run.write_json("summary.json", summary)
    console.say(final_report(summary))
    return summary


def _validate(workspace: Workspace, state: ServerState, run: RunFolder, completed: int) -> float:
    """Validation loss, the plain mean over examples: choosing a round uses no label. Labels only sort the log."""
    held = workspace.validation
    losses = torch.zeros(len(held.encoded))
    models = served_models(workspace, state)
    for model in models:
        weights = model.weights(held.features)
        gates = sparsify(weights, build_method(workspace.config).selection)
        part = example_losses(workspace.backbone, held.encoded, model.mixture, model.theta, gates)
        losses += part / len(models)
    entropy = -(weights.clamp(min=1e-12).log() * weights).sum(1).mean().item()
    run.log(
        "validation",
        round=completed,
        loss=losses.mean().item(),
        tasks=per_task(losses, held.labels),
        router_entropy=entropy,
    )
    return losses.mean().item()


def _record_discovery(run: RunFolder, workspace: Workspace, state: ServerState, console: Console) -> None:
    """discovery.json, and in a few words what came out."""
    clients = workspace.engine.clients
    record: dict[str, Any] = {
        **state.report,
        "clients": {
            c.name: {
                "examples": len(c),
                "buckets": [len(b) for b in c.buckets],
                "experts": c.assignment,
                "note": c.note,
            }
            for c in clients
        },
    }
    if len(workspace.tasks) > 1:
        record["audit"] = alignment_audit(
            [c.buckets for c in clients], [c.assignment for c in clients], workspace.client_labels
        )
    run.write_json("discovery.json", record)
    for client in clients:
        if client.note:
            console.warn(f"client {client.name!r}: {client.note}; it has one bucket.")
    if state.report.get("alignment_note"):
        console.warn(str(state.report["alignment_note"]))
    buckets = sum(len(c.buckets) for c in clients)
    console.say(f"discovery: {len(clients)} clients, {buckets} buckets, {state.layout.experts} experts")
