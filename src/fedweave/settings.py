"""Typed settings: dataclasses whose fields carry documentation and limits, built from plain trees.

Whatever is wrong with a tree (an unknown key, a bad value) becomes one sentence that names the key and the
nearest valid one.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import types
import typing
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import yaml

from fedweave.errors import UserError, first_line, nearest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Tree = dict[str, Any]  # nested dictionaries, as YAML and JSON have them
_MOST_VALUES = 100_000  # of a YAML text
Limits = Mapping[str, float | None]  # of a setting's metadata: its lowest and highest value, whether it holds pairs
Value = TypeVar("Value")
Settings = TypeVar("Settings", bound="DataclassInstance")


def setting(
    default: Value, doc: str, *, low: float | None = None, high: float | None = None, pairs: bool = False
) -> Value:
    """A config field with its documentation and its closed range: of a number, or of a list's length. A list of
    ``pairs`` may be written as {key: value} and, on a command line, as key=value,key=value."""
    return field(default=default, metadata={"doc": doc, "low": low, "high": high, "pairs": pairs})


def to_tree(config: DataclassInstance) -> Tree:
    """Plain nested dictionaries, ready for YAML or JSON."""
    return {
        f.name: to_tree(v) if _nested(f) else list(v) if isinstance(v, tuple) else v
        for f in dataclasses.fields(config)
        for v in [getattr(config, f.name)]
    }


def flatten(tree: Tree, prefix: str = "") -> Tree:
    """A tree's values by dotted keys."""
    flat: Tree = {}
    for name, value in tree.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def describe(cls: type, prefix: str = "") -> list[tuple[str, str, str]]:
    """(key, default, documentation) of every key, in order: the config reference."""
    rows = []
    for f in dataclasses.fields(cls):
        nested = _nested(f)
        if nested:
            rows += describe(nested, f"{prefix}{f.name}.")
        else:
            default = list(f.default) if isinstance(f.default, tuple) else f.default
            shown = yaml.safe_dump(default, default_flow_style=True).split("\n")[0]
            rows.append((prefix + f.name, shown, f.metadata["doc"]))
    return rows


class _Loader(yaml.SafeLoader):
    """Ten lines of aliases to aliases would be written out as a billion values by whoever names one of them."""

    def construct_document(self, node: yaml.Node) -> object:
        if _written_out(node, {}) > _MOST_VALUES:
            raise yaml.constructor.ConstructorError(problem="its aliases (*name) stand for too many values")
        return super().construct_document(node)


def _written_out(node: yaml.Node, known: dict[int, float]) -> float:
    """How many values it has where every alias is what it stands for; endless where one holds itself."""
    if id(node) not in known:
        known[id(node)] = math.inf
        parts = [] if isinstance(node, yaml.ScalarNode) else node.value
        inside = [one for part in parts for one in (part if isinstance(part, tuple) else (part,))]
        known[id(node)] = 1 + sum(_written_out(one, known) for one in inside)
    return known[id(node)]


def read_yaml(text: str, where: str) -> Tree:
    try:
        tree = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError(
            f"{where}{line} is not valid YAML: {getattr(error, 'problem', None) or first_line(error)}."
        ) from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"{where} must hold keys and values, not a {type(tree).__name__}.")
    return tree


def read_yaml_value(text: str, key: str) -> object:
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise UserError(f"the value of {key} is not valid YAML: {text!r}.") from None


def environment_number(name: str, default: int) -> int:
    """A whole number from the environment, where it has one."""
    return int(_number(os.environ.get(name) or default, int, name, {"low": 0}))


def insert(tree: Tree, key: str, value: object) -> None:
    """Put a value at a dotted key."""
    *parents, last = key.split(".")
    for name in parents:
        if tree.get(name) is None:  # an empty section is None
            tree[name] = {}
        tree = tree[name]
        if not isinstance(tree, dict):
            raise UserError(f"{key!r} is no config key: {name!r} has no keys below it.")
    tree[last] = value


def _nested(f: dataclasses.Field) -> type | None:
    factory = f.default_factory
    return factory if isinstance(factory, type) and dataclasses.is_dataclass(factory) else None


def build(
    cls: type[Settings], tree: object, prefix: str = "", root: type | None = None, what: str = "config key"
) -> Settings:
    """Build ``cls`` from a plain tree, checking every key and value; ``what`` is how an error calls a key."""
    root = root or cls
    if not isinstance(tree, dict):
        raise UserError(f"{prefix.rstrip('.')} must hold keys and values, not {tree!r}.")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    values: Tree = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if name not in fields:
            raise UserError(f"unknown {what} {key!r}: {_hint(str(name), prefix, list(fields), root)}")
        nested = _nested(fields[name])
        if nested:
            values[name] = build(nested, value if value is not None else {}, f"{key}.", root, what)
        else:
            values[name] = _convert(value, hints[name], key, fields[name].metadata)
    return cls(**values)


def _hint(name: str, prefix: str, siblings: list[str], root: type) -> str:
    """The nearest sibling; failing that, a key of the same name elsewhere in the tree."""
    elsewhere = [key for key, _, _ in describe(root) if key.split(".")[-1] == name]
    if elsewhere:
        return f"did you mean {' or '.join(map(repr, sorted(elsewhere, key=len)))}?"
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.5)
    if close:
        return f"did you mean {prefix + close[0]!r}?"
    return f"valid: {', '.join(prefix + s for s in siblings)}."


def _unquoted(items: object) -> str:
    """What to do where YAML has read a text with a colon as a key and its value."""
    pairs = [item for item in (items if isinstance(items, list) else [items]) if isinstance(item, dict)]
    texts = [f"{key}: {value}" for pair in pairs for key, value in pair.items()]
    return f"; a text with a colon needs quotes: {texts[0]!r}" if texts else ""


def _convert(value: object, hint: object, key: str, limits: Limits) -> object:
    """Coerce one value to its declared type, or say in one sentence why not."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if isinstance(value, bool) and (spelled := "on" if value else "off") in args:
            value = spelled  # YAML reads a bare on as true
        if value not in args:
            raise UserError(f"{key}={value!r} is not allowed: {nearest(str(value), [str(a) for a in args])}")
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        problem = None
        for option in args:
            if option is not type(None):
                try:
                    return _convert(value, option, key, limits)
                except UserError as error:
                    problem = problem or error
        raise problem or UserError(f"{key}={value!r} is not allowed.")
    if origin is tuple:
        if limits.get("pairs"):
            value = _pairs(value)
        words = typing.get_origin(args[0]) is Literal  # no comma is part of one
        items = (
            value.split(",") if isinstance(value, str) and words else [value] if isinstance(value, str) else value
        )
        fewest = limits.get("low") or 0
        if (
            not isinstance(items, list | tuple)
            or len(items) < fewest
            or not all(isinstance(v, int if args[0] is int else str) for v in items)
        ):
            raise UserError(
                f"{key} must be a list of names or texts, as in [one, two], not {value!r}{_unquoted(items)}."
            )
        return tuple(_convert(item.strip() if words else item, args[0], key, {}) for item in items)
    if hint is bool:
        if not isinstance(value, bool):
            raise UserError(f"{key} must be true or false, not {value!r}.")
        return value
    if hint is int or hint is float:
        return _number(value, hint, key, limits)
    if not isinstance(value, str):
        raise UserError(f"{key} must be text, not {value!r}.")
    if "\0" in value or (not value.isascii() and value != value.encode("utf-8", "replace").decode()):
        raise UserError(f"{key}={value!r} holds what no name and no text file can hold.")
    return value


def _pairs(value: object) -> object:
    """A list of "key=value", however it was written."""
    if isinstance(value, dict):
        return [f"{key}={item}" for key, item in value.items()]
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _number(value: object, hint: type[int] | type[float], key: str, limits: Limits) -> int | float:
    kind = "a whole number" if hint is int else "a number"
    number = None
    if isinstance(value, int | float | str) and not isinstance(value, bool):  # YAML reads 1e-4 as text
        with suppress(ValueError, OverflowError):
            number = float(value)
    if number is None or not math.isfinite(number) or (hint is int and number != int(number)):
        raise UserError(f"{key} must be {kind}, not {value!r}.")
    low, high = limits.get("low"), limits.get("high")
    exact = value if isinstance(value, int) else number  # a large seed is exact
    if (low is not None and exact < low) or (high is not None and exact > high):
        between = f"at least {low:g}" if high is None else f"between {low:g} and {high:.16g}"
        raise UserError(f"{key} must be {between}, not {value!r}.")
    return hint(exact)
