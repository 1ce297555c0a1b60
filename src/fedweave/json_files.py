"""JSON files of runs, bundles and comparisons: written with a checksum of their content, read as what they are.

A file that was cut, spoilt or replaced is one sentence wherever it is read. Earlier versions wrote no checksum;
their files only have to be of the right kind.
"""

import hashlib
import json
import types
import typing
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal, TypeVar

from typing_extensions import NotRequired, get_type_hints, is_typeddict

from fedweave.errors import UserError, first_line
from fedweave.files import write_atomic

CHECKSUM = "checksum"
Kind = TypeVar("Kind")


class Damaged(Exception):
    """What is wrong with a file, to stand inside a sentence."""


def write_json(path: Path, content: Mapping[str, object], indent: int | None = 1) -> None:
    write_atomic(path, sealed(content, indent))


def read_json(path: Path, kind: type[Kind], mend: str = "remove it, or restore it and try again") -> Kind | None:
    """What a file holds, of a kind of :mod:`fedweave.schema`; None where there is no file."""
    try:
        return parse(path.read_bytes(), kind)
    except FileNotFoundError:
        return None
    except (OSError, Damaged) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path} is damaged ({reason}); {mend}.") from None


def sealed(content: Mapping[str, object], indent: int | None = 1) -> str:
    """As text, with a checksum that stands first."""
    plain = json.loads(json.dumps(content))  # keys become texts, tuples become lists
    return json.dumps({CHECKSUM: _checksum(plain), **plain}, indent=indent, ensure_ascii=False)


def parse(data: bytes, kind: type[Kind]) -> Kind:
    """A JSON text once it is unchanged and of that kind."""
    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise Damaged(f"no JSON: {first_line(error)}" if data.strip() else "it is empty") from None
    if isinstance(value, dict) and value.pop(CHECKSUM, None) not in (None, _checksum(value)):
        raise Damaged("its content does not match its checksum")
    if problem := misfit(value, kind):
        raise Damaged(problem)
    return value


def _checksum(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# -------------------------------------------------------------------------------------- kinds

_PLAIN = {
    float: frozenset({float, int}),
    int: frozenset({int}),
    str: frozenset({str}),
    bool: frozenset({bool}),
}


def misfit(value: object, kind: object, at: str = "") -> str:
    """What keeps a JSON value from being of a kind (a TypedDict, or what stands in one); nothing: it is."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is object or kind is typing.Any:
        return ""
    if is_typeddict(kind):
        return _misfit_keys(value, kind, at)
    if origin in (typing.Union, types.UnionType):
        found = [misfit(value, one, at) for one in inner]
        return "" if "" in found else found[0]
    if origin is Literal:
        return "" if value in inner else f"{at or 'it'} is {_shown(value)}"
    if origin in (dict, list) and isinstance(value, origin):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        if set(map(type, value.values() if isinstance(value, dict) else value)) <= _PLAIN.get(
            inner[-1], frozenset()
        ):
            return ""  # thousands of figures at once
        return next((p for k, v in items if (p := misfit(v, inner[-1], f"{at}.{k}".lstrip(".")))), "")
    fits = type(value) in _PLAIN[kind] if kind in _PLAIN else isinstance(value, origin or kind)  # type: ignore
    return "" if fits else f"{at or 'it'} is {_shown(value)}"


def _misfit_keys(value: object, kind: object, at: str) -> str:
    if not isinstance(value, dict):
        return f"{at or 'it'} is {_shown(value)}"
    for key, (hint, needed) in _keys(kind).items():
        name = f"{at}.{key}".lstrip(".")
        if key in value:
            if problem := misfit(value[key], hint, name):
                return problem
        elif needed:
            return f"{name} is missing"
    return ""


@cache
def _keys(kind: type) -> dict[str, tuple[object, bool]]:
    """Every key of a TypedDict: what it holds, and whether it must be there."""
    hints, total = get_type_hints(kind, include_extras=True), bool(getattr(kind, "__total__", True))
    return {
        key: (typing.get_args(hint)[0], False) if typing.get_origin(hint) is NotRequired else (hint, total)
        for key, hint in hints.items()
    }


def _shown(value: object) -> str:
    text = "nothing" if value is None else type(value).__name__ if isinstance(value, dict | list) else repr(value)
    return text if len(text) < 40 else f"{text[:40]}…"
