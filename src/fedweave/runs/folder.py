"""The run folder: config, manifest, metrics, checkpoints, summary. Its files are the run's memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedweave.backbone.load import Backbone
from fedweave.config import Config, dump_config, load_config
from fedweave.console import Console
from fedweave.errors import UserError
from fedweave.experts.layout import AdapterLayout, Shaped
from fedweave.federation.checkpoint import (
    load_checkpoint,
    prune,
    round_checkpoints,
    round_name,
    save_checkpoint,
)
from fedweave.federation.state import ServerState
from fedweave.files import atomic_folder, write_atomic
from fedweave.router.mlp import RouterLayout
from fedweave.runs.loggers import Loggers
from fedweave.schema import Event, Manifest
from fedweave.settings import flatten, to_tree

if TYPE_CHECKING:
    from fedweave.runs.run import RunContext

# Keys that a resumed run may change: they do not alter what was already computed.
FREE_KEYS = (
    "output",
    "loggers",
    "engine",
    "evaluation",
    "training.rounds",
    "training.clients_per_step",
    "federation.min_answers",
    "federation.repeats",
    "federation.sites",
    "federation.deadline",
    "federation.patience",
    "federation.test",
)


@dataclass
class Progress:
    """Where a run stands: completed rounds and the best one so far."""

    state: ServerState
    completed: int
    best: ServerState
    best_round: int
    best_loss: float
    seconds: float  # spent so far, over all sessions
    since: int = 0  # the round from which patience counts
    setbacks: int = 0  # how often patience has run out since the best round


class RunFolder:
    """Reads and writes one run's files."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.loggers = Loggers([])

    # ---------------------------------------------------------------------------------- life

    @classmethod
    def create(cls, path: Path, config: Config, manifest: Manifest) -> RunFolder:
        """Make the folder with its config and manifest, whole or not at all; every check has passed by now."""
        try:
            with atomic_folder(path, shared=True) as partial:
                text = json.dumps(manifest, indent=1, ensure_ascii=False)
                (partial / "manifest.json").write_text(text, encoding="utf-8")
                (partial / "config.yaml").write_text(dump_config(config), encoding="utf-8")
                (partial / "metrics.jsonl").touch()
        except FileExistsError:
            raise UserError(
                f"the run folder {path} exists; continue it with `fedweave resume {path}` or choose another output."
            ) from None
        except OSError as error:
            raise UserError(f"the run folder {path} cannot be made: {error.strerror}.") from error
        return cls(path)

    @classmethod
    def open(cls, path: Path, overrides: list[str] | None = None) -> tuple[RunFolder, Config]:
        """An existing run and its config, with overrides of keys that may change."""
        if not (path / "config.yaml").is_file():
            raise UserError(f"{path} is no run folder: it has no config.yaml.")
        for item in overrides or []:
            key = item.partition("=")[0]
            if not any(key == free or key.startswith(f"{free}.") for free in FREE_KEYS):
                raise UserError(f"{key} is fixed for a run; only {', '.join(FREE_KEYS)} may change on resume.")
        return cls(path), load_config(path / "config.yaml", overrides or [])

    def check_manifest(self, manifest: Manifest) -> None:
        """The data must be what the run started with."""
        try:
            saved = json.loads((self.path / "manifest.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise UserError(f"{self.path / 'manifest.json'} is missing or damaged.") from None
        if saved != json.loads(json.dumps(manifest)):
            raise UserError(f"the data of {self.path} has changed since the run began; restore it or start anew.")

    def log(self, event: Event) -> None:
        """Append one event to metrics.jsonl; trackers get a copy of its figures."""
        try:
            with open(self.metrics, "a", encoding="utf-8") as out:
                out.write(json.dumps(event) + "\n")
        except OSError as error:
            raise UserError(
                f"{self.metrics} cannot be written ({error.strerror}); free some space and resume."
            ) from None
        self.loggers.event(event)

    def write_json(self, name: str, content: object) -> None:
        write_atomic(self.path / name, json.dumps(content, indent=1, ensure_ascii=False))

    # ---------------------------------------------------------------------------------- checkpoints

    def save(self, context: RunContext, progress: Progress) -> None:
        """Everything that resuming needs. The best state rides along only while it is not the current one."""
        state, best = progress.state, progress.best
        tensors = state.tensors()
        if progress.best_round != progress.completed:
            moved = {name: tensor for name, tensor in best.tensors().items() if tensor is not tensors.get(name)}
            tensors |= {f"best_{name}": tensor for name, tensor in moved.items()}
        tensors |= context.engine.memories()
        meta = {
            "completed": progress.completed,
            "best_round": progress.best_round,
            "best_loss": progress.best_loss,
            "seconds": progress.seconds,
            "since": progress.since,
            "setbacks": progress.setbacks,
            "pace": state.pace,
            "rank": state.layout.rank,
            "experts": state.layout.experts,
            "shared": state.layout.shared,
            "router": asdict(state.router) if state.router else None,
            "shares": state.shares,
            "norms": state.norms,
            "report": state.report,
            "clients": [client.record() for client in context.engine.members],
            "metrics_bytes": self.metrics.stat().st_size,
            "config": config_hash(context.config),
            "backbone": context.backbone.fingerprint,
        }
        save_checkpoint(self.checkpoints, round_name(progress.completed), tensors, meta)
        prune(self.checkpoints, keep={round_name(0)})

    def snapshots(self, console: Console) -> Iterator[Snapshot]:
        """The checkpoints that can be read, newest first; nothing is changed on disk."""
        for path in reversed(round_checkpoints(self.checkpoints)):
            try:
                yield Snapshot(*load_checkpoint(path), path)
            except UserError as error:
                console.warn(f"{error} Falling back to the one before.")

    def newest(self, console: Console) -> Snapshot | None:
        return next(self.snapshots(console), None)

    def load(self, context: RunContext, console: Console) -> Progress | None:
        """Put the newest checkpoint back onto the context, to go on from there; None when there is none yet."""
        snapshot = self.newest(console)
        if snapshot is None:
            _truncate(self.metrics, 0)  # killed before the first checkpoint: begin again
            return None
        snapshot.check(context.config, context.backbone)
        meta = snapshot.meta
        _truncate(self.metrics, meta["metrics_bytes"])
        context.engine.restore(meta["clients"], snapshot.tensors)
        return snapshot.progress(context.engine.layers, context.backbone.device)


@dataclass
class Snapshot:
    """A checkpoint as read from disk."""

    tensors: dict[str, torch.Tensor]
    meta: dict[str, Any]
    path: Path

    def check(self, config: Config, backbone: Backbone) -> None:
        """Refuse to mix a checkpoint with another config or another backbone."""
        if self.meta["config"] != config_hash(config):
            raise UserError(f"checkpoint {self.path} belongs to another config than the run's config.yaml.")
        if self.meta["backbone"] != backbone.fingerprint:
            raise UserError(
                f"checkpoint {self.path} was trained on another backbone, tokenizer or prompt rendering than "
                f"{backbone.name} as loaded now; use the one of the run."
            )

    def state(self, layers: Mapping[str, Shaped], device: torch.device, prefix: str = "") -> ServerState:
        """The last round's state."""
        names = ("theta", "phi", "private", "signatures")  # what the best round has in common is there once
        parts = {name: self.tensors.get(f"{prefix}{name}", self.tensors.get(name)) for name in names}
        on_device = {name: t.to(device) for name, t in parts.items() if t is not None}
        meta = self.meta
        return ServerState(
            layout=AdapterLayout.of(layers, meta["rank"], meta["experts"], meta.get("shared", 0)),
            router=RouterLayout(**meta["router"]) if meta["router"] else None,
            theta=on_device["theta"],
            phi=on_device.get("phi"),
            shares=meta["shares"],
            pace=meta.get("pace", 1.0),
            private=on_device.get("private"),
            signatures=on_device.get("signatures"),
            norms=meta["norms"],
            report=meta["report"],
        )

    def progress(self, layers: Mapping[str, Shaped], device: torch.device) -> Progress:
        """Where the run stood."""
        meta, state = self.meta, self.state(layers, device)
        best = state if meta["best_round"] == meta["completed"] else self.best(layers, device)
        since, setbacks = meta.get("since", meta["best_round"]), meta.get("setbacks", 0)
        return Progress(
            state, meta["completed"], best, meta["best_round"], meta["best_loss"], meta["seconds"], since, setbacks
        )

    def best(self, layers: Mapping[str, Shaped], device: torch.device) -> ServerState:
        """The state of the best round so far."""
        return self.state(layers, device, "best_" if self.meta["best_round"] != self.meta["completed"] else "")


def config_hash(config: Config) -> str:
    """A hash over the keys that decide results, where they differ from their defaults: a key that a later version
    adds leaves the runs of an earlier one alone."""
    defaults = flatten(to_tree(Config()))
    changed = {
        key: value
        for key, value in flatten(to_tree(config)).items()
        if value != defaults[key] and not any(key == free or key.startswith(f"{free}.") for free in FREE_KEYS)
    }
    return hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:32]


def _truncate(path: Path, size: int) -> None:
    """Forget events logged after the checkpoint: they will happen again."""
    with open(path, "ab") as out:
        out.truncate(size)
