"""Data sets of the Hugging Face hub, through the optional datasets package."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fedweave.data.files import Row
from fedweave.errors import UserError, first_line

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

HUB = "hf://"


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
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(
            f"{what} is read from the hub and needs the datasets package: pip install 'fedweave[hub]', or name a "
            "local folder in data.path."
        ) from None
    try:
        return load_dataset(name, subset)
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
