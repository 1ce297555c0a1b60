"""A whole run: prepare, discover, federate, test. Interrupted anywhere, it goes on where it stopped."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from fedweave.backbone.load import weights_hash
from fedweave.config import Config, dump_config
from fedweave.console import Console
from fedweave.errors import UserError
from fedweave.evaluation.losses import example_losses
from fedweave.federation.checkpoint import write_atomic
from fedweave.federation.rounds import RoundReport, federate
from fedweave.methods import build_method
from fedweave.methods.base import ServerState
from fedweave.router.mlp import sparsify
from fedweave.runs.folder import Progress, RunFolder
from fedweave.runs.live import LiveProgress
from fedweave.runs.loggers import open_loggers, require_loggers
from fedweave.runs.records import discovery_record, prompt_map, round_record, validation_record
from fedweave.runs.summary import peak_memory, served_models, summarise
from fedweave.runs.testing import answer_scores
from fedweave.runs.text import summary_text
from fedweave.runs.workspace import Kept, Prepared, Workspace, prepare


def start(config: Config, output: Path, console: Console, kept: Kept | None = None) -> dict[str, Any]:
    """A new run in ``output``."""
    if output.exists():
        raise UserError(
            f"the run folder {output} exists; continue it with `fedweave resume {output}` or choose another output."
        )
    require_loggers(config.loggers)
    prepared = prepare(config, console, kept)
    run = RunFolder.create(output, config, prepared.data.manifest)
    console.say(f"run folder: {output}")
    return _execute(run, prepared, console)


def resume(path: Path, overrides: list[str], console: Console, kept: Kept | None = None) -> dict[str, Any]:
    """Continue a run from its newest checkpoint."""
    run, config = RunFolder.open(path, overrides)
    require_loggers(config.loggers)
    prepared = prepare(config, console, kept)
    run.check_manifest(prepared.data.manifest)
    if overrides:  # more rounds stay asked for, even if this session is killed too
        write_atomic(path / "config.yaml", dump_config(config))
    return _execute(run, prepared, console)


def _execute(run: RunFolder, prepared: Prepared, console: Console) -> dict[str, Any]:
    started = time.monotonic()
    console.spent.clear()
    live = LiveProgress(run.path, prepared.config.training.rounds)
    console.on_progress = live.phase
    workspace = prepared.build(console)
    if (
        workspace.backbone.device.type == "cuda"
    ):  # the peak is to be this run's, not an earlier one's in the process
        torch.cuda.reset_peak_memory_stats(workspace.backbone.device)
    method = build_method(workspace.config)
    if method.uses_labels:
        console.warn(f"{workspace.config.method} is told every task label: an upper bound, not a method.")
        workspace.reveal_labels()
    progress = run.load(workspace, console)
    earlier = progress.seconds if progress else 0.0
    run.loggers = open_loggers(workspace.config, run.path, progress.completed + 1 if progress else 0, console)
    if progress is None:
        state = method.prepare(workspace.engine)
        loss = _validate(workspace, state, run, 0, console)
        progress = Progress(state, 0, state, 0, loss, time.monotonic() - started)
        _record_discovery(run, workspace, state, console)
        run.save(workspace, progress)
    else:
        console.say(f"resuming after round {progress.completed}")
    live.begin_rounds(progress.completed)
    bar = console.progress("rounds", workspace.config.training.rounds, "rounds")
    bar.advance(progress.completed)

    def after_round(state: ServerState, report: RoundReport) -> None:
        """Validate, remember the best, save."""
        completed = report.t + 1
        run.log("round", round=completed, **round_record(report))
        rounds, every = workspace.config.training.rounds, workspace.config.evaluation.every
        note = f"train loss {report.train_loss:.3f}"
        progress.state, progress.completed = state, completed
        if completed % every == 0 or completed == rounds:
            loss = _validate(workspace, state, run, completed, console)
            note += f", validation {loss:.3f}"
            if loss < progress.best_loss:
                progress.best, progress.best_round, progress.best_loss = state, completed, loss
        progress.seconds = earlier + time.monotonic() - started
        run.save(workspace, progress)
        live.round_done()
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
        "peak_memory_bytes": peak_memory(workspace.backbone.device),
    }
    run.write_json("summary.json", summary)
    run.loggers.test(summary)
    run.loggers.close()
    live.finish()
    console.say(summary_text(summary))
    return summary


def _validate(workspace: Workspace, state: ServerState, run: RunFolder, completed: int, console: Console) -> float:
    """Validation loss, the plain mean over examples: choosing a round uses no label. Labels only sort the log."""
    held, config = workspace.validation, workspace.config
    losses = torch.zeros(len(held.encoded))
    models = served_models(workspace, state)
    for model in models:
        weights = model.weights(held.features)
        gates = sparsify(weights, build_method(config).selection)
        part = example_losses(workspace.backbone, held.encoded, model.mixture, model.theta, gates)
        losses += part / len(models)
    record = validation_record(losses, weights, held)
    if config.evaluation.score_rounds:
        record["scores"] = answer_scores(config, workspace.tasks, models, held, console)
    run.log("validation", round=completed, **record)
    return losses.mean().item()


def _record_discovery(run: RunFolder, workspace: Workspace, state: ServerState, console: Console) -> None:
    """discovery.json and embedding.json, and in a few words what came out."""
    clients = workspace.engine.clients
    run.write_json("discovery.json", discovery_record(workspace, state))
    write_atomic(run.path / "embedding.json", json.dumps(prompt_map(workspace), ensure_ascii=False))
    for client in clients:
        if client.note:
            console.warn(f"client {client.name!r}: {client.note}; it has one bucket.")
    if state.report.get("alignment_note"):
        console.warn(str(state.report["alignment_note"]))
    buckets = sum(len(c.buckets) for c in clients)
    console.say(f"discovery: {len(clients)} clients, {buckets} buckets, {state.layout.experts} experts")
