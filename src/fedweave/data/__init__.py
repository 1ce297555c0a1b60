"""Examples, where they come from, and how they reach the clients."""

from __future__ import annotations

from fedweave.config import Config
from fedweave.data.examples import Example, FederatedData, Manifest, Task
from fedweave.data.jsonl import load_client_folder
from fedweave.data.partition import dirichlet_partition, split_pools
from fedweave.data.sample import make_sample
from fedweave.data.tasks import load_paper_tasks
from fedweave.errors import UserError

__all__ = ["Example", "FederatedData", "Task", "load_data"]


def load_data(config: Config) -> FederatedData:
    """Clients, validation and test sets of a run, with a manifest of every example's origin."""
    data = config.data
    if data.source == "sites":
        raise UserError("the data of this run is at its sites; name a file instead, as in --data test.jsonl.")
    if data.source == "jsonl":
        loaded = load_client_folder(data, config.evaluation, config.seed)
    else:
        notes: list[str] = []
        if data.source == "paper":
            pools, tasks, notes = load_paper_tasks(data.path)
        else:
            pools, tasks = make_sample(data.train + data.validation + data.test, config.seed)
        splits = split_pools(pools, data, config.seed)
        train = {task: parts["train"] for task, parts in splits.items()}
        shares = dirichlet_partition(train, data.clients, data.alpha, config.seed)
        digits = len(str(data.clients - 1))
        loaded = FederatedData(
            clients={f"client_{i:0{digits}d}": share for i, share in enumerate(shares)},
            validation=[e for parts in splits.values() for e in parts["validation"]],
            test=[e for parts in splits.values() for e in parts["test"]],
            tasks=tasks,
            notes=notes,
        )
    loaded.manifest = _manifest(config, loaded)
    return loaded


def _manifest(config: Config, data: FederatedData) -> Manifest:
    return {
        "source": config.data.source,
        "seed": config.seed,
        "notes": data.notes,
        "tasks": {name: task.title for name, task in data.tasks.items()},
        "clients": {name: [e.origin for e in rows] for name, rows in data.clients.items()},
        "validation": [e.origin for e in data.validation],
        "test": [e.origin for e in data.test],
    }
