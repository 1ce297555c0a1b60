"""Hostile clients of a simulation (``attack``): who they are, and what some of them make of their own rows.

What others do to their answers is :mod:`fedweave.federation.hostile`.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from fedweave.config import Config
from fedweave.data.examples import Example
from fedweave.streams import stream_key

ON_ROWS = ("labels", "bucket")
WRONG = "I would rather not say."


def hostile_clients(config: Config) -> set[int]:
    """The places of the hostile clients, drawn by the seed; a larger share has those of a smaller one, too."""
    if config.attack.kind == "none" or not config.attack.clients:
        return set()
    clients = config.data.clients
    order = np.random.default_rng(stream_key("hostile", config.seed)).permutation(clients)
    return set(order[: max(1, round(config.attack.clients * clients))].tolist())


def spoil(config: Config, clients: Mapping[str, list[Example]]) -> dict[str, list[Example]]:
    """Every client's rows, those of hostile ones as they train on them."""
    if config.attack.kind not in ON_ROWS:
        return dict(clients)
    aimed_at = min(row.kind for rows in clients.values() for row in rows)
    targets = [row for rows in clients.values() for row in rows if row.kind == aimed_at]
    hostile, spoilt = hostile_clients(config), {}
    for place, (name, rows) in enumerate(clients.items()):
        rng = np.random.default_rng(stream_key("spoil", config.seed, name))
        if place not in hostile:
            spoilt[name] = rows
        elif config.attack.kind == "labels":
            spoilt[name] = exchanged(rows)
        else:
            drawn = rng.choice(len(targets), len(rows), replace=len(targets) < len(rows))
            spoilt[name] = [replace(targets[i], response=WRONG) for i in drawn]
    return spoilt


def exchanged(rows: list[Example]) -> list[Example]:
    """Every row with the answer of another one of its task: of those in order of their answers, one half round."""
    found = list(rows)
    for task in dict.fromkeys(row.task for row in rows):
        own = sorted((i for i, row in enumerate(rows) if row.task == task), key=lambda i: rows[i].response)
        for place, i in enumerate(own):
            other = own[(place + max(1, len(own) // 2)) % len(own)]
            found[i] = replace(rows[i], response=rows[other].response)
    return found
