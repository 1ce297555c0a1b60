"""What is read is what was written, of the kind that it should be; anything else is one sentence."""

import json
from typing import Literal, TypedDict

import pytest
from typing_extensions import NotRequired

from fedweave.errors import UserError
from fedweave.json_files import misfit, read_json, sealed, write_json


class Part(TypedDict):
    name: str
    sizes: list[int]


class Whole(TypedDict):
    """All that may stand in a file."""

    parts: dict[str, Part]
    kind: Literal["a", "b"]
    loss: float | None
    good: bool
    notes: NotRequired[list[str]]
    anything: object


GOOD = {"parts": {"x": {"name": "n", "sizes": [1, 2]}}, "kind": "a", "loss": 1, "good": True, "anything": [{}]}


def test_what_was_written_is_read(tmp_path):
    path = tmp_path / "file.json"
    write_json(path, {**GOOD, "anything": {1: (2, float("inf"))}})
    assert read_json(path, Whole) == {**GOOD, "anything": {"1": [2, float("inf")]}}
    path.write_text(json.dumps(GOOD))  # an earlier version wrote no checksum
    assert read_json(path, Whole) == GOOD
    assert read_json(tmp_path / "none.json", Whole) is None


def test_every_changed_figure_shows(tmp_path):
    path, text = tmp_path / "file.json", sealed(GOOD)
    for at, letter in enumerate(text):
        if letter in "12":
            path.write_text(text[:at] + "3" + text[at + 1 :])
            with pytest.raises(UserError, match=r"file.json is damaged \(its content does not match"):
                read_json(path, Whole)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"parts": []}, "parts is list"),
        ({"parts": {"x": {"name": "n"}}}, "parts.x.sizes is missing"),
        ({"parts": {"x": {"name": "n", "sizes": [1, 2.5]}}}, "parts.x.sizes.1 is 2.5"),
        ({"parts": {"x": {"name": None, "sizes": []}}}, "parts.x.name is nothing"),
        ({"kind": "c"}, "kind is 'c'"),
        ({"loss": True}, "loss is True"),
        ({"loss": "1"}, "loss is '1'"),
        ({"good": 1}, "good is 1"),
        ({"notes": [1]}, "notes.0 is 1"),
        ({"notes": None}, "notes is nothing"),
    ],
)
def test_a_value_of_another_kind_is_named(change, problem):
    assert misfit(GOOD, Whole) == ""
    assert misfit({**GOOD, **change}, Whole) == problem


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00", "[" * 100_000, "3"])
def test_anything_else_is_one_sentence(tmp_path, text):
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"file\.json is damaged \(.*\); mend it\.$"):
        read_json(path, Whole, "mend it")
