"""Examples, where they come from, and how they reach the clients."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from fedweave.config import Config
from fedweave.data.changes import courses, hold_back, read_changes
from fedweave.data.examples import Example, FederatedData, Task
from fedweave.data.files import find_path
from fedweave.data.folder import TaskFolder, load_task_folder
from fedweave.data.hostile import spoil
from fedweave.data.own import load_own
from fedweave.data.partition import by_kind, client_names, dirichlet_partition, draw, pure_partition, split_pools
from fedweave.data.sample import make_sample
from fedweave.data.tasks import load_paper_tasks
from fedweave.errors import UserError, nearest
from fedweave.schema import DataFingerprint, Manifest

__all__ = ["Example", "FederatedData", "Task", "load_data"]


def load_data(config: Config) -> FederatedData:
    """Clients, validation and test sets of a run, with a manifest of every example's origin."""
    data = config.data
    if data.source == "sites":
        raise UserError("the data of this run is at its sites; name a file instead, as in --data test.jsonl.")
    loaded = load_own(config) if data.source == "jsonl" else _deal(config, *_pools(config))
    loaded.manifest = _manifest(config, loaded)
    return loaded


def _pools(config: Config) -> tuple[TaskFolder, list[str]]:
    """All rows of all tasks, and remarks that belong beside every result."""
    data, varied = config.data, config.data.wording == "varied"
    notes: list[str] = []
    if data.source == "tasks":
        folder = find_path(str(Path(str(data.path)) / (data.folder or "")))
        found = load_task_folder(folder, varied, config.seed, config.evaluation.max_new_tokens)
    elif data.source == "paper":
        pools, tasks, notes = load_paper_tasks(data.path, varied, config.seed)
        found = TaskFolder(pools, {}, tasks)
    else:
        pools, tasks = make_sample(data.train + data.validation + data.test, config.seed)
        found = TaskFolder(pools, {}, tasks)
    for name in data.tasks:
        if name not in found.pools:
            raise UserError(f"data.tasks: there is no task {name!r}: {nearest(name, found.pools)}")
    if data.tasks:
        kept = {name: found.pools[name] for name in found.pools if name in data.tasks}
        found = TaskFolder(kept, {}, {name: found.tasks[name] for name in kept})
    return found, notes


def _deal(config: Config, found: TaskFolder, notes: list[str]) -> FederatedData:
    """Split every task, and give the training rows to clients that differ in kinds."""
    data = config.data
    splits = split_pools(found.pools, data, config.seed)
    names, rows = client_names(data.clients), [row for parts in splits.values() for row in parts["train"]]
    changes = read_changes(
        data.changes, names, list(dict.fromkeys(n for row in rows for n in (row.task, row.kind)))
    )
    rows, later = hold_back(changes, rows, config.seed)
    if later and len(rows) < data.clients:
        raise UserError(
            f"data.changes leave {len(rows)} rows for {data.clients} clients in the beginning; let a kind be there "
            "from then on, or raise data.train."
        )
    train = by_kind(rows)
    if data.partition == "pure":
        shares = pure_partition(train, data.clients, config.seed)
    else:
        shares = dirichlet_partition(train, data.clients, data.alpha, config.seed)
    over_time = courses(spoil(config, dict(zip(names, shares, strict=True))), changes, later)
    return FederatedData(
        clients={name: [course.rows[i] for i in course.here[0]] for name, course in over_time.items()},
        validation=[e for parts in splits.values() for e in parts["validation"]],
        test=[e for parts in splits.values() for e in parts["test"]],
        tasks={name: found.tasks[name] for name in found.pools},
        unseen_tasks={name: found.tasks[name] for name in found.unseen},
        unseen=[
            row
            for t, pool in enumerate(found.unseen.values(), start=len(found.pools))
            for row in draw(pool, t, data.distinct, config.seed)[: data.test]
        ],
        notes=notes,
        courses={name: course for name, course in over_time.items() if len(course.here) > 1},
    )


def _manifest(config: Config, data: FederatedData) -> Manifest:
    manifest: Manifest = {
        "source": config.data.source,
        "seed": config.seed,
        "notes": [] if config.data.source == "jsonl" else data.notes,  # scoring may change on resume
        "tasks": {name: task.title for name, task in data.tasks.items()},
        "clients": {name: [e.origin for e in rows] for name, rows in data.clients.items()},
        "validation": [e.origin for e in data.validation],
        "test": [e.origin for e in data.test],
        "unseen": [e.origin for e in data.unseen],
        "fingerprint": _fingerprint(data),
    }
    if data.unseen:
        manifest["unseen_tasks"] = {name: task.title for name, task in data.unseen_tasks.items()}
    return manifest


def _fingerprint(data: FederatedData) -> DataFingerprint:
    rows = {name: [(e.prompt, e.response) for e in rows] for name, rows in data.clients.items()}
    later = {name: (c.here, [(e.prompt, e.response) for e in c.rows]) for name, c in data.courses.items()}
    everything = [*(e for rows in data.clients.values() for e in rows), *data.validation, *data.test, *data.unseen]
    everything += [e for course in data.courses.values() for e in course.rows]
    return {
        "clients": _hash([*rows.items(), *later.items()]),
        "validation": _hash((e.prompt, e.response) for e in data.validation),
        "test": _hash((e.prompt, e.response) for e in data.test),
        "unseen": _hash((e.prompt, e.response) for e in data.unseen),
        "labels": _hash(e.task for e in everything),
    }


def _hash(parts: Iterable[object]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(json.dumps(part, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()[:32]
