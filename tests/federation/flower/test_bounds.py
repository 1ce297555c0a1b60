"""What a stranger's answer may cost the server before anybody has looked inside."""

import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedweave.federation.engines.flower.tasks import BoundedGrid, check_repeats
from fedweave.federation.engines.flower.transport import from_records, opened, to_records
from fedweave.federation.message import Message as OwnMessage
from fedweave.federation.message import NoAnswer, Refused

PIECE = 5 * 2**20  # bytes into which Flower cuts arrays


def announcing(shape: tuple[int, ...], descr: str, body: bytes) -> RecordDict:
    """An array whose header promises this."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return RecordDict(
        {"arrays": ArrayRecord({"x": Array("float32", (1,), "numpy.ndarray", file.getvalue() + body)})}
    )


@pytest.mark.parametrize(
    ("shape", "descr", "body"),
    [
        ((2**60,), "<f4", b"1234"), ((2**34,), "<f4", b""), ((1,), "|O", b"12345678"), ((2,), "<f4", bytes(12)),
        ((-1,), "<f4", b""),
    ],
)  # fmt: skip
def test_an_array_is_what_its_header_announces(shape, descr, body):
    with pytest.raises(Refused, match="not what its header announces"):
        from_records(announcing(shape, descr, body))


@pytest.mark.parametrize("body", [b"", b"no array", b"\x93NUMPY\x02\x00" + bytes(100)])
def test_bytes_that_are_no_array_are_no_answer(body):
    records = RecordDict({"arrays": ArrayRecord({"x": Array("float32", (1,), "numpy.ndarray", body)})})
    with pytest.raises((Refused, ValueError)):
        from_records(records)


def test_what_is_sent_arrives():
    tensors = {
        "f": torch.randn(3, 4), "h": torch.randn(5).bfloat16(), "i": torch.arange(7), "e": torch.empty(0, 2),
        "s": torch.tensor(3.0), "b": torch.tensor([True, False]), "u": torch.arange(4, dtype=torch.uint8),
    }  # fmt: skip
    found = from_records(to_records(OwnMessage(tensors))).tensors
    assert found.keys() == tensors.keys() and all(torch.equal(found[n], tensors[n]) for n in tensors)


def test_an_answer_that_is_too_large_is_not_read():
    records = to_records(OwnMessage({"x": torch.zeros(1000)}))
    assert from_records(records, 5000).tensors
    with pytest.raises(Refused, match=r"it holds 0 MB, where 0 are possible"):
        from_records(records, 4000)


class Link:
    """A SuperLink's Runtime API that has one answer."""

    def __init__(self, objects: dict[str, bytes], tree, number: str):
        self.objects, self.tree, self.number, self.fetched = objects, tree, number, 0

    def PullMessages(self, request):
        header = SimpleNamespace(message_id=self.number, reply_to_message_id="question")
        message = SimpleNamespace(metadata=header)
        return SimpleNamespace(messages_list=[message], message_object_trees=[self.tree])

    def PullObject(self, request):
        content = self.objects[request.object_id]
        self.fetched += len(content)
        return SimpleNamespace(object_found=True, object_available=True, object_content=content)

    def ConfirmMessageReceived(self, request): ...


def pulled(link: Link, most: int) -> Message:
    grid = BoundedGrid("127.0.0.1:1", insecure=True, token="x")
    grid._client, grid.most = link, most
    grid.set_run(Run.create_empty(1))
    (message,) = grid.pull_messages(["question"])
    return message


@pytest.fixture
def sent():
    """A real answer with twelve megabytes, as Flower stores it."""
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
    message = Message(to_records(OwnMessage({"x": torch.arange(3e6)})), 1, "query")
    message.metadata.__dict__["_message_id"] = message.object_id
    objects = {number: found.deflate() for number, found in get_all_nested_objects(message).items()}
    return Link(objects, get_object_tree(message), message.object_id)


def test_the_grid_fetches_what_is_small_enough(sent):
    found = opened(pulled(sent, 2**24), 2**24)
    assert torch.equal(found.tensors["x"], torch.arange(3e6))


def test_the_grid_stops_fetching_an_answer_that_is_too_large(sent):
    reply = pulled(sent, 2**20)
    assert sent.fetched < 12e6 and reply.metadata.reply_to_message_id == "question"
    with pytest.raises(NoAnswer, match="cannot be put together"):
        opened(reply, 2**20)


def test_an_answer_that_names_a_piece_again_and_again_is_not_put_together(sent):
    """Flower lets an array name its pieces, so that a few megabytes become as many as somebody likes."""
    (number,) = [n for n, content in sent.objects.items() if content.startswith(b"Array ")]
    head, body = sent.objects[number].split(b"\x00", 1)
    told = json.loads(body)
    told["arraychunk_ids"] *= 1000
    again = json.dumps(told).encode()
    sent.objects[number] = head.rsplit(b" ", 1)[0] + b" %d\x00" % len(again) + again
    with pytest.raises(ValueError, match="it would become more than 17 MB"):
        check_repeats(sent.objects, 2**24)
    with pytest.raises(NoAnswer, match="it would become more than 17 MB"):
        opened(pulled(sent, 2**24), 2**24)


@pytest.mark.parametrize("piece", [b"", b"Array", b"Nonsense  3\x00abc", b"ArrayRecord  2\x00{}"])
def test_pieces_that_are_none_cost_their_sender_alone(sent, piece):
    (number,) = [n for n, content in sent.objects.items() if content.startswith(b"Array ")]
    sent.objects[number] = piece
    with pytest.raises(NoAnswer, match="cannot be put together"):
        opened(pulled(sent, 2**24), 2**24)
