"""What a held-out row says about one client: how much it counts there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from fedweave.data.examples import Example


def client_weights(clients: Mapping[str, Sequence[Example]], held: Sequence[Example]) -> dict[str, np.ndarray]:
    """Weights [n] of the held-out rows for every client, together 1, or 0 where no row speaks for it.

    Rows that were kept back from a client's own speak for it alone. A set that all have in common speaks for each
    by its mixture of tasks: a client that has sums alone is judged by sums alone."""
    own = any(e.client for e in held)
    sizes = Counter(e.task for e in held)
    out = {}
    for name, rows in clients.items():
        share = Counter(e.task for e in rows)
        weights = np.array([float(e.client == name) if own else share[e.task] / sizes[e.task] for e in held])
        out[name] = weights / (weights.sum() or 1.0)
    return out
