"""What held-out rows say about one client: how much each counts there."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from fedweave.data.examples import Example


class ClientWeights:
    """Weights of the held-out rows for every client.

    Rows that were kept back from a client's own speak for it alone. A set that all have in common speaks for each
    by its mixture of tasks: a client that has sums alone is judged by sums alone."""

    def __init__(self, clients: Mapping[str, Sequence[Example]], held: Sequence[Example]):
        self.mixtures = {name: Counter(e.task for e in rows) for name, rows in clients.items()}
        self.tasks, self.owners = [e.task for e in held], [e.client for e in held]
        self.sizes = Counter(self.tasks)

    @property
    def names(self) -> list[str]:
        return list(self.mixtures)

    def of(self, name: str) -> np.ndarray:
        """[n] together 1, or 0 where no row speaks for the client."""
        if any(self.owners):
            weights = np.array([float(owner == name) for owner in self.owners])
        else:
            mixture = self.mixtures[name]
            weights = np.array([mixture[task] / self.sizes[task] for task in self.tasks])
        return weights / (weights.sum() or 1.0)
