"""Splits and the Dirichlet partition: who holds which examples, as a pure function of the seed."""

from __future__ import annotations

from collections.abc import Mapping

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
        need = sum(sizes.values())
        if len(pool) < need:
            raise UserError(
                f"task {task!r} has {len(pool)} rows but data.train + data.validation + data.test asks for "
                f"{need}; lower them."
            )
        order = np.random.default_rng(seed + 1000 * (t + 1)).permutation(len(pool))
        splits[task], start = {}, 0
        for split, size in sizes.items():
            splits[task][split] = [pool[i] for i in order[start : start + size]]
            start += size
    return splits


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
        start = 0
        for share, count in zip(shares, counts, strict=True):
            share += rows[start : start + count]
            start += count
    for share in shares:
        rng.shuffle(share)
    while empty := [share for share in shares if not share]:
        largest = max(shares, key=len)
        rng.shuffle(largest)
        empty[0].append(largest.pop())
    return shares
