"""Scores of generated answers. rouge-score counts ROUGE; the rest is finding the answer in the text.

Every metric maps (prediction, reference) to a number between 0 and 1; a task's score is the mean.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from fedweave.data.tasks import SENTIMENTS

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer

_NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?"


def final_number(text: str) -> str | None:
    """The number after ``####``, else the last number."""
    marked = re.search(rf"####\s*({_NUMBER})", text)
    found = [marked.group(1)] if marked else re.findall(_NUMBER, text)
    if not found:
        return None
    digits = found[-1].replace(",", "").replace("$", "")
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


def number(prediction: str, reference: str) -> float:
    wanted = final_number(reference)
    return float(wanted is not None and final_number(prediction) == wanted)


def exact(prediction: str, reference: str) -> float:
    """The same words, whatever their case and final stop."""
    mine, theirs = (" ".join(text.lower().split()).rstrip(".") for text in (prediction, reference))
    return float(mine == theirs)


def option_letter(text: str) -> str | None:
    """The first stand-alone option letter A to E, or digit 1 to 5 read as a letter."""
    found = re.search(r"(?<![A-Za-z0-9])([A-E1-5])(?![A-Za-z0-9])", text.strip())
    return found.group(1).translate(str.maketrans("12345", "ABCDE")) if found else None


def letter(prediction: str, reference: str) -> float:
    wanted = option_letter(reference)
    return float(wanted is not None and option_letter(prediction) == wanted)


def first_label(text: str) -> str | None:
    """The first sentiment word in the text."""
    return next((w for w in re.findall(r"[a-z]+", text.lower()) if w in SENTIMENTS), None)


def label(prediction: str, reference: str) -> float:
    return float(first_label(prediction) == first_label(reference) is not None)


@lru_cache(maxsize=1)
def _rouge_scorer() -> RougeScorer:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rouge1", "rouge2", "rougeLsum"], use_stemmer=False)


def rouge(prediction: str, reference: str) -> float:
    """Mean of ROUGE-1, ROUGE-2 and ROUGE-Lsum F1, as the rouge-score package counts them."""
    scores = _rouge_scorer().score(reference, prediction)
    return sum(s.fmeasure for s in scores.values()) / 3


def rouge_paper(prediction: str, reference: str) -> float:
    """The authors' own count: tokens split at blanks, case and punctuation kept, one LCS over all sentences."""
    words, wanted = prediction.split(), reference.split()

    def overlap(n: int) -> float:
        mine, theirs = (Counter(zip(*(x[i:] for i in range(n)), strict=False)) for x in (words, wanted))
        return _f1(sum((mine & theirs).values()), sum(mine.values()), sum(theirs.values()))

    a, b = ([w for s in re.split(r"[\n.。！？!?]+", x) for w in s.split()] for x in (prediction, reference))
    return (overlap(1) + overlap(2) + _f1(_longest_common(a, b), len(a), len(b))) / 3


def _f1(hits: int, predicted: int, wanted: int) -> float:
    return 2 * hits / (predicted + wanted) if hits else 0.0


def _longest_common(a: Sequence[str], b: Sequence[str]) -> int:
    row = [0] * (len(b) + 1)
    for x in a:
        previous = row
        row = [0]
        for j, y in enumerate(b):
            row.append(previous[j] + 1 if x == y else max(previous[j + 1], row[j]))
    return row[-1]


METRICS: dict[str, Callable[[str, str], float]] = {
    "rouge": rouge,
    "rouge_paper": rouge_paper,
    "number": number,
    "exact": exact,
    "letter": letter,
    "label": label,
}


def scores(metric: str, predictions: Sequence[str], references: Sequence[str], rouge_variant: str) -> list[float]:
    """The score of every answer; ``rouge_variant`` is evaluation.rouge."""
    name = "rouge_paper" if metric == "rouge" and rouge_variant == "paper" else metric
    return [METRICS[name](p, r) for p, r in zip(predictions, references, strict=True)]
