"""Reading run folders for people: a run's files as one record, and runs that differ only by seed as one group.

A run may be old, unfinished or under way; what it lacks is None or empty, and the page says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from fedweave.errors import UserError
from fedweave.runs.live import read_progress
from fedweave.settings import flatten

# Keys that never make two runs different experiments.
_SAME = ("output", "seed", "loggers", "evaluation.batch_size", "training.clients_per_step", "backbone.device")


@dataclass
class RunRecord:
    """One run's files."""

    path: Path
    config: dict[str, Any]
    manifest: dict[str, Any] = field(default_factory=dict)
    discovery: dict[str, Any] | None = None
    embedding: dict[str, Any] | None = None
    summary: dict[str, Any] | None = None
    diagnostics: dict[str, Any] | None = None
    progress: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def method(self) -> str:
        return self.config["method"]

    @property
    def seed(self) -> int:
        return self.config["seed"]

    @property
    def state(self) -> str:
        """finished, running or stopped."""
        return self.progress.get("state") or ("finished" if self.summary else "stopped")

    @property
    def elsewhere(self) -> bool:
        """Whether the clients are sites of their own, which keep labels and features to themselves."""
        return self.config.get("engine") == "flower" or "federation" in self.manifest

    @cached_property
    def rounds(self) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == "round"]

    @cached_property
    def validations(self) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == "validation"]

    @property
    def completed(self) -> int:
        return self.rounds[-1]["round"] if self.rounds else 0

    @property
    def tasks(self) -> dict[str, str]:
        """Task to title."""
        return self.manifest.get("tasks") or (self.summary or {}).get("tasks") or {}

    @property
    def experts(self) -> int:
        known = (self.discovery or {}).get("experts") or (self.summary or {}).get("experts")
        # the start is validated, and its experts' load logged, just before discovery.json is written
        return known or max((len(v.get("expert_load", [])) for v in self.validations), default=0) or 1

    @property
    def best(self) -> dict[str, Any] | None:
        """The test of the best round."""
        return self.summary["test"].get("best") if self.summary else None

    @cached_property
    def mixture(self) -> dict[str, dict[str, int]]:
        """Examples of every client by task; from the audit's counts, else from where the rows came from."""
        if known := (self.discovery or {}).get("bucket_tasks"):
            return {name: _total(buckets) for name, buckets in known.items()}
        counts: dict[str, dict[str, int]] = {}
        for name, origins in self.manifest.get("clients", {}).items():
            counts[name] = {}
            for origin in origins:
                parts = origin.replace(":", "/").split("/")
                task = next((t for t in self.tasks if t in parts), None)
                if task is None:
                    return {}
                counts[name][task] = counts[name].get(task, 0) + 1
        return counts

    @cached_property
    def feeding(self) -> dict[str, list[int]]:
        """Examples that stand behind each expert, by client, [M] each."""
        out = {}
        for name, client in (self.discovery or {}).get("clients", {}).items():
            row = [0] * self.experts
            for size, expert in zip(client["buckets"], client["experts"], strict=True):
                if expert >= 0:  # a latecomer's bucket may fit no expert
                    row[expert] += size
            out[name] = row
        return out

    @cached_property
    def agreement(self) -> dict[str, float]:
        """Mean cosine of every client's updates with the others' over all rounds."""
        seen: dict[str, list[float]] = {}
        for event in self.rounds:
            for name, cosine in event.get("agreement", {}).items():
                if cosine is not None:
                    seen.setdefault(name, []).append(cosine)
        return {name: sum(values) / len(values) for name, values in seen.items()}

    @property
    def entropy(self) -> float | None:
        """Router entropy at the last validation as a share of its largest value, log M."""
        entropy = self.validations[-1]["router_entropy"] if self.validations else None
        return None if entropy is None or self.experts < 2 else entropy / math.log(self.experts)


@dataclass
class Group:
    """Runs of one experiment that differ only by seed."""

    label: str
    runs: list[RunRecord]

    @property
    def first(self) -> RunRecord:
        return self.runs[0]

    def finished(self) -> list[RunRecord]:
        """Runs with test results."""
        return [run for run in self.runs if run.best]

    def curve(self, key: str, task: str | None = None) -> dict[int, list[float]]:
        """Round to one value per seed: a figure of the validation events, or of the round events."""
        out: dict[int, list[float]] = {}
        for run in self.runs:
            for event in run.events:
                value = event.get(key)
                if isinstance(value, dict):
                    value = value.get(task)
                if isinstance(value, int | float):
                    out.setdefault(event["round"], []).append(float(value))
        return dict(sorted(out.items()))

    def test(self, kind: str, task: str) -> list[float]:
        """Per seed the test score, or the loss of the routing that the method uses."""
        values = []
        for run in self.finished():
            best = run.best
            assert best is not None
            table = best.get("score", {}) if kind == "score" else best["loss"][best["used"]]
            if task in table:
                values.append(table[task])
        return values


def on_common_seeds(groups: Sequence[Group]) -> list[Group]:
    """Groups without the seeds that others have not finished: means over unlike seeds make a trend of their own."""
    seeds = set.intersection(*({run.seed for run in group.finished()} for group in groups)) if groups else set()
    if not seeds:
        return list(groups)
    return [replace(group, runs=[run for run in group.runs if run.seed in seeds]) for group in groups]


def seeds_note(groups: Sequence[Group]) -> str:
    """What a caption adds when curves are means."""
    return " Line: mean over seeds; shade: one standard deviation." if any(len(g.runs) > 1 for g in groups) else ""


def find_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """Run folders as they are; a comparison's folder stands for all of its cells."""
    folders: list[Path] = []
    for path in paths:
        if (path / "config.yaml").is_file():
            folders.append(path)
        elif cells := _cells(path):
            folders += cells
        else:
            raise UserError(f"{path} is neither a run folder (no config.yaml) nor a comparison's (no cells/).")
    return [read_run(folder) for folder in dict.fromkeys(folders)]


def _cells(path: Path) -> list[Path]:
    """A comparison's cells: its own, and those that another comparison had run before."""
    own = {p.parent for p in (path / "cells").glob("*/config.yaml")}
    listed = {(path / row["folder"]).resolve() for row in _json(path / "results.json") or [] if row.get("folder")}
    own |= {folder for folder in listed - {p.resolve() for p in own} if (folder / "config.yaml").is_file()}
    return sorted(own)


def read_run(folder: Path) -> RunRecord:
    if not (folder / "config.yaml").is_file():
        raise UserError(f"{folder} is no run folder: it has no config.yaml.")
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except yaml.YAMLError:
        config = None
    if not isinstance(config, dict) or "method" not in config:
        raise UserError(f"{folder / 'config.yaml'} is damaged.")
    return RunRecord(
        path=folder,
        config=config,
        manifest=_json(folder / "manifest.json") or {},
        discovery=_json(folder / "discovery.json"),
        embedding=_json(folder / "embedding.json"),
        summary=_json(folder / "summary.json"),
        diagnostics=_json(folder / "diagnostics.json"),
        progress=read_progress(folder),
        events=_lines(folder / "metrics.jsonl"),
    )


def group_runs(runs: Sequence[RunRecord]) -> list[Group]:
    """Groups in order of first appearance, named by what distinguishes them."""
    flat = [flatten(run.config) for run in runs]
    keys = [k for k in dict.fromkeys(k for f in flat for k in f) if k not in _SAME]
    differing = [k for k in keys if len({str(f.get(k)) for f in flat}) > 1]
    members: dict[tuple[str, ...], list[RunRecord]] = {}
    for run, values in zip(runs, flat, strict=True):
        members.setdefault(tuple(str(values.get(k)) for k in differing), []).append(run)
    return [
        Group(_label(differing, values) or found[0].method, sorted(found, key=lambda r: r.seed))
        for values, found in members.items()
    ]


def _label(keys: Sequence[str], values: Sequence[str]) -> str:
    short = {"method": "{}", "data.alpha": "α = {}"}
    return ", ".join(
        short.get(k, f"{k.split('.')[-1]} = {{}}").format(v) for k, v in zip(keys, values, strict=True)
    )


def _total(parts: Sequence[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for part in parts:
        for task, count in part.items():
            total[task] = total.get(task, 0) + count
    return total


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        raise UserError(f"{path} is damaged; remove it, or restore it and try again.") from None


def _lines(path: Path) -> list[dict[str, Any]]:
    """Events so far; the last line of a run under way may be half written."""
    events = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            events.append(json.loads(line))
        except ValueError:
            break
    return events
