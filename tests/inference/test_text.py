"""Streamed text: pieces add up, characters stay whole, stop strings never show."""

import pytest

from fedweave.inference.text import AnswerText
from tests.properties import given, st


def pieces_of(text: AnswerText, ids: list[int]) -> list[str]:
    pieces = [text.add(i) for i in ids]
    return [*pieces, text.close()]


@given(st.text(max_size=40), st.integers(0, 60))
def test_pieces_add_up_and_never_split_a_character(tokenizer, words, cut):
    """A cut anywhere between two tokens leaves whole characters only."""
    ids = tokenizer(words, add_special_tokens=False)["input_ids"][:cut]
    text = AnswerText(tokenizer, trim=False)
    pieces = pieces_of(text, ids)
    assert "".join(pieces) == text.text
    assert words.startswith(text.text)
    assert len(words) - len(text.text) <= 1 or cut < len(tokenizer(words, add_special_tokens=False)["input_ids"])


def test_a_character_of_several_tokens_comes_in_one_piece(tokenizer):
    ids = tokenizer("né€🦊!", add_special_tokens=False)["input_ids"]
    assert len(ids) > 5, "the tokenizer must split characters for this to test anything"
    shown = [p for p in pieces_of(AnswerText(tokenizer), ids) if p]
    assert "".join(shown) == "né€🦊!" and "🦊" in shown


@pytest.mark.parametrize(
    ("words", "stops", "expected"),
    [
        ("one\n\ntwo", ("\n\n",), "one"),
        ("one END two", ("END", "two"), "one"),
        ("one EN two", ("END",), "one EN two"),  # what looked like a stop string is shown in the end
        ("ENEND", ("END",), "EN"),
        ("all of it EN", ("END",), "all of it EN"),
        ("ab", ("ab",), ""),
        ("  blanks  around  ", (), "blanks  around"),
    ],
)
def test_stop_strings_and_blanks(tokenizer, words, stops, expected):
    text = AnswerText(tokenizer, stops)
    pieces = pieces_of(text, tokenizer(words, add_special_tokens=False)["input_ids"])
    assert "".join(pieces) == text.text == expected
    assert text.stopped == any(stop in words for stop in stops)


def test_nothing_of_a_stop_string_is_shown_before_it_is_complete(tokenizer):
    text = AnswerText(tokenizer, ("STOP",))
    shown = ""
    for i in tokenizer("go on STOP it", add_special_tokens=False)["input_ids"]:
        shown += text.add(i)
        assert "go on".startswith(shown)
