"""Scores of generated answers. Libraries count ROUGE and chrF; the rest is finding the answer in the text.

Every metric maps (prediction, reference) to a number between 0 and 1; a task's score is the mean. ``rouge`` and
``label`` are those of the paper's tasks and read English alone; ``rouge-unicode`` and ``labels`` are for own data,
where a perfect answer scores 1 in any language.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, SupportsFloat

from fedweave.errors import UserError, first_line, needed
from fedweave.metrics.scripts import words

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics import CHRF

SENTIMENTS = ("negative", "neutral", "positive")

Metric = Callable[[str, str], float]

_NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?"


def final_number(text: str) -> str | None:
    """The number after ``####``, else the last number."""
    marked = re.search(rf"####\s*({_NUMBER})", text)
    found = [marked.group(1)] if marked else re.findall(_NUMBER, text)
    if not found:
        return None
    digits = found[-1].replace(",", "").replace("$", "")
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


def exact(prediction: str, reference: str) -> float:
    """The same words, whatever their case and final stop."""
    mine, theirs = (
        " ".join(unicodedata.normalize("NFC", text).casefold().split()).rstrip(".。।")
        for text in (prediction, reference)
    )
    return float(mine == theirs)


def option_letter(text: str) -> str | None:
    """The first stand-alone option letter A to E, or digit 1 to 5 read as a letter."""
    found = re.search(r"(?<![A-Za-z0-9])([A-E1-5])(?![A-Za-z0-9])", text.strip())
    return found.group(1).translate(str.maketrans("12345", "ABCDE")) if found else None


def first_label(text: str) -> str | None:
    """The first sentiment word in the text."""
    return next((w for w in re.findall(r"[a-z]+", text.lower()) if w in SENTIMENTS), None)


def _the_same(find: Callable[[str], str | None]) -> Metric:
    """Whether the same is found in both, and anything at all."""

    def score(prediction: str, reference: str) -> float:
        wanted = find(reference)
        return float(wanted is not None and find(prediction) == wanted)

    return score


def label_metric(labels: Sequence[str]) -> Metric:
    """Whether the first of ``labels`` in the prediction is the reference; of two that begin there, the longer."""
    known = sorted({tuple(words(text)) for text in labels} - {()}, key=len, reverse=True)

    def first(text: str) -> tuple[str, ...] | None:
        said = words(text)
        starts = range(len(said))
        return next((k for i in starts for k in known if tuple(said[i : i + len(k)]) == k), None)

    def score(prediction: str, reference: str) -> float:
        wanted = tuple(words(reference))  # a mere 👍 has none
        return float(first(prediction) == wanted) if wanted else exact(prediction, reference)

    return score


def f1(prediction: str, reference: str) -> float:
    """How many words both have, whatever their order."""
    mine, theirs = Counter(words(prediction)), Counter(words(reference))
    if not theirs:
        return exact(prediction, reference)
    return _f1((mine & theirs).total(), mine.total(), theirs.total())


class _Words:
    """The tokenizer that rouge-score is given for other languages than English."""

    tokenize = staticmethod(words)


@lru_cache(maxsize=2)
def _rouge_scorer(tokenizer: type[_Words] | None = None) -> RougeScorer:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rouge1", "rouge2", "rougeLsum"], use_stemmer=False, tokenizer=tokenizer)


def rouge(prediction: str, reference: str) -> float:
    """Mean of ROUGE-1, ROUGE-2 and ROUGE-Lsum F1, as the rouge-score package counts them."""
    scores = _rouge_scorer().score(reference, prediction)
    return sum(s.fmeasure for s in scores.values()) / 3


def rouge_unicode(prediction: str, reference: str) -> float:
    """The same over words of any script; a reference of one word, which has no pairs, goes without ROUGE-2."""
    wanted = words(reference)
    if not wanted:
        return exact(prediction, reference)
    scores = _rouge_scorer(_Words).score(reference, prediction)
    counted = [s.fmeasure for name, s in scores.items() if name != "rouge2" or len(wanted) > 1]
    return sum(counted) / len(counted)


@lru_cache(maxsize=1)
def _chrf_scorer() -> CHRF:
    return needed("sacrebleu.metrics", "the metric chrf needs sacrebleu: pip install 'fedweave[chrf]'.").CHRF()


def chrf(prediction: str, reference: str) -> float:
    """F-score over characters and their sequences of up to six, as sacrebleu counts it, from 0 to 1."""
    return _chrf_scorer().sentence_score(prediction, [reference]).score / 100


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


METRICS: dict[str, Metric] = {
    "rouge": rouge,
    "rouge_paper": rouge_paper,
    "rouge-unicode": rouge_unicode,
    "number": _the_same(final_number),
    "exact": exact,
    "letter": _the_same(option_letter),
    "label": _the_same(first_label),
    "f1": f1,
    "chrf": chrf,
}


def find_metric(name: str, labels: Sequence[str] = ()) -> Metric:
    """A metric by the name that a task has for it; whatever it needs is there, or one sentence says what is not."""
    if ":" in name:
        return user_metric(name)
    if name == "chrf":
        _chrf_scorer()
    return label_metric(labels) if name == "labels" else METRICS[name]


def scores(
    metric: str,
    predictions: Sequence[str],
    references: Sequence[str],
    rouge_variant: str,
    labels: Sequence[str] = (),
) -> list[float]:
    """The score of every answer; ``rouge_variant`` is evaluation.rouge, ``labels`` those of the task."""
    name = "rouge_paper" if metric == "rouge" and rouge_variant == "paper" else metric
    score = find_metric(name, labels or references)
    return [score(p, r) for p, r in zip(predictions, references, strict=True)]


def user_metric(name: str) -> Metric:
    """A function of the user's own, ``module:function``, looked up from the current folder too, with its answers
    checked. Only a config may name one, never a file of the data: data does not run code."""
    function = _load(name)

    def score(prediction: str, reference: str) -> float:
        try:
            value = function(prediction, reference)
        except Exception as error:  # whatever a stranger's code raises
            raise UserError(
                f"evaluation.metrics: {name} fails on the answer {_short(prediction)} to {_short(reference)} "
                f"({type(error).__name__}: {first_line(error)})."
            ) from error
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = float("nan")
        if not 0.0 <= number <= 1.0:
            raise UserError(f"evaluation.metrics: {name} must give a number between 0 and 1, not {_short(value)}.")
        return number

    return score


def _load(name: str) -> Callable[[str, str], SupportsFloat]:
    module, _, attribute = name.partition(":")
    before = list(sys.path)
    sys.path.append(os.getcwd())
    importlib.invalidate_caches()
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # importing runs a stranger's code
        raise UserError(
            f"evaluation.metrics: {name} cannot be loaded ({type(error).__name__}: {first_line(error)}); it names "
            "a module of this folder or of an installed package and a function in it, as in my_metrics:score."
        ) from error
    finally:
        sys.path[:] = before
    if not callable(found):
        raise UserError(f"evaluation.metrics: {name} is no function of (prediction, reference).")
    return found


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
