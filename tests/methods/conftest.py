"""A federation to which rows of a kind that nobody knows come in mid-run."""

import numpy as np
import pytest

from fedweave.federation.client import Client
from fedweave.methods import build_method
from tests.federations import changed, make_engine


class Arriving:
    """A client that has some of its rows in round 0 and the rest from round 1 on."""

    def __init__(self, client: Client, early: np.ndarray):
        self.everything, self.early = client.data, early

    def version(self, t: int) -> int:
        return min(t, 1)

    def data(self, version: int):
        return self.everything if version else self.everything.part(self.early)


@pytest.fixture
def living(config):
    """Warmups that tell kinds apart, on a model that knows nothing."""
    return changed(
        config, discovery={"warmup_steps": 6, "warmup_lr": 1e-2}, living={"notice": "open", "least": 8},
        data={"train": 30, "clients": 3}, training={"rounds": 3},
    )  # fmt: skip


def federation(config, backbone):
    """(engine, method): two clients get sums only from round 1 on; the third never has any."""
    engine = make_engine(config, backbone)
    for client in engine.members:
        texts = [backbone.tokenizer.decode(e.ids) for e in client.data.examples]
        early = np.flatnonzero(["finds" not in text for text in texts])
        if client.index < 2:
            client.feed = Arriving(client, early)
        client.data = client.data.part(early)
    return engine, build_method(config)
