"""A new kind of which a few rows come at a time."""

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
def test_a_kind_that_comes_in_lots_is_noticed_once_there_are_enough(living, backbone, notice):
    """Three at a time, where eight are enough: they wait together, form one bucket, and are told of."""
    config = changed(
        living, living={"least": LEAST, "notice": notice}, data={"train": 60}, training={"rounds": ROUNDS}
    )
    engine, method = in_lots(config, backbone)
    reports = []
    federate(method, engine, method.prepare(engine), range(ROUNDS), lambda _, report: reports.append(report))
    engine.detach()
    client, changes = engine.members[0], [report.change for report in reports]
    (bucket,) = [bucket for change in changes for bucket in change.placed]
    assert changes[3].placed == [bucket] and bucket.rows == 3 * LOT >= LEAST
    assert bucket.expert == (-1 if notice == "ask" else changes[3].opened[0])
    assert bucket.waits == ("living.notice=open" if notice == "ask" else "")
    assert len(client.waiting) == 2 * LOT and sum(client.sizes) + len(client.waiting) == len(client.data)


@pytest.mark.parametrize("notice", ["open", "ask"])
def test_too_few_rows_of_a_new_kind_wait_instead_of_joining_another(living, notice):
    """They come beside many of a kind that is known. Nobody is asked about them before there are enough."""
    config = changed(living, living={"least": LEAST, "notice": notice})
    blocks = [np.eye(4, dtype=np.float32)[[0, 3]]]
    new = np.array([False, True])
    for rows, expert, waits in ((LEAST - 1, -1, ""), (LEAST, 2, "")):
        arrived = Arrived(["a", "a"], [40, rows], blocks, np.array([[0.1, 1.0], [1.0, 0.9]]), new, 0.5)
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
    for came, together in ((2, [5]), (LEAST - 5, [LEAST])):
        client.waiting = rest[:came]
        method.group(engine.compute, client)
        assert client.sizes[last + 1 :] == together and client.assignment[last + 1 :] == [-1]
    assert (
        not len(client.waiting)
        and set(few) < set(client.buckets[-1].tolist())
        and client.sizes[:last] == sizes[:last]
    )
