"""A new kind of which a few rows come at a time."""

from dataclasses import replace

import numpy as np
import pytest

from fedweave.federation.client import Client
from fedweave.federation.rounds import federate
from fedweave.methods import build_method
from fedweave.methods.newcomers import Arrived, decide
from tests.federations import changed, make_engine

LEAST, LOT, ROUNDS = 8, 3, 6


class Lots:
    """A client to which another lot of rows comes before every round but the first."""

    def __init__(self, client: Client, lots: list[np.ndarray]):
        self.everything, self.lots = client.data, lots

    def version(self, t: int) -> int:
        return min(t, len(self.lots) - 1)

    def data(self, version: int):
        return self.everything.part(np.sort(np.concatenate(self.lots[: version + 1])))


def in_lots(config, backbone):
    """(engine, method): to client 0 come a few sums before every round, which nobody else has."""
    engine = make_engine(config, backbone)
    for client in engine.members:
        texts = [backbone.tokenizer.decode(e.ids) for e in client.data.examples]
        sums = np.array(["finds" in text for text in texts])
        new, old = np.flatnonzero(sums), np.flatnonzero(~sums)
        if client.index == 0:
            client.feed = Lots(client, [old, *(new[LOT * i :][:LOT] for i in range(ROUNDS - 1))])
            client.data = client.feed.data(0)
        else:
            client.data = client.data.part(old)
    return engine, build_method(config)


@pytest.mark.parametrize("notice", ["open", "ask"])
def test_strange_rows_that_come_in_lots_wait_together_and_feed_no_known_expert(
    living, backbone, notice, monkeypatch
):
    """Three at a time, where eight are enough."""
    config = changed(
        living, living={"least": LEAST, "notice": notice}, data={"train": 60}, training={"rounds": ROUNDS}
    )
    engine, method = in_lots(config, backbone)
    read, state, reports = method.living.sign.read, method.prepare(engine), []
    monkeypatch.setattr(
        method.living.sign, "read",
        lambda *reply: replace(told := read(*reply), strange=[1.0] * len(told.strange)),
    )  # fmt: skip
    state = replace(state, report=state.report | {"own_distances": [0.0, 0.1, 0.2]})
    known = state.layout.experts
    federate(method, engine, state, range(ROUNDS), lambda _, report: reports.append(report))
    engine.detach()
    client, changes = engine.members[0], [report.change for report in reports]
    assert not any(change.placed for change in changes[:3])
    assert sum(bucket.rows for bucket in changes[3].placed) == 3 * LOT
    placed = [bucket for change in changes for bucket in change.placed]
    assert all(bucket.expert < 0 or bucket.expert >= known for bucket in placed)
    assert sum(client.sizes) + len(client.waiting) == len(client.data)
    if notice == "ask":
        assert all(bucket.expert < 0 for bucket in placed)


@pytest.mark.parametrize("notice", ["open", "ask"])
def test_too_few_rows_of_a_new_kind_wait_instead_of_joining_another(living, notice):
    """They come beside many of a kind that is known. Nobody is asked about them before there are enough."""
    config = changed(living, living={"least": LEAST, "notice": notice})
    blocks = [np.eye(4, dtype=np.float32)[[0, 3]]]
    new = np.array([False, True])
    for rows, expert, waits in ((LEAST - 1, -1, ""), (LEAST, 2, "")):
        arrived = Arrived(["a", "a"], [40, rows], blocks, np.array([[0.1, 1.0], [1.0, 0.9]]), new, new, 0.5)
        asked = notice == "ask" and rows == LEAST
        expected = [0, -1 if asked else expert], ["", "living.notice=open" if asked else waits]
        assert decide(arrived, {}, config) == expected
    full = changed(config, alignment={"max_experts": 2})
    assert decide(arrived, {}, full)[0] == [0, 1], "where there is no room, nothing is waited for"


def test_rows_that_were_too_few_form_buckets_with_what_comes(living, backbone):
    engine, method = in_lots(living, backbone)
    method.prepare(engine)
    engine.detach()
    client = engine.members[0]
    sizes, last = client.sizes, len(client.buckets) - 1
    rest, few = client.buckets[last][5:], client.buckets[last][:5]
    client.buckets, client.assignment = [*client.buckets[:last], rest, few], [*client.assignment, -1]
    for came, together in ((2, 5), (LEAST - 5, LEAST)):
        client.waiting = rest[:came]
        method.group(engine.compute, client)
        assert sum(client.sizes[last + 1 :]) == together and {*client.assignment[last + 1 :]} == {-1}
    assert (
        not len(client.waiting)
        and set(few) < set(np.concatenate(client.buckets[last + 1 :]).tolist())
        and client.sizes[:last] == sizes[:last]
    )
