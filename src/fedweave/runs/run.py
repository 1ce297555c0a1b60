"""A whole run: prepare, discover, federate, test. Interrupted anywhere, it goes on where it stopped."""

import math
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch

from fedweave.backbone.device import processes_on
from fedweave.backbone.weights import weights_hash
from fedweave.config import Config, dump_config
from fedweave.console import Console
from fedweave.description.record import read_experts
from fedweave.errors import UserError
from fedweave.evaluation.losses import example_losses
from fedweave.events import ValidationEvent
from fedweave.federation.engines.distributed import world
from fedweave.federation.private import privacy_figures
from fedweave.federation.rounds import RoundReport, federate
from fedweave.federation.state import ServerState
from fedweave.files import write_atomic
from fedweave.json_files import write_json
from fedweave.methods import build_method
from fedweave.runs.course import BACK, END, ON, agreed, follow, judge, renew, rounds_left, setback, setback_text
from fedweave.runs.folder import Progress, RunFolder, require_new
from fedweave.runs.live import LiveProgress, followed
from fedweave.runs.loggers import open_loggers, require_loggers
from fedweave.runs.reading import resume_command
from fedweave.runs.records import change_record, label_record, prompt_map, round_record, validation_record
from fedweave.runs.summary import peak_memory, served_models, summarise
from fedweave.runs.testing import Exam
from fedweave.runs.text import privacy_text, summary_text
from fedweave.runs.workspace import Kept, Prepared, Workspace, initial_state, prepare
from fedweave.schema import LabelRecord, PrivacyFigures, PromptMap, Summary


def start(config: Config, output: Path, console: Console, kept: Kept | None = None) -> Summary | None:
    """A new run in ``output``; its summary, but for processes that only help."""
    processes = world()
    if processes is not None and processes.rank > 0:
        stand_by(output, [], kept)
        return None
    require_new(output)
    require_loggers(config.loggers)
    build_method(config)  # what it cannot do shows before anything loads
    prepared = prepare(config, console, kept)
    initial_state(config, prepared.backbone)  # a bundle that does not fit shows before anything is written
    run = RunFolder.create(output, config, prepared.data.manifest)
    with run.session(config):
        console.say(f"run folder: {output}")
        return _execute(run, prepared, console)


def resume(
    path: Path, overrides: list[str], console: Console, kept: Kept | None = None, checkpoint: int | None = None
) -> Summary | None:
    """Continue a run from its newest checkpoint, or from the one of a round that is named."""
    processes = world()
    if processes is not None and processes.rank > 0:
        stand_by(path, overrides, kept)
        return None
    run, config = RunFolder.open(path, overrides)
    if config.data.source == "sites":
        raise UserError(f"{path} is a run over sites; continue it with `{resume_command(path, config)}`.")
    require_loggers(config.loggers)
    with run.session(config):
        snapshot = run.newest(checkpoint)
        prepared = prepare(config, console, kept)
        run.check_data(prepared.data.manifest, build_method(config).uses_labels)
        if snapshot is not None:
            snapshot.check(config, prepared.backbone)
            run.go_back(snapshot.meta["completed"])
        run.note_data(prepared.data.manifest)
        if overrides:  # more rounds stay asked for, even if this session is killed too
            write_atomic(path / "config.yaml", dump_config(config))
        return _execute(run, prepared, console)


def stand_by(path: Path, overrides: list[str], kept: Kept | None) -> None:
    """All that the other processes of a run do: the same algorithm from the same state, with their own clients. The
    first one measures and writes."""
    processes, console = world(), Console(quiet=True)
    assert processes is not None
    processes.wait()  # until the first process has the folder and the cached features
    run, config = RunFolder.open(path, overrides)
    workspace = prepare(config, console, kept).build(console)
    method = build_method(config)
    workspace.disclose(method)
    snapshot = run.newest()
    if snapshot is not None:
        workspace.engine.restore(snapshot.meta["clients"], snapshot.tensors)
        progress = Progress.of(snapshot, workspace.engine.layers, workspace.backbone.device)
    else:
        state = method.prepare(workspace.engine, initial_state(config, workspace.backbone))
        progress = Progress(state, 0, state, 0, float("inf"), 0.0)  # losses are the first process's affair
        workspace.engine.memories()  # the first process saves here, too

    def after_round(state: ServerState, report: RoundReport) -> ServerState:
        progress.state, progress.completed = state, report.t + 1
        if report.change:
            renew(progress)
        follow(progress, agreed(None), workspace.engine)
        workspace.engine.memories()
        return progress.state

    federate(method, workspace.engine, progress.state, rounds_left(progress, config.training.rounds), after_round)
    workspace.engine.detach()


class RunContext(ABC):
    """What a run stands on: an engine, and what can be measured beside it."""

    config: Config
    backbone: Any  # a Backbone, or as much of one as the server knows: name, fingerprint, device

    engine: Any  # in this process, or Flower's

    @abstractmethod
    def validate(self, state: ServerState, completed: int) -> ValidationEvent:
        """Validation ``loss`` and what else the log keeps, after so many rounds."""

    def better(self, measured: ValidationEvent, progress: Progress) -> bool:
        """Whether this is the best round so far."""
        loss, best = measured["loss"], progress.best_loss
        return loss < best or (math.isnan(best) and not math.isnan(loss))

    def labels(self) -> LabelRecord:
        """What discovery.json adds where somebody has true labels."""
        return {}

    def prompts(self) -> PromptMap | None:
        """A map of prompts for the report, where their features are at hand."""
        return None

    @abstractmethod
    def summarise(self, run: RunFolder, progress: Progress, console: Console) -> Summary:
        """Everything that summary.json holds, but for the timing."""

    @abstractmethod
    def close(self) -> None: ...


class LocalRun(RunContext):
    """The context of a run whose clients are all in this process."""

    def __init__(self, workspace: Workspace):
        self.workspace, self.config, self.engine = workspace, workspace.config, workspace.engine
        self.backbone = workspace.backbone
        self._untouched = self.backbone.weights_hash

    def validate(self, state: ServerState, completed: int) -> ValidationEvent:
        """The plain mean over examples: choosing a round uses no label. Labels only sort the log."""
        held = self.workspace.validation
        losses = torch.zeros(len(held.encoded))
        models = served_models(self.workspace, state)
        for model in models:
            weights = model.weights(held.features)
            gates = model.experts.gates(weights, build_method(self.config).selection)
            losses += example_losses(self.backbone, held.encoded, model.mixture, model.theta, gates) / len(models)
        record = validation_record(losses, weights, held, completed)
        if self.config.evaluation.score_rounds:
            exam = Exam(self.config, self.workspace.data.tasks, held, self.engine.console)
            record["scores"] = exam.scores(models)
        return record

    def labels(self) -> LabelRecord:
        return label_record(self.workspace)

    def prompts(self) -> PromptMap:
        return prompt_map(self.workspace)

    def summarise(self, run: RunFolder, progress: Progress, console: Console) -> Summary:
        return summarise(run, self, self.workspace, progress, console)

    def close(self) -> None:
        self.engine.detach()
        if weights_hash(self.backbone.model) != self._untouched:
            raise RuntimeError("the backbone changed during the run, which must never happen")


def _execute(run: RunFolder, prepared: Prepared, console: Console) -> Summary:
    console.spent.clear()
    with followed(run.path, prepared.config.training.rounds, console):
        if prepared.config.engine == "flower":
            from fedweave.runs.simulated import simulate

            return simulate(run, prepared, console)
        return _in_process(run, prepared, console)


def _in_process(run: RunFolder, prepared: Prepared, console: Console) -> Summary:
    started = time.monotonic()
    workspace = prepared.build(console)
    if (processes := world()) is not None:
        sharing = processes_on(workspace.backbone.device)
        note = f", and {sharing} of them each GPU: correct, but no faster than one" if sharing > 1 else ""
        console.say(f"{processes.size} processes share the clients{note}")
        processes.wait()
    device = workspace.backbone.device
    if device.type == "cuda":  # the peak is to be this run's, not an earlier one's in the process
        torch.cuda.reset_peak_memory_stats(device)
    method = build_method(workspace.config)
    if method.uses_labels:
        console.warn(f"{workspace.config.method} is told every example's kind: an upper bound, not a method.")
    if method.gathers:
        console.warn(f"{workspace.config.method} has everybody's data in one place: a reference, not a method.")
    workspace.disclose(method)
    return carry_out(run, LocalRun(workspace), console, started)


def carry_out(run: RunFolder, context: RunContext, console: Console, started: float) -> Summary:
    """All phases of a run, from wherever its folder says it stands."""
    method = build_method(context.config)
    live = LiveProgress(run.path, context.config.training.rounds)
    console.on_progress = live.phase
    progress = run.load(context)
    earlier = progress.seconds if progress else 0.0
    run.loggers = open_loggers(context.config, run.path, progress.completed + 1 if progress else 0, console)
    if progress is None:
        state = method.prepare(context.engine, initial_state(context.config, context.backbone))
        loss = _validate(context, state, run, 0)["loss"]
        progress = Progress(state, 0, state, 0, loss, time.monotonic() - started)
        _record_discovery(run, context, state, console)
        run.save(context, progress)
    else:
        console.say(f"resuming after round {progress.completed}")
        if not run.has_discovery():
            _record_discovery(run, context, progress.state, console)
    if context.config.privacy.level != "none":
        console.say(privacy_text(_private(context)))
    live.begin_rounds(progress.completed)
    bar = console.progress("rounds", context.config.training.rounds, "rounds")
    bar.advance(progress.completed)

    def after_round(state: ServerState, report: RoundReport) -> ServerState:
        """Validate, remember the best or go back to it, save."""
        completed, change = report.t + 1, report.change
        if change is not None and (record := change_record(change, state, context.engine.members)) is not None:
            run.log(record)
        event = round_record(report)
        note = "" if report.train_loss is None else f"train loss {report.train_loss:.3f}, "
        if context.config.privacy.level != "none":
            event["epsilon"] = _private(context)["spent"]
            note += f"ε {event['epsilon']:.2f} spent, "
        run.log(event)
        rounds, every = context.config.training.rounds, context.config.evaluation.every
        progress.state, progress.completed, verdict = state, completed, ON
        if change:
            renew(progress)
        if completed % every == 0 or completed == rounds or change:
            measured = _validate(context, state, run, completed)
            note += f"validation {measured['loss']:.3f}"
            better, patience = context.better(measured, progress), context.config.training.patience
            verdict = judge(progress, measured["loss"], better, patience)
        follow(progress, agreed(verdict), context.engine)
        if verdict in (BACK, END):
            back = setback(progress, verdict)
            run.log(back)
            console.warn(setback_text(back, progress.best_loss))
        progress.seconds = earlier + time.monotonic() - started
        run.save(context, progress)
        live.round_done()
        bar.advance(1, note.removesuffix(", "))
        return progress.state

    remaining = rounds_left(progress, context.config.training.rounds)
    federate(method, context.engine, progress.state, remaining, after_round)
    run.writing.finish()
    bar.close()
    training_seconds = progress.seconds
    summary = context.summarise(run, progress, console)
    if context.config.privacy.level != "none":
        summary["privacy"] = _private(context)
    context.close()
    summary["timing"] = {
        "until_last_round_s": round(training_seconds, 2),
        "total_s": round(earlier + time.monotonic() - started, 2),
        "phases_s": {label: round(seconds, 2) for label, seconds in console.spent.items()},
        "peak_memory_bytes": peak_memory(context.backbone.device),
    }
    write_json(run.path / "summary.json", summary)
    run.loggers.test(summary)
    run.loggers.close()
    live.finish()
    console.say(summary_text(summary, read_experts(run.path)))
    return summary


def _private(context: RunContext) -> PrivacyFigures:
    return privacy_figures(context.config, context.engine.members, context.engine.answered)


def _validate(context: RunContext, state: ServerState, run: RunFolder, completed: int) -> ValidationEvent:
    """What was measured, which is logged."""
    measured = context.validate(state, completed)
    run.log(measured)
    return measured


def _record_discovery(run: RunFolder, context: RunContext, state: ServerState, console: Console) -> None:
    """discovery.json and embedding.json, and in a few words what came out."""
    clients = context.engine.members
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
    write_json(run.path / "discovery.json", record | context.labels())
    if (prompts := context.prompts()) is not None:
        write_json(run.path / "embedding.json", prompts, indent=None)
    for client in clients:
        if client.note:
            console.warn(f"client {client.name!r}: {client.note}; it has one bucket.")
    if state.report.get("alignment_note"):
        console.warn(str(state.report["alignment_note"]))
    buckets = sum(len(c.sizes) for c in clients)
    console.say(f"discovery: {len(clients)} clients, {buckets} buckets, {state.layout.experts} experts")
