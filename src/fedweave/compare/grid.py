"""A grid of runs: every combination of methods, seeds and any other config keys.

A comparison is a recipe plus axes. An axis is a config key with several values, from a comparison file or the
command line (``method=fedit,fedweave seed=42,43,44 data.alpha=0.1,0.3``); ``method=fedit:training.lr=3e-4`` is a
setting of that method's cells alone; several values of an axis are those that it has there.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from fedweave.config import RECIPES, Config, from_tree, load_config, recipe_names
from fedweave.errors import UserError, nearest
from fedweave.files import read_text
from fedweave.json_files import read_json
from fedweave.schema import ConfigTree, Summary
from fedweave.settings import read_yaml, to_tree

COMPARISONS = RECIPES / "compare"
_SECTIONS = ("axes", "set", "per")
_KEYS = ["like", "recipe", "axes", "set", "per", "best_of", "tables", "ours"]


@dataclass
class Comparison:
    recipe: str
    axes: dict[str, list[object]]  # config key -> values
    settings: list[str] = field(default_factory=list)  # overrides of every cell
    best_of: str | None = None  # an axis of which each method gets its best value, by validation loss
    per: dict[str, list[str]] = field(default_factory=dict)  # "method=fedit" -> overrides of those cells alone
    ranges: dict[str, dict[str, list]] = field(default_factory=dict)  # the same -> axis -> its values there
    tables: str | None = None  # an axis whose values get a table each: rows of different data have no order
    ours: str | None = None  # a method that is held against every other one, seed by seed


@dataclass
class Cell:
    values: dict[str, object]  # axis -> value
    config: Config
    folder: Path  # of its name; ``settle`` finds the one that it has or may have

    @property
    def title(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.values.items())

    @property
    def identity(self) -> str:
        """Two cells with the same one are the same run, wherever it is."""
        return _identity(to_tree(self.config))

    def settle(self) -> None:
        """Leave folders alone in which a run of another config lies: a name tells the axes, not every setting."""
        name = self.folder.name
        for number in count(2):
            lies = self.folder / "config.yaml"
            if not lies.is_file() or _identity_of(lies) == self.identity:
                break
            self.folder = self.folder.with_name(f"{name} ({number})")

    @property
    def finished(self) -> Summary | None:
        """The summary of a finished run of exactly this config; keys that are newer than it have their defaults."""
        summary = read_json(self.folder / "summary.json", Summary)
        return summary if summary and _identity(_completed(summary["config"])) == self.identity else None


def _identity(config: ConfigTree) -> str:
    return json.dumps({**config, "output": None}, sort_keys=True)


def _identity_of(path: Path) -> str:
    """What lies in a folder; no cell is what this version cannot read."""
    try:
        return _identity(to_tree(load_config(path)))
    except UserError:
        return ""


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
    asked, conditions = set(), []  # what the command line sets for all cells, and for which alone
    for item in overrides:
        condition, colon, change = item.partition(":")
        if colon and "=" in condition and "=" in change:  # method=fedit:training.lr=3e-4
            key, _, value = change.partition("=")
            own.append((condition, key, value, _several(value)))
            conditions.append(condition)
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
    ours = tree.get("ours") if "method" in axes else None
    found = Comparison(tree["recipe"], axes, settings, best_of, tables=tables, ours=ours)
    for condition, key, value, values in own:
        if key in tree["axes"] and values is not None:
            if key not in asked:
                found.ranges.setdefault(condition, {})[key] = values
        else:
            found.per.setdefault(condition, []).append(f"{key}={value}")
    there = {
        f"{key}={v}" for some in (axes, *found.ranges.values()) for key, values in some.items() for v in values
    }
    if missed := next((condition for condition in conditions if condition not in there), None):
        raise UserError(
            f"no cell has {missed}, for which the command line sets more: {nearest(missed, sorted(there))}"
        )
    return found


def _read(name: str, above: tuple[str, ...] = ()) -> dict[str, Any]:
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
    tree = _checked(tree, path)
    if (like := tree.pop("like", None)) is None:
        if not tree.get("recipe"):
            raise UserError(
                f"{path}: recipe is missing; it names what all cells begin with, as in recipe: quickstart."
            )
        return tree
    if like in above:
        raise UserError(f"{path}: it is like {like}, which is like itself.")
    base = _read(like, (*above, like))
    merged = {key: {**base.get(key, {}), **tree.get(key, {})} for key in ("axes", "set", "per")}
    for condition, changes in base.get("per", {}).items():
        merged["per"][condition] = {**changes, **tree.get("per", {}).get(condition, {})}
    return {**base, **tree, **merged}


def _checked(tree: dict[str, Any], path: Path) -> dict[str, Any]:
    """A comparison's file, once everything in it is of its kind."""
    found = {**tree, **{key: tree.get(key) or {} for key in _SECTIONS}}
    wrong = [key for key in _SECTIONS if not isinstance(found[key], dict)]
    wrong += [key for key, value in found.items() if key not in _SECTIONS and not isinstance(value, str | None)]
    wrong = wrong or [f"per.{name}" for name, changes in found["per"].items() if not isinstance(changes, dict)]
    if wrong:
        kind = "keys and values" if wrong[0].split(".")[0] in _SECTIONS else "a name"
        raise UserError(f"{path}: {wrong[0]} must hold {kind}.")
    if few := next(
        (key for key, values in found["axes"].items() if not (isinstance(values, list) and values)), None
    ):
        raise UserError(f"{path}: axes.{few} must be a list of values, as in [one, two].")
    return found


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
            *(f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in values.items()),
            f"output={folder}",
        ]
        grid.append(Cell(values, load_config(comparison.recipe, overrides), folder))
    first: dict[str, Cell] = {}
    for cell in grid:
        if (same := first.setdefault(cell.identity, cell)) is not cell:
            raise UserError(f"{same.title} and {cell.title} are the same run; give every value of an axis once.")
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
