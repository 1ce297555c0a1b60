"""A user's own data: a folder with a file for each client, one file of all rows, or a data set of the hub.

In a folder the files' names are the clients', and ``validation.*`` and ``test.*`` hold out examples for everyone.
A single file, or a data set ``hf://owner/name``, says in a column ``client`` whose row it is; without one its rows
are dealt out to ``data.clients`` simulated clients. What no file holds out is kept back from the rows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np

from fedweave.config import Config, DataConfig
from fedweave.data.examples import Example, FederatedData, Prompt, Task
from fedweave.data.files import (
    HUB,
    KINDS,
    Complain,
    Row,
    find_path,
    hub_rows,
    read_rows,
    refuse,
    shown,
    split_name,
)  # fmt: skip
from fedweave.data.own_tasks import own_tasks
from fedweave.data.partition import by_kind, client_names, dirichlet_partition
from fedweave.data.remarks import look_alikes, odd_names, overlap_note
from fedweave.data.rows import Fields, client_of, is_name, read_fields, to_example, to_prompt
from fedweave.errors import UserError
from fedweave.streams import stream_key

HELD_OUT = ("validation", "test")
Owned = list[tuple[str | None, Example]]  # rows and, where they say so, whose they are


@dataclass
class Gathered:
    """All rows of own data, before any is held out."""

    clients: dict[str, list[Example]] = field(default_factory=dict)
    pool: list[Example] = field(default_factory=list)  # rows of no client, still to be dealt out
    held: dict[str, list[Example]] = field(default_factory=dict)  # what files hold out
    notes: list[str] = field(default_factory=list)


def load_own(config: Config) -> FederatedData:
    """Clients, validation and test examples of the data that ``data.path`` names."""
    return divide(config, gather(config.data))


def read_examples(path: Path, fields: Fields | None = None) -> list[Example]:
    known = Fields() if fields is None else fields
    return [example for _, example in _read(path, known, refuse, by_client=False) or []]


# ---------------------------------------------------------------------------------- gathering


def gather(config: DataConfig, complain: Complain = refuse) -> Gathered:
    """Every row, by client; faults of rows and files go to ``complain``."""
    fields = read_fields(config.fields)
    if str(config.path).startswith(HUB):
        return _data_set(str(config.path), fields, complain)
    path = find_path(str(config.path))
    if path.is_dir():
        return _folder(path, fields, complain)
    rows = _read(path, fields, complain, by_client=True)
    return Gathered() if rows is None else _by_client(rows, Gathered(), path.name, complain)


def _folder(folder: Path, fields: Fields, complain: Complain) -> Gathered:
    try:
        files = sorted(p for p in folder.iterdir() if not p.name.startswith("."))  # ._x is a Mac's shadow of x
    except OSError as error:
        raise UserError(f"data.path={folder} cannot be opened: {error.strerror}.") from None
    named: dict[str, Path] = {}
    for path in files:
        parts = split_name(path.name)
        if parts is None:
            continue
        name = parts[0]
        if not is_name(name):
            complain(f"{shown(path.name)} names a client, and must be short and printable; rename it.")
        elif name in named:
            complain(f"{named[name]} and {path.name} are the same client; keep one.")
        elif name not in HELD_OUT and name.lower() in HELD_OUT:
            complain(f"{path} is taken for a client; rename it to {path.name.lower()}.")
        else:
            named[name] = path
    found = Gathered(notes=[*look_alikes(files), *odd_names(named)])
    clients = {name: path for name, path in named.items() if name not in HELD_OUT}
    if not clients:
        complain(
            f"data.path={folder}: the folder holds no client file; it needs one NAME.jsonl each "
            f"(or {', '.join(KINDS[1:])})."
        )
    for k in HELD_OUT:
        if k in named and (held := _read(named[k], fields, complain, by_client=False)) is not None:
            found.held[k] = [example for _, example in held]
    by_client = "client" in fields or len(clients) == 1  # the only file may hold the rows of all
    tried = {name: _read(path, fields, complain, by_client) for name, path in clients.items()}
    read = {name: rows for name, rows in tried.items() if rows is not None}
    if "client" in fields or any(owner for rows in read.values() for owner, _ in rows):
        return _by_client([row for rows in read.values() for row in rows], found, folder.name, complain)
    found.clients = {name: [example for _, example in rows] for name, rows in read.items()}
    for name, rows in list(found.clients.items()):
        if not rows:
            complain(f"{clients[name]}: client {name!r} is empty; add examples or remove the file.")
            del found.clients[name]
    return found


def _data_set(name: str, fields: Fields, complain: Complain) -> Gathered:
    splits = hub_rows(name)
    found = Gathered()
    for k in HELD_OUT:
        if k in splits:
            held = _examples(splits[k], f"{name}/{k}", fields, complain, by_client=False)
            found.held[k] = [example for _, example in held]
    rest = [split for split in splits if split not in HELD_OUT]
    owned = [row for k in rest for row in _examples(splits[k], f"{name}/{k}", fields, complain, by_client=True)]
    return _by_client(owned, found, name, complain)


def _by_client(owned: Owned, found: Gathered, name: str, complain: Complain) -> Gathered:
    """Put rows to their clients, or to the pool where none says whose it is."""
    owners = {owner for owner, _ in owned}
    if owners == {None}:
        found.pool = [example for _, example in owned]
        return found
    if not owned:
        complain(f"{name} holds no row that can be used; add examples.")
    found.clients = {client: [] for client in sorted(owner for owner in owners if owner is not None)}
    for owner, example in owned:
        if owner is None:
            complain(f"{example.origin}: the row says of no client, while others do.")
        else:
            found.clients[owner].append(example)
    return found


def _read(path: Path, fields: Fields, complain: Complain, by_client: bool) -> Owned | None:
    """The rows of a file; None where nothing of it can be used, and why has been said."""
    told: list[str] = []

    def tell(fault: str) -> None:
        told.append(fault)
        complain(fault)

    rows: Owned = []
    try:
        rows = _examples(read_rows(path, tell), path.name, fields, tell, by_client)
    except UserError as error:  # of the file as a whole
        tell(str(error))
    return None if told and not rows else rows


def _examples(
    rows: Iterable[tuple[int, Row]], name: str, fields: Fields, complain: Complain, by_client: bool
) -> Owned:
    found: Owned = []
    for number, row in rows:
        where = f"{name}:{number}"
        try:
            owner = client_of(row, where, fields) if by_client else None
            found.append((owner, to_example(row, where, fields)))
        except UserError as error:
            complain(str(error))
    return found


# ---------------------------------------------------------------------------------- dividing


def divide(config: Config, gathered: Gathered, complain: Complain = refuse) -> FederatedData:
    """Hold out what no file does, and deal out rows that have no client."""
    data, seed = config.data, config.seed
    missing = [k for k in HELD_OUT if k not in gathered.held]
    held: dict[str, list[Example]] = {k: list(gathered.held.get(k, [])) for k in HELD_OUT}
    clients = {
        name: hold_out(rows, missing, held, data.holdout, stream_key("holdout", seed, index), name)
        for index, (name, rows) in enumerate(gathered.clients.items())
    }
    notes = list(gathered.notes)
    if gathered.pool:
        rest = hold_out(gathered.pool, missing, held, data.holdout, stream_key("holdout", seed, 0))
        shares = dirichlet_partition(by_kind(rest), data.clients, data.alpha, seed)
        clients = dict(zip(client_names(data.clients), shares, strict=True))
        notes.append(
            f"no row says whose it is, so they are dealt out to data.clients={data.clients} simulated clients; "
            "data.fields=client=COLUMN names a column that does."
        )
    for k in HELD_OUT:
        if not held[k] and (clients or gathered.pool):
            few = int(np.ceil(1 / data.holdout)) if data.holdout else "some"
            complain(
                f"data.path={data.path}: no {k} example is left; add {k}.jsonl, more rows (a client needs {few} to "
                "keep one back), or raise data.holdout."
            )
    tasks, said = own_tasks(config, [e for rows in [*clients.values(), *held.values()] for e in rows])
    notes += [*said, *overlap_note(clients, held)]
    return FederatedData(clients, held["validation"], held["test"], tasks, notes=notes)


def read_test(config: Config, path: str, named: str) -> tuple[list[Example], dict[str, Task], list[str]]:
    """(rows, tasks, notes) of a file to test on; ``named`` is what the user called it by."""
    found = find_path(path, named)
    rows = read_examples(found, _of_this_file(found, read_fields(config.data.fields)))
    if not rows:
        raise UserError(f"{named}{found}: the file is empty.")
    return rows, *own_tasks(config, rows)


def read_prompts(path: Path, fields: Fields) -> list[tuple[Row, Prompt]]:
    """The rows of a file and what each asks; answers in it are not needed."""
    known = _of_this_file(path, fields)
    rows = [(row, to_prompt(row, f"{path.name}:{number}", known)) for number, row in read_rows(path)]
    if not rows:
        raise UserError(f"{path}: the file is empty.")
    return rows


def _of_this_file(path: Path, fields: Fields) -> Fields:
    """Rows to test on or to answer may have the columns of the training data or the usual ones."""
    _, first = next(iter(read_rows(path)), (0, {}))
    return Fields({what: column for what, column in fields.items() if column in first})


def hold_out(
    rows: Sequence[Example],
    missing: Sequence[str],
    held: dict[str, list[Example]],
    share: float,
    key: int,
    client: str = "",
) -> list[Example]:
    """Move a share of one client's rows to each held-out set that has no file; at least one row stays."""
    order = iter(np.random.default_rng(key).permutation(len(rows)))
    for k in missing:
        held[k] += [replace(rows[i], client=client) for i in sorted(islice(order, int(share * len(rows))))]
    return [rows[i] for i in sorted(order)]
