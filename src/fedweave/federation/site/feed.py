"""A site's rows over the rounds: a file that grows or is replaced, or a simulation's schedule.

Known rows keep their place, their feature and their side of the split; new ones are encoded, and come after them.
What a site needs to find all of it again stays in its own folder, a file for each of the last versions of its rows:
digests of rows, not the rows. A question names the version that it is about, so that a site which was restarted,
whose last answer got lost, or whose server has gone back to an earlier round has the buckets that the server means.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypedDict

import torch

from fedweave.config import Config
from fedweave.console import Console
from fedweave.data.examples import Example
from fedweave.errors import UserError
from fedweave.federation.client import Client
from fedweave.json_files import read_json, write_json
from fedweave.training.batch import ClientData

_KEPT = 16  # versions: a server seldom goes back farther
Split = tuple[list[Example], list[Example]]  # rows to train on, rows to validate on
Encode = Callable[[Sequence[Example]], tuple[list[Example], ClientData]]  # rows that fit, and what a client sees


class Source(Protocol):
    """Where rows come from."""

    splits: bool  # whether rows to validate on are taken from those that it has, and leave with them

    def rows(self, config: Config, index: int) -> Split:
        """Those of the beginning."""

    def everything(self) -> list[Example]:
        """All that may be there; the next look finds which are."""

    def look(self, index: int, t: int) -> list[Example] | None:
        """All rows in round t, where they may be others than at the last look."""

    def split(self, config: Config, index: int, rows: list[Example], version: int) -> Split:
        """Which of these new rows are trained on."""


class Saved(TypedDict):
    """What a site writes down of its rows."""

    rows: list[str]  # digest of every row that is trained on
    held: list[str]
    version: int
    buckets: list[list[int]]  # places in rows
    assignment: list[int]
    waiting: list[int]


def digest(row: Example) -> str:
    return hashlib.sha256(json.dumps([row.prompt, row.response]).encode()).hexdigest()


class SiteFeed:
    """The rows of one site's client."""

    def __init__(
        self,
        source: Source,
        config: Config,
        index: int,
        encode: Encode,
        console: Console,
        saved: Saved | None = None,
    ):
        self.source, self.config, self.index, self.encode, self.console = source, config, index, encode, console
        self.number = saved["version"] if saved else 0
        if saved is None:
            split = source.rows(config, index)
        else:
            _, apart = ([], []) if source.splits else source.rows(config, index)  # a validation set of its own
            rows = {digest(row): row for row in source.everything()}
            held = [rows[n] for n in saved["held"] if n in rows] if source.splits else apart
            split = [rows[n] for n in saved["rows"] if n in rows], held
        (self.rows, self.here), (self.held_rows, self.held) = encode(split[0]), encode(split[1])
        self.lost = saved is not None and len(self.rows) < len(saved["rows"])  # while the site was away
        self.unfit: set[str] = set()  # digests of rows that no training can use: they are no news

    def data(self, version: int) -> ClientData:
        return self.here

    def version(self, t: int) -> int:
        try:
            found = self.source.look(self.index, t)
            if found is not None:
                self._take(found)
        except UserError as error:  # a file that somebody is writing at the moment, or rows that cannot be used
            self.console.warn(f"{error} The site goes on with the rows that it has.")
        return self.number

    def _take(self, found: list[Example]) -> None:
        """These are all rows by now. New ones that cannot be used are an error before anything has moved."""
        there, known = {digest(row) for row in found}, {digest(row) for row in [*self.rows, *self.held_rows]}
        stay = [i for i, row in enumerate(self.rows) if digest(row) in there]
        if self.source.splits:  # rows to validate on are of the same file
            still = [i for i, row in enumerate(self.held_rows) if digest(row) in there]
            self.held_rows, self.held = [self.held_rows[i] for i in still], self.held.part(still)
        new = [row for row in found if digest(row) not in known | self.unfit]
        if len(stay) == len(self.rows) and not new and not self.lost:
            return
        split = self.source.split(self.config, self.index, new, self.number + 1)
        train, held = (self.encode(rows) for rows in split)
        self.unfit |= {digest(row) for row in new} - {digest(row) for row in [*train[0], *held[0]]}
        if len(stay) == len(self.rows) and not train[0] and not held[0] and not self.lost:
            return
        self.number, self.lost = self.number + 1, False
        self.rows = [self.rows[i] for i in stay] + train[0]
        self.here = joined(self.here.part(stay), train[1])
        self.held_rows, self.held = self.held_rows + held[0], joined(self.held, held[1])

    # ---------------------------------------------------------------------------------- over restarts

    def save(self, folder: Path, client: Client) -> None:
        record: dict[str, Any] = {"version": 0, "waiting": [], **client.record()}
        names = {"rows": [digest(row) for row in self.rows], "held": [digest(row) for row in self.held_rows]}
        folder.mkdir(parents=True, exist_ok=True)
        version = record["version"]
        write_json(_file(folder, version), {name: (record | names)[name] for name in Saved.__annotations__})
        _file(folder, version - _KEPT).unlink(missing_ok=True)

    def restore(self, client: Client, saved: Saved) -> None:
        """The client as it was written down, with those of its rows that are still there; others come as news."""
        there = {digest(row) for row in self.rows}
        stay = [i for i, name in enumerate(saved["rows"]) if name in there]
        place = {i: now for now, i in enumerate(stay)}

        def still(bucket: Sequence[int]) -> list[int]:
            return [place[i] for i in bucket if i in place]

        client.restore({
            **saved, "note": "", "buckets": [still(b) for b in saved["buckets"]], "waiting": still(saved["waiting"])
        })  # fmt: skip


def read_saved(folder: Path | None, version: int) -> Saved | None:
    """What a site has written down of a version of its rows, if it has."""
    mend = "restore it, or remove it to join anew"
    return None if folder is None else read_json(_file(folder, version), Saved, mend)


def _file(folder: Path, version: int) -> Path:
    return folder / f"rows-{version}.json"


def joined(first: ClientData, second: ClientData) -> ClientData:
    return replace(
        first,
        examples=[*first.examples, *second.examples],
        features=torch.cat([first.features, second.features]) if len(second) else first.features,
    )
