"""The run folder: config, manifest, metrics, checkpoints, summary. Its files are the run's memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fedweave.config import Config, dump_config, load_config
from fedweave.errors import UserError
from fedweave.events import Event
from fedweave.experts.layout import Shaped
from fedweave.federation.checkpoint import (
    Writing,
    load_checkpoint,
    prune,
    round_checkpoints,
    round_name,
    save_checkpoint,
)
from fedweave.federation.state import ServerState
from fedweave.files import atomic_folder, file_sha256, remove_folder
from fedweave.json_files import Damaged, read_json, sealed, write_json
from fedweave.privacy.budget import planned
from fedweave.runs.lock import locked, require_unlocked
from fedweave.runs.loggers import Loggers
from fedweave.runs.reading import resume_command
from fedweave.runs.snapshot import FREE_KEYS, CheckpointMeta, Snapshot, config_hash, is_one_of
from fedweave.schema import Discovery, Manifest

if TYPE_CHECKING:
    from fedweave.runs.run import RunContext


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

    @classmethod
    def of(cls, snapshot: Snapshot, layers: Mapping[str, Shaped], device: torch.device) -> Progress:
        """Where the run stood at a checkpoint."""
        meta, state = snapshot.meta, snapshot.state(layers, device)
        best = state if meta["best_round"] == meta["completed"] else snapshot.best(layers, device)
        spent, since, setbacks = meta["seconds"], meta["since"], meta["setbacks"]
        return cls(state, meta["completed"], best, meta["best_round"], meta["best_loss"], spent, since, setbacks)


class RunFolder:
    """Reads and writes one run's files."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.loggers = Loggers([])
        self.writing = Writing()

    # ---------------------------------------------------------------------------------- life

    @classmethod
    def create(cls, path: Path, config: Config, manifest: Manifest) -> RunFolder:
        """Make the folder with its config and manifest, whole or not at all; every check has passed by now."""
        try:
            with atomic_folder(path, shared=True) as partial:
                (partial / "manifest.json").write_text(sealed(manifest), encoding="utf-8")
                (partial / "config.yaml").write_text(dump_config(config), encoding="utf-8")
                (partial / "metrics.jsonl").touch()
        except OSError as error:
            require_new(path)
            raise UserError(f"the run folder {path} cannot be made: {error.strerror}.") from error
        return cls(path)

    @classmethod
    def open(
        cls, path: Path, overrides: Sequence[str] = (), free: Sequence[str] = FREE_KEYS
    ) -> tuple[RunFolder, Config]:
        """An existing run and its config, with overrides of keys that may change."""
        if not (path / "config.yaml").is_file():
            raise UserError(f"{path} is no run folder: it has no config.yaml.")
        for item in overrides:
            key = item.partition("=")[0]
            if not is_one_of(key, free):
                raise UserError(f"{key} is fixed for a run; only {', '.join(free)} may change.")
        config = load_config(path / "config.yaml", overrides)
        before = load_config(path / "config.yaml")
        if before.privacy.level != "none" and planned(config) != planned(before):
            raise UserError("a run with differential privacy keeps its rounds: its noise was solved for them.")
        return cls(path), config

    @contextmanager
    def session(self, config: Config, link: str = "…") -> Iterator[None]:
        """Be the one process that works on the run; interrupted, it says how to go on, over the same link."""
        with locked(self.path):
            try:
                yield
            except KeyboardInterrupt:
                command = resume_command(self.path, config, link)
                raise KeyboardInterrupt(f"`{command}` goes on from the last checkpoint") from None
            finally:
                self.writing.finish()

    def manifest(self) -> Manifest:
        saved = read_json(self.path / "manifest.json", Manifest, "restore it and try again")
        if saved is None:
            raise UserError(f"{self.path / 'manifest.json'} is missing; restore it and try again.")
        return saved

    def changed_data(self, manifest: Manifest, labels: bool = False) -> list[str]:
        """Which rows are not what they were when the run began; labels count where a method is told them."""
        before, now = self.manifest().get("fingerprint", {}), manifest.get("fingerprint", {})
        parts = ("clients", "validation", "test", "unseen", *(["labels"] if labels else []))
        return [part for part in parts if before.get(part) != now.get(part)]

    def check_data(self, manifest: Manifest, labels: bool = False) -> None:
        """The data must be what the run started with. Labels that only audit may be others, and are noted."""
        if changed := self.changed_data(manifest, labels):
            rows = " and ".join("training" if part == "clients" else part for part in changed)
            raise UserError(
                f"the data of {self.path} has changed since the run began ({rows}); restore it, or start a new run "
                f"from this one's model with `fedweave export {self.path} BUNDLE` and init=BUNDLE."
            )

    def note_data(self, manifest: Manifest) -> None:
        """Rows that are called otherwise by now, or have other labels."""
        saved, now = self.manifest(), json.loads(json.dumps(manifest))
        if saved == now:
            return
        if saved.get("fingerprint") != now["fingerprint"]:
            (self.path / "discovery.json").unlink(missing_ok=True)  # it is written again, with these labels
        write_json(self.path / "manifest.json", manifest)

    def has_discovery(self) -> bool:
        """Whether what discovery wrote is there and whole; a checkpoint has all that it takes to write it again."""
        try:
            return read_json(self.path / "discovery.json", Discovery) is not None
        except UserError:
            return False

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

    # ---------------------------------------------------------------------------------- checkpoints

    def save(self, context: RunContext, progress: Progress) -> None:
        """Everything that resuming needs, as it is now; it is written while the next round trains. The best state
        rides along only while it is not the current one."""
        state, best = progress.state, progress.best
        tensors = state.tensors()
        if progress.best_round != progress.completed:
            moved = {name: tensor for name, tensor in best.tensors().items() if tensor is not tensors.get(name)}
            tensors |= {f"best_{name}": tensor for name, tensor in moved.items()}
        tensors |= context.engine.memories()
        meta: CheckpointMeta = {
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
            "router": asdict(state.router) if state.router else None,  # type: ignore[typeddict-item]
            "shares": state.shares,
            "norms": state.norms,
            "standing": state.standing,
            "doubts": state.doubts,
            "bucket_doubts": state.bucket_doubts,
            "answered": context.engine.answered,
            "report": state.report,
            "clients": [client.record() for client in context.engine.members],
            "metrics_bytes": self.metrics.stat().st_size,
            "metrics_sha256": file_sha256(self.metrics),
            "settings": config_hash(context.config),
            "backbone": context.backbone.fingerprint,
        }
        held, told = {k: v.detach().to("cpu", copy=True) for k, v in tensors.items()}, json.dumps(meta)
        name = round_name(progress.completed)

        def write() -> None:
            save_checkpoint(self.checkpoints, name, held, json.loads(told))
            prune(self.checkpoints, keep={0})

        self.writing.begin(write)
        if context.engine.travels:  # sites remember one round back: none may begin before this one is on the disk
            self.writing.finish()

    def snapshots(self) -> list[Snapshot]:
        """All checkpoints, newest first."""
        found = round_checkpoints(self.checkpoints)
        return [self._read(completed, found) for completed in reversed(found)]

    def newest(self, checkpoint: int | None = None) -> Snapshot | None:
        """The newest checkpoint, or the one of a round that was asked for; None when there is none yet. A damaged
        one is never passed over for an older one that nobody asked for."""
        found = round_checkpoints(self.checkpoints)
        if checkpoint is not None and checkpoint not in found:
            kept = ", ".join(map(str, found)) or "none"
            raise UserError(f"{self.path} has no checkpoint of round {checkpoint}; there is: {kept}.")
        return self._read(max(found) if checkpoint is None else checkpoint, found) if found else None

    def _read(self, completed: int, found: Mapping[int, Path]) -> Snapshot:
        try:
            return Snapshot(*load_checkpoint(found[completed], CheckpointMeta), found[completed])
        except Damaged as error:
            others = [number for number in found if number != completed and _is_whole(found[number])]
            choice = "start a new run"
            if others:
                command = resume_command(self.path, load_config(self.path / "config.yaml"))
                choice = (
                    f"go back to round {max(others)} with `{command} --checkpoint {max(others)}`; evaluate, "
                    "generate, export and serve take --checkpoint, too"
                )
            raise UserError(
                f"checkpoint {found[completed]} is damaged ({error}); restore it, or {choice}."
            ) from None

    def go_back(self, completed: int) -> None:
        """Forget every later checkpoint, the newest first."""
        for number, path in sorted(round_checkpoints(self.checkpoints).items(), reverse=True):
            if number > completed:
                remove_folder(path)

    def load(self, context: RunContext) -> Progress | None:
        """Put the newest checkpoint back onto the context, to go on from there; None when there is none yet."""
        snapshot = self.newest()
        if snapshot is None:
            self.metrics.write_bytes(b"")  # killed before the first checkpoint: begin again
            return None
        snapshot.check(context.config, context.backbone)
        meta = snapshot.meta
        self._rewind(meta)
        context.engine.restore(meta["clients"], snapshot.tensors)
        context.engine.answered.update(meta["answered"])
        return Progress.of(snapshot, context.engine.layers, context.backbone.device)

    def _rewind(self, meta: CheckpointMeta) -> None:
        """Forget events logged after the checkpoint: they will happen again."""
        size = meta["metrics_bytes"]
        logged = self.metrics.read_bytes()[:size] if self.metrics.is_file() else b""
        if len(logged) < size or meta["metrics_sha256"] != hashlib.sha256(logged).hexdigest():
            raise UserError(
                f"{self.metrics} is damaged: it is not what was logged until round {meta['completed']}; restore "
                f"it, or take the model as it is with `fedweave export {self.path} BUNDLE`."
            )
        with open(self.metrics, "ab") as out:
            out.truncate(size)


def elsewhere(model: str | None) -> list[str]:
    """The override that says where the backbone lies, if elsewhere than trained."""
    return [] if model is None else [f"backbone.model={json.dumps(model)}"]


def require_new(path: Path, link: str = "…") -> None:
    """A place for a new run: nothing, or an empty folder."""
    if path.is_dir() and not any(path.iterdir()):
        return
    if (path / "config.yaml").is_file():
        require_unlocked(path)
        command = resume_command(path, load_config(path / "config.yaml"), link)
        raise UserError(f"the run folder {path} exists; continue it with `{command}` or choose another output.")
    if path.exists():
        raise UserError(f"{path} exists and is no run folder; choose another output.")


def _is_whole(checkpoint: Path) -> bool:
    try:
        load_checkpoint(checkpoint, CheckpointMeta)
        return True
    except Damaged:
        return False
