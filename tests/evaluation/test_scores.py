"""Scores: check vectors of the authors' release, rouge-score, and finding answers in run-on text."""

import pytest

from fedweave.metrics.scores import final_number, first_label, option_letter, rouge, rouge_paper, scores


def test_paper_rouge_vectors():
    assert rouge_paper("The cat sat on the mat.", "The cat sat on a mat.") == pytest.approx(0.7556, abs=1e-4)
    text = "The cat sat on the mat."
    assert rouge_paper(text + " And then it ran off.", text) == pytest.approx(0.6928, abs=1e-4)
    assert rouge_paper("", text) == 0.0 and rouge_paper(text, text) == pytest.approx(1.0)


def test_rouge_score_ignores_case_and_the_paper_variant_does_not():
    assert rouge("THE CAT", "the cat") == 1.0 and rouge_paper("THE CAT", "the cat") == 0.0
    assert scores("rouge", ["THE CAT"], ["the cat"], "paper") == [0.0]
    assert scores("rouge", ["THE CAT"], ["the cat"], "rouge-score") == [1.0]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7\n#### 7", "7"),
        ("#### 1,234\nand 5 more", "1234"),
        ("#### $18", "18"),
        ("it costs 3.50", "3.5"),
        ("about 12 or 13", "13"),
        ("#### -4", "-4"),
        ("none", None),
        ("7.00", "7"),
    ],
)
def test_final_number(text, number):
    assert final_number(text) == number


@pytest.mark.parametrize(
    ("text", "letter"),
    [("B", "B"), ("(C) because", "C"), ("The answer is D.", "D"), ("2", "B"), ("Apple", None), ("", None)],
)
def test_option_letter(text, letter):
    assert option_letter(text) == letter


@pytest.mark.parametrize(
    ("text", "label"), [("Positive!", "positive"), ("it is neutral", "neutral"), ("meh", None)]
)
def test_first_label(text, label):
    assert first_label(text) == label


def test_every_answer_has_its_own_score():
    assert scores("letter", ["A", "B"], ["A", "A"], "rouge-score") == [1.0, 0.0]
    assert scores("exact", [" Red  dog.", "cat"], ["red dog", "dog"], "rouge-score") == [1.0, 0.0]
    assert scores("label", ["negative", "what"], ["negative", "neutral"], "rouge-score") == [1.0, 0.0]
    assert scores("number", ["#### 3", "4"], ["#### 3", "#### 5"], "rouge-score") == [1.0, 0.0]
