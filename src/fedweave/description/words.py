"""Words that set groups of texts apart, in any script and without a list of stop words.

A word is judged by the prompts that hold it, not by how often it stands in them: one long prompt is one vote. Words
count whose log-odds against all other groups, drawn towards the common rate where counts are small, lie clearly
above 0 (Monroe, Colaresi and Quinn, "Fightin' Words", 2008); among them those rank first that many of the group's
prompts hold and few of the others'.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np
import regex

from fedweave.metrics.scripts import UNSPACED, normal

_PRIOR = 10.0  # prompts of the common rate that every group is given
_CLEAR = 2.0  # standard errors
_OWN = 0.7  # its rate here as a part of both rates: "the" may be clearly more frequent and yet be everywhere
_FEWEST = 3  # prompts of the group: a word of one prompt says nothing of the group, and may be a person's name
# a run of a script without blanks, or a word
_TERM = regex.compile(rf"(?V1)((?:[{UNSPACED}]\p{{M}}*)+)|([[\p{{L}}\p{{M}}\p{{N}}]--[{UNSPACED}]]+)")
_CHARACTER = regex.compile(r"\X")


def terms(text: str) -> set[str]:
    """Words of two letters and more; in scripts without blanks pairs of neighbouring characters."""
    found = set()
    for run, word in _TERM.findall(normal(text)):
        if run:
            found |= {a + b for a, b in pairwise(_CHARACTER.findall(run))}
        elif len(word) > 1 and not word.isnumeric():
            found.add(word)
    return found


def distinctive(groups: Sequence[Sequence[str]], count: int = 8) -> list[list[str]]:
    """For each group of texts the words that stand in it more often than in all others, the clearest first."""
    holding = [Counter(chain.from_iterable(map(terms, group))) for group in groups]
    vocabulary = sorted(set().union(*holding))
    table = np.array(
        [[counter[term] for term in vocabulary] for counter in holding], dtype=float
    )  # [groups, words]
    sizes = np.array([[len(group)] for group in groups], dtype=float)  # [groups, 1]
    if len(groups) < 2 or not vocabulary:
        return [[] for _ in groups]
    common = _PRIOR * (table.sum(0) + 0.5) / (sizes.sum() + 1)  # [words]
    here, there = table + common, table.sum(0) - table + common
    rest = sizes.sum() - sizes
    odds = np.log(here / (sizes + _PRIOR - here)) - np.log(there / (rest + _PRIOR - there))
    clear = odds / np.sqrt(1 / here + 1 / there)
    often, elsewhere = here / (sizes + _PRIOR), there / (rest + _PRIOR)
    own = often / (often + elsewhere)
    rank = often * own
    rank[(table < _FEWEST) | (clear < _CLEAR) | (own < _OWN)] = 0.0
    order = np.argsort(-rank, axis=1, kind="stable")[:, :count]
    return [[vocabulary[w] for w in row if rank[m, w] > 0] for m, row in enumerate(order)]
