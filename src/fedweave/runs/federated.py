"""A run whose clients are Flower nodes: the same phases, with validation at the sites.

Over real sites this process is the ServerApp; the run folder is an ordinary one.
"""

import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
from flwr.serverapp import Grid
from flwr.supercore.run import RunNotRunningException

from fedweave.aggregation.robust import chosen_share
from fedweave.backbone.features import compute_features
from fedweave.backbone.load import load_backbone
from fedweave.config import Config, dump_config
from fedweave.console import Console
from fedweave.data.examples import FederatedData
from fedweave.data.own import read_test
from fedweave.errors import UserError
from fedweave.events import ValidationEvent
from fedweave.federation.engines.flower.engine import FlowerEngine, public
from fedweave.federation.engines.flower.launch import submit
from fedweave.federation.engines.flower.switches import hush
from fedweave.federation.engines.flower.tasks import Runtime, server_task
from fedweave.federation.engines.in_process import InProcessEngine
from fedweave.federation.evaluate import Loss, does_better, overall
from fedweave.federation.hello import Anatomy
from fedweave.federation.state import ServerState, broadcast
from fedweave.files import write_atomic
from fedweave.json_files import read_json, write_json
from fedweave.methods import build_method
from fedweave.runs.folder import Progress, RunFolder, require_new
from fedweave.runs.live import followed
from fedweave.runs.reading import read_events, resume_command
from fedweave.runs.run import RunContext, carry_out
from fedweave.runs.summary import summarise
from fedweave.runs.workspace import TestSet, Workspace
from fedweave.schema import AnatomyRecord, Manifest, Summary

MODEL = "model.json"
OUTAGE = 30.0  # seconds for which a SuperLink may be away without ending the run


def start(config: Config, output: Path, runtime: Runtime, console: Console) -> Summary:
    """A new federation, once ``federation.sites`` sites are there."""
    if config.federation.sites < 1:
        raise UserError("say how many sites must be there before alignment, as in federation.sites=3.")
    method = build_method(config)
    if method.uses_labels or method.gathers:
        what = "is told every example's kind" if method.uses_labels else "has everybody's data"
        raise UserError(f"method={config.method} {what}: it runs in simulations only.")
    require_new(output, runtime.typed)
    _check_files(runtime)
    tester = load_test(config, console)
    # its data is not listed anywhere; its sites know the federation by this name
    manifest: Manifest = {"source": config.data.source, "seed": config.seed, "federation": uuid.uuid4().hex}
    run = RunFolder.create(output, config, manifest)
    with run.session(config, runtime.typed):
        return _execute(run, config, runtime, console, tester)


def resume(
    path: Path, overrides: list[str], runtime: Runtime, console: Console, checkpoint: int | None = None
) -> Summary:
    """Continue a federation from the server's newest checkpoint, or from the one of a round that is named; its
    sites know it by the manifest's name."""
    run, config = RunFolder.open(path, overrides)
    if config.data.source != "sites":
        raise UserError(f"{path} is no run over sites; continue it with `fedweave resume {path}`.")
    _check_files(runtime)
    with run.session(config, runtime.typed):
        if (snapshot := run.newest(checkpoint)) is not None:
            snapshot.check_config(config)
        tester = load_test(config, console)  # all that can be wrong shows before anything is written
        if snapshot is not None:
            run.go_back(snapshot.meta["completed"])
        if overrides:
            write_atomic(path / "config.yaml", dump_config(config))
        return _execute(run, config, runtime, console, tester)


def _execute(
    run: RunFolder, config: Config, runtime: Runtime, console: Console, tester: Workspace | None
) -> Summary:
    hush()
    console.say(f"run folder: {run.path}")
    try:
        with (
            followed(run.path, config.training.rounds, console),
            server_task(runtime, submit(runtime), OUTAGE) as grid,
        ):
            return federate_over(grid, run, config, console, tester)
    except (httpx.HTTPError, RunNotRunningException) as error:
        raise UserError(
            f"the SuperLink at {runtime.address} is gone ({error or type(error).__name__}); start it again, then "
            f"`{resume_command(run.path, config, runtime.typed)}` goes on from the last checkpoint."
        ) from error


def _check_files(runtime: Runtime) -> None:
    for path in (runtime.root_certificates, runtime.secret):
        if path is not None and not path.is_file():
            raise UserError(f"there is no file {path}; examples/deployment/make-certificates.sh makes it.")


def federate_over(
    grid: Grid, run: RunFolder, config: Config, console: Console, tester: Workspace | None
) -> Summary:
    """A run over the nodes of ``grid``: a new one once enough of them are there, or the rest of an old one. In a
    simulation they are the clients whose data is here."""
    console.spent.clear()
    started, real = time.monotonic(), config.data.source == "sites"
    federation = run.manifest()["federation"] if real else str(run.path.resolve())
    engine = FlowerEngine(grid, config, console, federation, public(config) if real else config)
    engine.bound = real
    remembered = read_json(run.path / MODEL, AnatomyRecord, "restore it and try again")
    if remembered is not None:
        engine.know(Anatomy.recorded(remembered))
    elif tester is not None and real:
        engine.know(Anatomy.of(tester.backbone, config.experts.target_modules))
    if run.newest() is None:
        engine.enrol(len(tester.data.clients) if tester is not None and not real else config.federation.sites)
    else:
        engine.meet()
    assert engine.model is not None
    if tester is not None and tester.backbone.identity != engine.identity:
        raise UserError(
            f"the server's {tester.backbone.name} is not the sites' model; name the same files in backbone.model."
        )
    write_json(run.path / MODEL, engine.model.record)
    earlier = [event for event in read_events(run.metrics) if event["event"] == "validation"]
    return carry_out(run, SitesRun(config, engine, tester, earlier), console, started)


@dataclass
class Described:
    """As much of the backbone as a server without a model knows."""

    name: str
    fingerprint: str
    device: torch.device
    note: str = ""


class SitesRun(RunContext):
    """The context of a run whose clients are elsewhere, with their labels and features."""

    def __init__(
        self,
        config: Config,
        engine: FlowerEngine,
        tester: Workspace | None,
        earlier: Sequence[ValidationEvent] = (),  # of a run that is resumed
    ):
        self.config, self.engine, self.tester = config, engine, tester
        self.measured = {event["round"]: event.get("sites", {}) for event in earlier}
        self.backbone = Described(
            config.backbone.model, engine.model.fingerprint if engine.model else "", engine.device
        )

    def validate(self, state: ServerState, completed: int) -> ValidationEvent:
        """Every site's loss on its own examples, and their mean over all examples."""
        asked = self.engine.ask(
            build_method(self.config).evaluate, self.engine.members, broadcast(state, completed)
        )
        losses = {site.name: loss for site, loss in asked if loss.count}
        total = overall(list(losses.values()), chosen_share(self.config)) if losses else Loss()
        self.measured[completed] = {name: loss.mean for name, loss in sorted(losses.items())}
        if not losses:
            self.engine.console.warn("no site measured a validation loss; the last round counts as the best.")
        return {
            "event": "validation",
            "round": completed,
            "loss": total.mean if losses else -float(completed),
            "sites": self.measured[completed],
            "router_entropy": total.mean_entropy if math.isfinite(total.mean_entropy) else None,
        }

    def better(self, measured: ValidationEvent, progress: Progress) -> bool:
        """Of strangers the median one decides; a mean is what they say it is."""
        before = self.measured.get(progress.best_round, {})
        told = does_better(measured.get("sites", {}), before) if math.isfinite(progress.best_loss) else None
        return super().better(measured, progress) if told is None or chosen_share(self.config) >= 1 else told

    def summarise(self, run: RunFolder, progress: Progress, console: Console) -> Summary:
        tester = self.tester if build_method(self.config).served(progress.state) else None
        return summarise(run, self, tester, progress, console)

    def close(self) -> None:
        if self.tester is not None:
            self.tester.engine.detach()


def load_test(config: Config, console: Console) -> Workspace | None:
    """The file that ``federation.test`` names, with a backbone of the server's own and no clients; None without
    one, and then the server loads no model."""
    if config.federation.test is None:
        return None
    rows, tasks, notes = read_test(config, config.federation.test, "federation.test=")
    backbone = load_backbone(config.backbone)
    rows, encoded = backbone.prompts.encode_fitting(rows, config.data.long_answers, console.warn)
    features = compute_features(backbone, [e.prompt for e in encoded], console)
    data = FederatedData(clients={}, validation=[], test=rows, tasks=tasks, notes=notes)
    engine, nothing = InProcessEngine(backbone, [], config, console), TestSet([], [], features[:0])
    return Workspace(config, data, backbone, engine, nothing, TestSet(rows, encoded, features), None, rows=[])
