"""Whole federations over Flower's records in which one site answers every question with something else.

Each federation follows from its number, so that a failure can be had again; FEDWEAVE_DAMAGES=10000 sends that many
mutated answers in every kind of federation.
"""

import io
import os
import random
from contextlib import suppress

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedweave.errors import UserError
from fedweave.federation.engines.flower.transport import ARRAYS, NUMBERS, TEXTS
from fedweave.federation.engines.flower.transport import _is_numeric as is_numeric
from fedweave.federation.state import broadcast
from fedweave.methods import build_method
from tests.federation.flower.conftest import Federation, LoopbackGrid, carried
from tests.federations import changed

TRIES = int(os.environ.get("FEDWEAVE_DAMAGES", "25"))
LIAR = 101
FIGURES = [0, 1, -1, 3, 2**31, 2**62, -(2**63), 1e-300, 1e30, 1e308, -1e12, float("inf"), float("nan")]
WORDS = ["", "x" * 10_000, "\x1b[2J\r\n\0", "NaN", b"bytes", True]
LISTS = [[], [float("nan")], ["a"], [2**62] * 4]
HEADERS = [
    ("<f4", (2**60,)), ("<f4", (-1,)), ("<f4", (0,)), ("|O", (1,)), (">f4", None), ("<U1", None), ("|S4", None),
    ("<c8", None), ("<f8", None), ("<f2", None), ("<i4", None), ("|b1", None),
]  # fmt: skip


def other_array(data: bytes, dice: random.Random) -> bytes:
    """Other bytes for an array in numpy's format, or other numbers."""
    kind, array = dice.randrange(7), np.lib.format.read_array(io.BytesIO(data))
    if kind == 0:
        return dice.choice([b"", data[: dice.randrange(len(data))], dice.randbytes(200), b"\x93NUMPY\x01\x00"])
    if kind == 1:
        spoilt = bytearray(data)
        for _ in range(dice.choice([1, 8])):
            spoilt[dice.randrange(len(spoilt))] ^= 1 << dice.randrange(8)
        return bytes(spoilt)
    if kind == 2:
        (descr, shape), file, body = dice.choice(HEADERS), io.BytesIO(), array.tobytes()
        shape = shape or (len(body) // np.dtype(descr).itemsize,)
        np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
        return file.getvalue() + body
    if kind == 3:
        array = array.ravel()[: dice.choice([0, 1, 7])]
    elif kind == 4 and array.size:
        values = [0, 1, 100] if array.dtype.kind in "iu" else [np.nan, np.inf, 1e30, -1e38, 6e4]
        array.flat[dice.randrange(array.size)] = dice.choice(values)
    elif kind == 5:
        array = np.random.default_rng(dice.randrange(2**32)).permutation(array.ravel()).reshape(array.shape)
    else:
        array = (array * dice.choice([-1, 0, -10, 1e3, 1e9, 1e30])).astype(array.dtype)
    file = io.BytesIO()
    np.lib.format.write_array(file, array)
    return file.getvalue()


def other_fact(fact: object, dice: random.Random) -> object:
    """Another figure or text, or list of them: often one that is possible."""
    if isinstance(fact, list) and fact:
        items, kind = list(fact), dice.randrange(4)
        if kind == 0:
            return items[: dice.randrange(len(items))]
        if kind == 1:
            return items * dice.choice([2, 1000])
        items[dice.randrange(len(items))] = type(items[0])(dice.choice([0, 1, 2, -1, 10**6, 2**62]))
        return items
    if isinstance(fact, int | float) and dice.random() < 0.5:
        return type(fact)(fact * dice.choice([0, -1, 2, 10**6]))
    return dice.choice([*FIGURES, *WORDS, *LISTS])


def mutated(records: RecordDict, dice: random.Random) -> RecordDict:
    """Other records than these."""
    arrays = {name: array.data for name, array in records.array_records[ARRAYS].items()}
    facts = dict(records.metric_records[NUMBERS]) | dict(records.config_records[TEXTS])
    for _ in range(dice.choice([1, 1, 2, 3])):
        kind, fact, name = dice.randrange(9), dice.choice([*facts, "step"]), dice.choice([*arrays, ""])
        if kind == 0:
            facts.pop(fact, None)
        elif kind == 1:
            facts[dice.choice(["error", "more", "", "name"])] = dice.choice([*FIGURES, *WORDS])
        elif kind < 4 or not name:
            facts[fact] = other_fact(facts.get(fact, ""), dice)
        elif kind == 4:
            arrays.pop(name)
        elif kind == 5:
            arrays[dice.choice(["", "theta", "expert.99", "router", "x:bf16"])] = arrays[name]
        else:
            arrays[name] = other_array(arrays[name], dice)
    numbers = {name: fact for name, fact in facts.items() if is_numeric(fact)}
    return RecordDict({
        ARRAYS: ArrayRecord({name: Array("float32", (1,), "numpy.ndarray", data) for name, data in arrays.items()}),
        NUMBERS: MetricRecord(numbers), TEXTS: ConfigRecord({n: f for n, f in facts.items() if n not in numbers}),
    })  # fmt: skip


class HostileGrid(LoopbackGrid):
    """One node's answers are other ones. Who spoils the first questions is asked few others, so most do not."""

    def __init__(self, nodes, dice: random.Random):
        super().__init__(nodes)
        self.dice, self.spoilt, self.often = dice, 0, dice.choice([1.0, 0.5, 0.2])
        self.spared = {"hello", "discover"} if dice.random() < 0.7 else {"hello"} if dice.random() < 0.7 else set()

    def push_messages(self, messages):
        numbers = super().push_messages(messages)
        for message, number in zip(messages, numbers, strict=True):
            step = message.content.config_records[TEXTS]["step"]
            if message.metadata.dst_node_id == LIAR and step not in self.spared and self.dice.random() < self.often:
                (reply,) = self.replies[number]
                with suppress(Exception):  # what Flower does not carry, or was spoilt before
                    reply.content = mutated(reply.content, self.dice)
                    self.replies[number] = [carried(reply)]
                    self.spoilt += 1
        return numbers


WOVEN = {
    "experts": {"labels": "router", "shared_rank": 8},
    "router": {"familiar": 0.9},
    "alignment": {"min_share": 0.05},
}
LIVING = {
    "living": {"notice": "open", "least": 6, "lessons": 1, "merge": True, "retire": 1}, "router": {"familiar": 0.9},
    "data": {"clients": 4, "train": 24, "changes": ["2: client_0, client_1 gain sum", "3: all lose mood"]},
}  # fmt: skip
PRIVATE = {"privacy": {"level": "example"}, "discovery": {"max_buckets": 1, "sketch": 4}}
MASKED = {"federation": {"secure_aggregation": True}}
WARY = {
    "federation": {"rule": "agreement", "contested": "vote", "hostile": 0.1, "max_share": 0.3}
}  # all have a vote
KINDS = {"wary": WARY, "woven": WOVEN, "living": LIVING, "private": PRIVATE, "masked": MASKED}


@pytest.mark.parametrize("kind", KINDS)
def test_a_site_that_answers_anything_costs_itself_alone(kind, config, models):
    """Of masked answers nobody sees whose they are: there a round may end in a sentence."""
    if kind == "masked":
        pytest.importorskip("cryptography", reason="pip install 'fedweave[privacy]'")
    elif kind == "private":
        pytest.importorskip("dp_accounting", reason="pip install 'fedweave[privacy]'")
    strangers = {} if kind == "masked" else {"rule": "clip", "max_share": 0.3}
    config = changed(
        config, data={"clients": 4, "train": 24}, training={"rounds": 3, "local_steps": 2},
        discovery={"warmup_steps": 6, "warmup_lr": 1e-2},
        federation={"min_answers": 2, "patience": 5.0, "deadline": 2.0, **strangers},
    )  # fmt: skip
    config, sent, number = changed(config, **KINDS[kind]), 0, 0
    while sent < TRIES:
        federation = Federation(config, models)
        grid = federation.engine.grid = federation.engine.transport.grid = HostileGrid(
            federation.grid.nodes, random.Random(number)
        )
        try:
            _, final, reports = federation.run(sites=3)
            list(
                federation.engine.ask(build_method(config).evaluate, federation.engine.members, broadcast(final, 3))
            )
            assert all(torch.isfinite(x).all() for x in final.tensors().values())
            assert all(len(report.receipts.accepted) >= 3 for report in reports)
        except UserError as error:
            assert kind == "masked" and "usable answers" in str(error), (number, error)
        except Exception as error:
            raise AssertionError(f"federation {number}") from error
        assert all(line.isprintable() and len(line) < 1000 for line in federation.said.split("\n")), number
        sent, number = sent + grid.spoilt, number + 1


def announcing(descr: str, shape: tuple[int, ...], body: bytes) -> Array:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return Array("float32", (1,), "numpy.ndarray", file.getvalue() + body)


def array(name: str, other: Array):
    def change(records: RecordDict) -> None:
        records.array_records[ARRAYS][name] = other

    return change


def loud(name: str):
    def change(records: RecordDict) -> None:
        arrays = records.array_records[ARRAYS]
        arrays[name] = Array(np.full_like(arrays[name].numpy(), 1e30))

    return change


def fact(name: str, value: object):
    def change(records: RecordDict) -> None:
        for known in (records.metric_records[NUMBERS], records.config_records[TEXTS]):
            known.pop(name, None)
        records[NUMBERS if is_numeric(value) else TEXTS][name] = value

    return change


ONCE = {  # each of these has ended a federation, or taken it over
    "an extra array of text": ("train", array("more", announcing("<U1", (3,), bytes(12))), "numpy.str_"),
    "an array without a body": ("train", array("router", Array("f", (1,), "numpy.ndarray", b"")), "cannot be read"),
    "2^60 numbers": ("train", array("router", announcing("<f4", (2**60,), bytes(16))), "header announces"),
    "the other byte order": ("train", array("router", announcing(">f4", (4,), bytes(16))), "cannot be read"),
    "1e30": ("warm", loud("router"), "norm"),
    "2^62 buckets": ("start", fact("buckets", [2**62]), "where 1 to"),
    "texts for silhouettes": ("discover", fact("silhouettes", ["a", "b"]), "no number"),
    "sizes of 2^63 together": ("discover", fact("sizes", [2**62, 2**62]), "are possible"),
    "4000 buckets": ("discover", fact("sizes", [1] * 4000), "4000 entries"),
    "an infinite count": ("evaluate", fact("count", float("inf")), "infinity"),
    "a loss of -1e12": ("evaluate", fact("total", -1e12), "are possible"),
    "no layers": ("hello", fact("layers", []), "0 entries"),
    "another number of buckets": ("start", fact("experts", [0] * 9), "entries"),
}


@pytest.mark.parametrize("message", ONCE)
def test_what_once_ended_a_federation_is_one_line_now(message, config, models):
    step, change, why = ONCE[message]
    config = changed(
        config, data={"clients": 4, "train": 24}, training={"rounds": 1, "local_steps": 2},
        federation={"rule": "clip", "max_share": 0.3, "patience": 5.0, "deadline": 2.0},
    )  # fmt: skip
    federation = Federation(config, models)
    push = federation.grid.push_messages

    def pushed(messages):
        numbers = push(messages)
        for asked, number in zip(messages, numbers, strict=True):
            if asked.metadata.dst_node_id == LIAR and asked.content.config_records[TEXTS]["step"] == step:
                (reply,) = federation.grid.replies[number]
                change(reply.content)
                federation.grid.replies[number] = [carried(reply)]
        return numbers

    federation.grid.push_messages = pushed
    _, final, reports = federation.run(sites=3)
    list(federation.engine.ask(build_method(config).evaluate, federation.engine.members, broadcast(final, 1)))
    told = [line for line in federation.said.split("\n") if "was refused" in line]
    assert told and all(why in line for line in told), federation.said
    assert {0, 2, 3} <= reports[0].receipts.accepted or step in ("hello", "discover")
