"""Rows of a file: JSONL, CSV, TSV and Parquet, and a JSON list where it is named itself; text also gzipped.
Data sets of the Hugging Face hub come through the optional datasets package.

What is wrong with a row goes to ``complain``, which stops at the first; a check collects them and reads on.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import unicodedata
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedweave.errors import UserError, first_line, needed

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

Row = dict[str, Any]
Complain = Callable[[str], None]

TEXT_KINDS = (".jsonl", ".csv", ".tsv")
KINDS = (*TEXT_KINDS, ".parquet")  # of client files
BINARY = {
    b"PK\x03\x04": "a workbook or an archive",
    b"PAR1": "Parquet without its ending .parquet",
}  # by first bytes
LONGEST_CELL = 2**31 - 1
HUB = "hf://"


def refuse(fault: str) -> None:
    """The reader's way: the first fault ends it."""
    raise UserError(fault)


def shown(text: str) -> str:
    """A name of the user's inside a sentence: one line, not too long, nothing that a terminal chokes on."""
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= 200 else f"{text[:199]}…"


def find_path(text: str, key: str = "data.path=") -> Path:
    """A path that a user gave under ``key`` and that can be opened."""
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in text):
        raise UserError(f"{key}{shown(text)} has characters in its name that no text has; rename it.")
    try:
        path = Path(text).expanduser()
        path.stat()
        return path
    except FileNotFoundError:
        raise UserError(f"{key}{shown(text)}: there is no such file or folder.") from None
    except (OSError, ValueError, RuntimeError) as error:  # too long, no right to look, ~nobody
        reason = error.strerror if isinstance(error, OSError) else first_line(error)
        raise UserError(f"{key}{shown(text)} cannot be opened: {reason}.") from None


def split_name(name: str) -> tuple[str, str] | None:
    """("site_a", ".jsonl") of site_a.jsonl or site_a.jsonl.gz; None where the name is not that of a data file."""
    lower = name.lower()
    for kind in KINDS:
        for end in (kind, f"{kind}.gz") if kind in TEXT_KINDS else (kind,):
            if lower.endswith(end) and len(name) > len(end):
                return name[: -len(end)], kind
    return None


def read_rows(path: Path, complain: Complain = refuse) -> Iterator[tuple[int, Row]]:
    """(line or row number, row) of a file."""
    if not path.is_file():  # a pipe would wait for ever
        raise UserError(f"{path} is no file.")
    name = path.name.lower().removesuffix(".gz")
    if name.endswith(".parquet"):
        return _parquet(path)
    data = _bytes(path)
    if name.endswith((".csv", ".tsv")):
        return _csv(path, data, complain)
    if data[:4] in BINARY:
        raise UserError(f"{path} is {BINARY[data[:4]]}, not text; save its rows as JSONL or CSV.")
    rows = _json_list(path, data) if name.endswith(".json") else _jsonl(path, data, complain)
    return _objects(rows, path, complain)


def _bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        if path.suffix.lower() == ".gz":
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}.") from error
    return data.removeprefix(b"\xef\xbb\xbf")  # the mark that some editors put before UTF-8


def _json(data: bytes, where: str, hint: str = "") -> object:
    try:
        value = json.loads(data.decode("utf-8"))
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
        return value
    except UnicodeError:
        raise UserError(f"{where}: not UTF-8 text; save the file as UTF-8.") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON ({first_line(error)}){hint}.") from None


def _jsonl(path: Path, data: bytes, complain: Complain) -> Iterator[tuple[int, object]]:
    """Lines end at \\n alone."""
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            try:
                yield number, _json(line, f"{path}:{number}", "; every line must be one object")
            except UserError as error:
                complain(str(error))


def _json_list(path: Path, data: bytes) -> Iterator[tuple[int, object]]:
    rows = _json(data, str(path))
    if not isinstance(rows, list):
        raise UserError(
            f"{path} must hold a list of objects, not a {type(rows).__name__}; or one on a line, as .jsonl."
        )
    yield from enumerate(rows, start=1)


def _objects(rows: Iterator[tuple[int, object]], path: Path, complain: Complain) -> Iterator[tuple[int, Row]]:
    for number, row in rows:
        if isinstance(row, dict):
            yield number, row
        else:
            complain(f"{path}:{number}: a row must be a JSON object, not a {type(row).__name__}.")


def _csv(path: Path, data: bytes, complain: Complain) -> Iterator[tuple[int, Row]]:
    """A header, then a row each; the separator is the one that the header has most of."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: not UTF-8 text; save the file as UTF-8.") from None
    csv.field_size_limit(LONGEST_CELL)  # Python's own limit is that of a short document
    header_line = text.split("\n", 1)[0]
    separator = "\t" if ".tsv" in path.name.lower() else max(",;\t|", key=header_line.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    header: list[str] | None = None
    while True:
        number = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if header is None:
                raise UserError(f"{path}:1: the header is no CSV ({shown(str(error))}).") from None
            complain(f"{path}:{number}: not valid CSV ({shown(str(error))}); look for a stray quote.")
            continue
        if not any(cell.strip() for cell in cells):
            continue
        if header is None:
            header = [cell.strip() for cell in cells]
            twice = next((name for name in header if name and header.count(name) > 1), None)
            if twice is not None:
                raise UserError(f"{path}:{number}: two columns are called {twice!r}; rename one.")
        elif len(cells) != len(header):
            complain(
                f"{path}:{number}: {len(cells)} cells under {len(header)} columns; put quotes around a cell that "
                f"holds {separator!r} or a line end."
            )
        else:
            yield number, {name: cell or None for name, cell in zip(header, cells, strict=True)}


def _parquet(path: Path) -> Iterator[tuple[int, Row]]:
    how = "pip install 'fedweave[parquet]', or save the rows as JSONL or CSV"
    pyarrow = needed("pyarrow", f"{path}: Parquet needs pyarrow: {how}.")
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as Parquet: {first_line(error)}.") from error


# -------------------------------------------------------------------------------------- the Hugging Face hub


def hub_rows(name: str) -> dict[str, Iterator[tuple[int, Row]]]:
    """{split: (row number, row) …} of ``hf://owner/name`` or ``hf://owner/name/subset``; labels as their names."""
    owner, _, rest = name.removeprefix(HUB).partition("/")
    title, _, subset = rest.partition("/")
    if not owner or not title:
        raise UserError(f"data.path={name} is not of the form hf://owner/name or hf://owner/name/subset.")
    splits = load_hub(f"{owner}/{title}", subset or None, f"data.path={name}")
    return {split: _numbered(splits[split]) for split in splits}


def load_hub(name: str, subset: str | None, what: str) -> DatasetDict:
    """The splits of a data set; ``what`` begins the sentence when they cannot be had."""
    how = "pip install 'fedweave[hub]', or name a local folder in data.path"
    datasets = needed("datasets", f"{what} is read from the hub and needs the datasets package: {how}.")
    try:
        return datasets.load_dataset(name, subset)
    except Exception as error:  # the hub's, the network's or the file format's
        raise UserError(
            f"{what} cannot be loaded from the hub as {name} ({first_line(error)}); connect to the hub or name a "
            "local folder in data.path."
        ) from error


def _numbered(split: Dataset) -> Iterator[tuple[int, Row]]:
    names = {column: kind.int2str for column, kind in split.features.items() if hasattr(kind, "int2str")}
    for number, row in enumerate(split, start=1):
        labels = {column: to_name(row[column]) for column, to_name in names.items() if row[column] is not None}
        yield number, {**row, **labels}
