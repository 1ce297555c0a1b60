"""Splits and the Dirichlet partition: who holds which examples, as a pure function of the seed."""

from collections.abc import Iterable, Mapping
from itertools import islice

import numpy as np

from fedweave.config import DataConfig
from fedweave.data.examples import Example
from fedweave.errors import UserError


def split_pools(
    pools: Mapping[str, list[Example]], config: DataConfig, seed: int
) -> dict[str, dict[str, list[Example]]]:
    """Disjoint train / validation / test samples of every task: {task: {split: examples}}."""
    sizes = {"train": config.train, "validation": config.validation, "test": config.test}
    splits: dict[str, dict[str, list[Example]]] = {}
    for t, (task, pool) in enumerate(pools.items()):
        need, rows = sum(sizes.values()), draw(pool, t, config.distinct, seed)
        if len(rows) < need:
            kinds = "different rows" if config.distinct else "rows"
            raise UserError(
                f"task {task!r} has {len(rows)} {kinds} but data.train + data.validation + data.test asks for "
                f"{need}; lower them."
            )
        rest = iter(rows)
        splits[task] = {split: list(islice(rest, size)) for split, size in sizes.items()}
    return splits


def draw(pool: list[Example], t: int, distinct: bool, seed: int) -> list[Example]:
    """The rows of task t in the seed's order; with ``distinct`` the first of those that are the same row."""
    order = [pool[i] for i in np.random.default_rng(seed + 1000 * (t + 1)).permutation(len(pool))]
    if not distinct:
        return order
    first: dict[str, Example] = {}
    for row in order:
        first.setdefault(row.sameness, row)
    return list(first.values())


def by_kind(rows: Iterable[Example]) -> dict[str, list[Example]]:
    """Rows by what clients differ in."""
    kinds: dict[str, list[Example]] = {}
    for row in rows:
        kinds.setdefault(row.kind, []).append(row)
    return kinds


def pure_partition(train: Mapping[str, list[Example]], clients: int, seed: int) -> list[list[Example]]:
    """One kind a client: clients take turns with the kinds, and those of a kind share its rows evenly."""
    if clients < len(train):
        raise UserError(
            f"data.partition=pure gives every client one kind; data.clients={clients} are too few for {len(train)}."
        )
    rng = np.random.default_rng(seed)
    shares: list[list[Example]] = [[] for _ in range(clients)]
    for t, rows in enumerate(train.values()):
        owners = range(t, clients, len(train))
        if len(rows) < len(owners):
            raise UserError(f"{len(owners)} clients share {len(rows)} rows of one kind; lower data.clients.")
        for place, row in enumerate(rng.permutation(len(rows))):
            shares[owners[place % len(owners)]].append(rows[row])
    return shares


def client_names(count: int) -> list[str]:
    """Names of simulated clients, in an order that sorting keeps."""
    digits = len(str(count - 1))
    return [f"client_{i:0{digits}d}" for i in range(count)]


def dirichlet_partition(
    train: Mapping[str, list[Example]], clients: int, alpha: float, seed: int
) -> list[list[Example]]:
    """Every client draws a task mixture from Dir(α·1); each task is then dealt out by those mixtures.

    Client sizes come out nearly equal, mixtures differ. An empty client receives one example of the largest.
    """
    total = sum(len(rows) for rows in train.values())
    if clients > total:
        raise UserError(f"data.clients={clients}, but there are only {total} training examples.")
    rng = np.random.default_rng(seed)
    mixtures = rng.dirichlet([alpha] * len(train), size=clients)  # [clients, tasks]
    shares: list[list[Example]] = [[] for _ in range(clients)]
    for t, rows in enumerate(train.values()):
        rows = list(rows)
        rng.shuffle(rows)
        column = mixtures[:, t]
        total_share = column.sum()
        even = np.full(clients, 1 / clients)
        counts = rng.multinomial(len(rows), column / total_share if total_share > 1e-300 else even)
        rest = iter(rows)
        for share, count in zip(shares, counts, strict=True):
            share += islice(rest, count)
    for share in shares:
        rng.shuffle(share)
    while empty := [share for share in shares if not share]:
        largest = max(shares, key=len)
        rng.shuffle(largest)
        empty[0].append(largest.pop())
    return shares
