"""Rows that a verb writes for other programs: a JSONL file, or a list in a .json file."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedweave.errors import UserError
from fedweave.files import write_atomic


def output(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"{what}, as .jsonl or .json")


def require_target(path: Path | None) -> None:
    """Whatever is wrong with a file to write shows before a model is loaded."""
    if path is None:
        return
    if path.suffix not in (".jsonl", ".json"):
        raise UserError(f"--output {path} must end in .jsonl or .json.")
    if path.exists():
        raise UserError(f"--output {path} exists; choose another name.")
    if not path.parent.is_dir():
        raise UserError(f"--output {path}: there is no folder {path.parent}.")


def write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    if path.suffix == ".json":
        text = json.dumps(rows, ensure_ascii=False, indent=1, default=str) + "\n"
    else:
        text = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    write_atomic(path, text)
