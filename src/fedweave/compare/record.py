"""Every cell of a comparison in short, in one file that can be kept beside a document: docs/results/*.json.

A cell has what was asked for and what came out, without the folders of the machine. The file may hold cells of
other comparisons and other backbones; those of the same name are replaced.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedweave.compare.grid import Cell
from fedweave.config import Config
from fedweave.errors import UserError
from fedweave.files import write_atomic
from fedweave.json_files import read_json
from fedweave.runs.text import FEW_TASKS
from fedweave.schema import Summary
from fedweave.settings import flatten, to_tree

# of the machine, or said otherwise
_PLACES = ("output", "data.path", "backbone.model", "backbone.device", "loggers")


def read_record(path: Path) -> dict[str, Any]:
    """What the file holds so far."""
    mend = "name another file in --record"
    record: dict[str, Any] = read_json(path, dict, mend) or {"cells": {}}
    if not isinstance(record.get("cells"), dict):
        raise UserError(f"{path} is no file of cells; {mend}.")
    return record


def write_record(path: Path, finished: Mapping[str, Sequence[tuple[Cell, Summary]]]) -> None:
    """Add the finished cells of comparisons, by their folders' names, to the file."""
    record = read_record(path)
    for name, cells in finished.items():
        for cell, summary in cells:
            record["environment"] = summary["environment"]
            record["cells"][f"{name}/{cell.folder.name}"] = recorded(cell, summary)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--record {path} cannot be written: {error.strerror}.") from None
    ordered = {"environment": record.get("environment"), "cells": dict(sorted(record["cells"].items()))}
    write_atomic(path, json.dumps(ordered, ensure_ascii=False, separators=(",", ":")) + "\n")


def recorded(cell: Cell, summary: Summary) -> dict[str, Any]:
    """One cell in short: what was asked for, and what came out."""
    config = cell.config
    discovery, warm, backbone = config.discovery, config.router.warm_start, config.backbone
    timing = summary.get("timing")
    asked = {
        "set": config.data.name or config.data.source,
        "method": config.method,
        "seed": config.seed,
        "model": Path(backbone.model).name,
        "lr": config.training.lr,
        "router.lr": config.router.lr,
        "alpha": config.data.alpha,
        "discovery": {
            "clusterer": discovery.clusterer, "features": discovery.features, "warmup_lr": discovery.warmup_lr
        },
        "warm_start": {
            "enabled": warm.enabled, "contrast": warm.contrast, "rounds": warm.rounds, "steps": warm.steps
        },
        "prompt": backbone.prompt,
        "end_of_answer": backbone.end_of_answer,
        "evaluation.every": config.evaluation.every,
        "settings": _settings(config),
    }  # fmt: skip
    names = ("rounds", "clients", "examples", "buckets", "experts", "trained_parameters", "validation", "audit")
    measured: dict[str, Any] = {name: summary[name] for name in names}  # type: ignore[literal-required]
    for name in ("kind_audit", "ended_early"):
        measured |= {name: summary[name]} if name in summary else {}
    measured |= {
        "test": {name: _short(tested) for name, tested in summary["test"].items()},
        "seconds": timing["total_s"] if timing else None,
        "phases_s": timing["phases_s"] if timing else {},
    }
    return asked | _rounded(measured) | {"commit": summary["environment"]["commit"]}


def _settings(config: Config) -> dict[str, object]:
    """All keys that differ from their defaults, but for folders."""
    defaults = flatten(to_tree(Config()))
    return {k: v for k, v in flatten(to_tree(config)).items() if v != defaults[k] and k not in _PLACES}


def _short(tested: Any) -> dict[str, Any]:
    """A test without its routing by task, where tasks are many: ``decided`` has it by kind."""
    many = len(tested.get("routing", {})) > FEW_TASKS
    return {name: value for name, value in tested.items() if not (many and name in ("routing", "top1"))}


def _rounded(tree: Any) -> Any:
    """Figures to five places; more would be noise in a file that people keep."""
    if isinstance(tree, dict):
        return {key: _rounded(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_rounded(value) for value in tree]
    return round(tree, 5) if isinstance(tree, float) else tree
