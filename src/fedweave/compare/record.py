"""Every cell of a comparison in short, in one file that can be kept beside a document: docs/results/*.json.

A cell has what was asked for and what came out, without the folders of the machine. What stands in the file counts
as finished on any machine, and tables need nothing else. It may hold cells of other comparisons and of other
backbones; none is ever replaced by another.
"""

import json
from itertools import count
from pathlib import Path
from typing import Any, TypedDict, cast

from fedweave.compare.grid import Cell
from fedweave.config import Config
from fedweave.errors import UserError
from fedweave.files import write_atomic
from fedweave.json_files import misfit, read_json
from fedweave.runs.lock import Busy, locked
from fedweave.runs.text import FEW_TASKS
from fedweave.schema import Summary
from fedweave.settings import Tree, flatten, to_tree

# of the machine, or said otherwise
_PLACES = ("output", "data.path", "backbone.model", "backbone.device", "loggers")
# of a summary as they are, where it has them
_MEASURED = (
    "rounds", "clients", "examples", "train_tokens", "buckets", "experts", "parameters", "trained_parameters",
    "validation", "communication", "privacy", "audit", "kind_audit", "ended_early", "life", "notes",
)  # fmt: skip


class _Entry(TypedDict):
    """What is read of a cell, at least."""

    settings: dict[str, Any]
    model: str
    test: dict[str, Any]
    commit: str | None


class Record:
    """The file as it was read last."""

    def __init__(self, path: Path):
        self.path = path
        self._read()

    def find(self, cell: Cell) -> Summary | None:
        """What came out of a cell, wherever it was run."""
        entry = self._known.get(_identity(self._asked(cell), self._defaults))
        return None if entry is None else _summary(cell, entry, self._content.get("environment") or {})

    def add(self, cell: Cell, summary: Summary) -> None:
        """Write a finished cell down; other processes may be at it, too."""
        if self._put(cell, summary):
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with locked(self.path.parent, f".{self.path.name}.lock", patience=60):
                self._read()
                self._put(cell, summary)
                cells = dict(sorted(self._content["cells"].items()))
                now = {"environment": summary["environment"], "defaults": self._defaults, "cells": cells}
                text = json.dumps({**self._content, **now}, ensure_ascii=False, separators=(",", ":"))
                write_atomic(self.path, text + "\n")
        except Busy:
            raise UserError(f"--record {self.path}: another process has held it for a minute.") from None
        except OSError as error:
            raise UserError(f"--record {self.path} cannot be written: {error.strerror}.") from None

    def _read(self) -> None:
        mend = "name another file in --record"
        self._content: dict[str, Any] = read_json(self.path, dict, mend) or {"cells": {}}
        parts = [self._content.get("cells"), *(self._content.get(key) or {} for key in ("defaults", "environment"))]
        if not all(isinstance(part, dict) for part in parts):
            raise UserError(f"{self.path} is no file of cells; {mend}.")
        # A cell says what differs from the defaults of the file: a default that changes later changes no cell.
        self._defaults: Tree = {**flatten(to_tree(Config())), **(self._content.get("defaults") or {})}
        self._known = {
            _identity(entry, self._defaults): entry for entry in self._content["cells"].values() if _whole(entry)
        }

    def _put(self, cell: Cell, summary: Summary) -> bool:
        """Whether the cell stood there as it is; it does now."""
        study = cell.folder.parents[1].name
        cells, entry = self._content["cells"], _plain(self._asked(cell) | _measured(cell, summary))
        identity = _identity(entry, self._defaults)
        for number in count(1):
            name = f"{study}/{cell.folder.name}" + (f" ({number})" if number > 1 else "")
            old = cells.get(name)
            if old is None or (_whole(old) and _identity(old, self._defaults) == identity):
                break
        cells[name] = self._known[identity] = entry
        return old == entry

    def _asked(self, cell: Cell) -> dict[str, Any]:
        """What a cell is: everything but where things lie, of which only that counts which the grid varies."""
        config = cell.config
        discovery, warm, backbone = config.discovery, config.router.warm_start, config.backbone
        settings = {
            key: value
            for key, value in flatten(to_tree(config)).items()
            if value != self._defaults[key] and key not in _PLACES
        }
        # rows of one's own are known by the name of where they lie, unless they have another
        own = config.data.source in ("jsonl", "tasks") and config.data.name is None
        named = {"data.path": config.data.path} if own else {}
        varied = {key: Path(str(v)).name for key, v in (named | cell.values).items() if key in _PLACES}
        return {
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
            "settings": settings | ({"places": varied} if varied else {}),
        }  # fmt: skip


def _whole(entry: object) -> bool:
    """Whether a cell says what it is and what came out: those of earlier versions do not."""
    return not misfit(entry, _Entry)


def _identity(entry: dict[str, Any], defaults: Tree) -> str:
    """Two cells with the same one are the same run. A model is known by its folder's name, in any case."""
    settings = {**defaults, **entry["settings"]}
    if (
        settings["federation.rule"] != "agreement"
    ):  # no other rule of a simulation reads it, and its default changed
        del settings["federation.contested"]
    return json.dumps([settings, entry["model"].casefold()], sort_keys=True)


def _measured(cell: Cell, summary: Summary) -> dict[str, Any]:
    """What came out, in short."""
    told, timing = cast("dict[str, Any]", summary), summary.get("timing")
    figures = {name: told[name] for name in _MEASURED if name in told} | {
        "titles": {task: title for task, title in summary["tasks"].items() if title != task},
        "test": {name: _short(cell, tested) for name, tested in summary["test"].items()},
        "seconds": timing["total_s"] if timing else None,
        "phases_s": timing["phases_s"] if timing else {},
    }
    identified = {"fingerprint": summary["backbone"]["fingerprint"], "commit": summary["environment"]["commit"]}
    return rounded(figures) | identified


def _short(cell: Cell, tested: Any) -> dict[str, Any]:
    """A test without its routing by task, where tasks are many: ``decided`` has it by kind. Where kinds came in
    mid-run, a table asks which experts answer them."""
    many = len(tested.get("routing", {})) > FEW_TASKS and not cell.config.data.changes
    return {name: value for name, value in tested.items() if not (many and name in ("routing", "top1"))}


def _summary(cell: Cell, entry: dict[str, Any], environment: dict[str, Any]) -> Summary:
    """A cell as tables read it; what an older version did not write down is missing."""
    tested = entry["test"].get("best")
    tasks = [task for task in tested["loss"][tested["used"]] if task != "macro"] if tested else []
    told = {"notes": []} | {name: entry[name] for name in _MEASURED if name in entry}
    return cast("Summary", told | {
        "method": cell.config.method,
        "seed": cell.config.seed,
        "tasks": {task: entry.get("titles", {}).get(task, task) for task in tasks},
        "test": entry["test"],
        "backbone": {"model": entry["model"], "fingerprint": entry.get("fingerprint")},
        "config": to_tree(cell.config),
        "environment": {**environment, "commit": entry["commit"]},
    })  # fmt: skip


def rounded(tree: Any) -> Any:
    """Figures to five places; more would be noise in a file that people keep."""
    if isinstance(tree, dict):
        return {key: rounded(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [rounded(value) for value in tree]
    return round(tree, 5) if isinstance(tree, float) else tree


def _plain(tree: dict[str, Any]) -> dict[str, Any]:
    """As JSON has it."""
    return cast("dict[str, Any]", json.loads(json.dumps(tree)))
