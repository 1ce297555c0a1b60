"""A grid of runs: every combination of methods, seeds and any other config keys, resumable cell by cell.

A comparison is a recipe plus axes. An axis is a config key with several values, from a comparison file or the
command line (``method=fedit,fedweave seed=42,43,44 data.alpha=0.1,0.3``); ``method=fedit:training.lr=3e-4`` is a
setting of that method's cells alone; several values of an axis are those that it has there. A finished cell is
never run again, not even where several comparisons share it, and an interrupted one is resumed, so a crash loses at
most the round that was under way.
"""

import json
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedweave.config import RECIPES, Config, from_tree, load_config, recipe_names
from fedweave.console import Console
from fedweave.errors import UserError, nearest
from fedweave.federation.engines.distributed import world
from fedweave.files import read_text
from fedweave.json_files import read_json
from fedweave.runs.lock import Busy, locked
from fedweave.runs.run import resume, start
from fedweave.runs.workspace import Kept
from fedweave.schema import ConfigTree, Summary
from fedweave.settings import read_yaml, to_tree

Known = tuple[Path, Summary | None]  # a finished run's folder and summary; None: another process has it

COMPARISONS = RECIPES / "compare"
_KEYS = ["like", "recipe", "axes", "set", "per", "best_of", "tables"]


@dataclass
class Comparison:
    recipe: str
    axes: dict[str, list[object]]  # config key -> values
    settings: list[str] = field(default_factory=list)  # overrides of every cell
    best_of: str | None = None  # an axis of which each method gets its best value, by validation loss
    per: dict[str, list[str]] = field(default_factory=dict)  # "method=fedit" -> overrides of those cells alone
    ranges: dict[str, dict[str, list]] = field(default_factory=dict)  # the same -> axis -> its values there
    tables: str | None = None  # an axis whose values get a table each: rows of different data have no order


@dataclass
class Cell:
    values: dict[str, object]  # axis -> value
    config: Config
    folder: Path

    @property
    def title(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.values.items())

    @property
    def identity(self) -> str:
        """Two cells with the same one are the same run, wherever it is."""
        return _identity(to_tree(self.config))

    @property
    def finished(self) -> Summary | None:
        """The summary of a finished run of exactly this config; keys that are newer than it have their defaults."""
        summary = read_json(self.folder / "summary.json", Summary)
        return summary if summary and _identity(_completed(summary["config"])) == self.identity else None


def _identity(config: ConfigTree) -> str:
    return json.dumps({**config, "output": None}, sort_keys=True)


def _completed(config: ConfigTree) -> ConfigTree:
    """A config as today's version writes it; as it is where today's version cannot read it."""
    try:
        return to_tree(from_tree(config))
    except UserError:
        return config


def comparison_names() -> list[str]:
    return sorted(p.stem for p in COMPARISONS.glob("*.yaml"))


def load_comparison(name: str, overrides: Sequence[str], best_of: str | None) -> Comparison:
    """A packaged comparison, a comparison file, or a recipe; ``key=a,b`` adds or replaces an axis."""
    tree = _read(name)
    axes = {str(key): list(values) for key, values in tree["axes"].items()}
    settings = [f"{key}={json.dumps(value)}" for key, value in (tree.get("set") or {}).items()]
    own: list[tuple[str, str, str, list | None]] = [
        (str(condition), str(key), json.dumps(value), value if isinstance(value, list) else None)
        for condition, changes in (tree.get("per") or {}).items()
        for key, value in changes.items()
    ]
    asked = set()  # what the command line sets for all cells
    for item in overrides:
        condition, colon, change = item.partition(":")
        if colon and "=" in condition and "=" in change:  # method=fedit:training.lr=3e-4
            key, _, value = change.partition("=")
            own.append((condition, key, value, _several(value)))
            continue
        key, _, value = item.partition("=")
        asked.add(key)
        if (several := _several(value)) is not None:
            axes[key] = several
        elif key in axes and any(condition.startswith(f"{key}=") for condition, *_ in own):
            axes[key] = [value]  # still an axis: what the comparison sets for this value holds
        else:
            axes.pop(key, None)
            settings.append(item)
    best_of = best_of or tree.get("best_of")
    if best_of is not None and best_of not in axes:
        raise UserError(f"--best-of {best_of} is no axis; the axes are {', '.join(axes) or 'none'}.")
    tables = tree.get("tables") if tree.get("tables") in axes else None
    found = Comparison(tree["recipe"], axes, settings, best_of, tables=tables)
    for condition, key, value, values in own:
        if key in tree["axes"] and values is not None:
            if key not in asked:
                found.ranges.setdefault(condition, {})[key] = values
        else:
            found.per.setdefault(condition, []).append(f"{key}={value}")
    return found


def _read(name: str) -> dict[str, Any]:
    """The file of a comparison, with what it takes from the one that it is like; a recipe is one without axes."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else COMPARISONS / f"{name}.yaml"
    tree: dict[str, Any] = read_yaml(read_text(path), str(path)) if path.is_file() else {}
    if not {"axes", "like"} & set(tree):  # not a comparison: an ordinary recipe
        if not path.is_file() and name not in recipe_names():
            hint = nearest(name, [*comparison_names(), *recipe_names()])
            raise UserError(f"there is no comparison or recipe {name!r}: {hint}")
        tree = {"recipe": name, "axes": {}}
    unknown = set(tree) - set(_KEYS)
    if unknown:
        hint = nearest(sorted(unknown)[0], _KEYS)
        raise UserError(f"{path}: unknown key {sorted(unknown)[0]!r}: {hint}")
    if (like := tree.pop("like", None)) is None:
        return tree
    base = _read(str(like))
    merged = {key: {**base.get(key, {}), **tree.get(key, {})} for key in ("axes", "set", "per")}
    for condition, changes in base.get("per", {}).items():
        merged["per"][condition] = {**changes, **tree.get("per", {}).get(condition, {})}
    return {**base, **tree, **merged}


def _several(text: str) -> list | None:
    """The values of ``a,b``; None where it is one value, or a list that is one."""
    return [v.strip() for v in text.split(",")] if "," in text and not text.startswith(("[", "{")) else None


def cells(comparison: Comparison, output: Path) -> list[Cell]:
    """Every combination, checked before the first one runs. Seeds vary slowest: after the first pass over the
    methods there is already a table."""
    keys = sorted(comparison.axes, key=lambda key: key != "seed")
    grid = []
    for values in _combinations(comparison, keys, {}):
        name = "_".join(f"{key.split('.')[-1]}-{Path(str(v)).name}" for key, v in values.items()) or "run"
        folder = output / "cells" / name
        own = [x for key, value in values.items() for x in comparison.per.get(f"{key}={value}", [])]
        overrides = [
            *comparison.settings,
            *own,
            *(f"{key}={json.dumps(value) if isinstance(value, bool) else value}" for key, value in values.items()),
            f"output={folder}",
        ]
        grid.append(Cell(values, load_config(comparison.recipe, overrides), folder))
    return grid


def _combinations(
    comparison: Comparison, keys: list[str], values: dict[str, object]
) -> Iterator[dict[str, object]]:
    """Every choice of values for these axes; what stands before an axis may give it values of its own."""
    if not keys:
        yield values
        return
    key, *rest = keys
    own = [comparison.ranges.get(f"{k}={v}", {}).get(key) for k, v in values.items()]
    for value in next((found for found in own if found), comparison.axes[key]):
        yield from _combinations(comparison, rest, values | {key: value})


@dataclass
class Outcome:
    finished: list[tuple[Cell, Summary]] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)  # of the finished; may be another grid's
    failures: list[str] = field(default_factory=list)  # a sentence each
    left: list[Cell] = field(default_factory=list)  # not begun, because time was up
    taken: list[Cell] = field(default_factory=list)  # by other processes, which have not finished them


class Runner:
    """Runs the cells of several grids. All share one loaded backbone and one prepared data set, and a cell that
    stands in several grids runs once. Every grid gets its first seed before any gets its second, so that there is
    something of each whenever it stops. After ``minutes`` no cell begins, nor one that would not end in time.
    Several processes may have the same grids: each takes cells that no other has."""

    def __init__(self, grids: dict[str, list[Cell]], console: Console, minutes: float | None = None):
        self.grids, self.console, self.minutes = grids, console, minutes
        self._kept = Kept()
        self._known: dict[str, Known] = {
            c.identity: (c.folder, found)
            for grid in grids.values()
            for c in grid
            if (found := c.finished) is not None
        }
        self._started = time.monotonic()
        self._spent: list[float] = []  # seconds of every cell

    def run(self) -> dict[str, Outcome]:
        """What became of every grid, by its name."""
        grids = self.grids
        seeds = {name: list(dict.fromkeys(cell.config.seed for cell in grid)) for name, grid in grids.items()}
        turns = [(name, cell) for name, grid in grids.items() for cell in grid]
        turns.sort(key=lambda turn: seeds[turn[0]].index(turn[1].config.seed))  # all first seeds, all second …
        outcomes = {name: Outcome() for name in grids}
        waiting, before = list(enumerate(turns, start=1)), len(turns) + 1
        while len(waiting) < before:  # whoever has the others may give one up
            before, taken = len(waiting), []
            for number, (name, cell) in waiting:
                try:
                    self._turn(f"[{number}/{len(turns)}]", name, cell, outcomes[name])
                except Busy:
                    taken.append((number, (name, cell)))
            waiting = taken
        for _, (name, cell) in waiting:
            outcomes[name].taken.append(cell)
        return outcomes

    def _turn(self, place: str, name: str, cell: Cell, outcome: Outcome) -> None:
        known = self._known.get(cell.identity)
        if known is None and (found := cell.finished) is not None:  # by another process, in the meantime
            known = self._known[cell.identity] = (cell.folder, found)
        if known is None and self._late():
            outcome.left.append(cell)
            return
        study = f"{name}: " if len(self.grids) > 1 else ""
        self.console.say(f"{place} {study}{cell.title}{' (finished before)' if known else ''}")
        self._add(cell, known, outcome)

    def _add(self, cell: Cell, known: Known | None, outcome: Outcome) -> None:
        try:
            folder, summary = known or (cell.folder, self._run(cell))
            if summary is not None:
                outcome.finished.append((cell, summary))
                outcome.folders.append(folder)
        except Busy:
            self.console.say("another process has it")
            raise
        except UserError as error:
            outcome.failures.append(f"{cell.title}: {error}")
        except Exception:  # one broken cell must not cost the others
            note = cell.folder.parent / f"{cell.folder.name}.error"
            note.write_text(traceback.format_exc(), encoding="utf-8")
            outcome.failures.append(f"{cell.title}: see {note}")

    def _late(self) -> bool:
        """Whether a cell as long as the longest so far would end too late. The first one also loads and compiles,
        so it counts only until there is a second."""
        spent = time.monotonic() - self._started
        longest = max(self._spent[1:] or self._spent, default=0.0)
        return self.minutes is not None and spent + longest > 60 * self.minutes

    def _run(self, cell: Cell) -> Summary | None:
        began, claim = time.monotonic(), cell.folder.with_name(f"{cell.folder.name}.claim")
        claim.mkdir(parents=True, exist_ok=True)
        with locked(claim) if world() is None else nullcontext():  # processes of one run share its cells' clients
            if (found := cell.finished) is not None:  # between the look and the lock
                summary: Summary | None = found
            elif (cell.folder / "config.yaml").is_file():
                summary = resume(cell.folder, [], self.console, self._kept)
            else:
                summary = start(cell.config, cell.folder, self.console, self._kept)
        self._spent.append(time.monotonic() - began)
        self._known[cell.identity] = (cell.folder, summary)
        return summary
