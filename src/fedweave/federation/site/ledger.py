"""What a site has answered and spent of its privacy, in a file of its own: no server can make it forget.

Every answer is counted before it is made. All federations together get no more than ``floors.rounds`` to any one
question. With noise a federation gets as many as that was solved for, on the terms of its first question, and all
together no more than ``floors.epsilon``.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import numpy as np

from fedweave.config import Config
from fedweave.federation.site.floors import Declined
from fedweave.federation.site.settings import Floors
from fedweave.json_files import read_json, write_json
from fedweave.privacy.budget import Budget


class Entry(TypedDict):
    """One federation."""

    epsilon: float  # agreed on; 0 where there is no noise
    terms: str  # what the noise follows from
    answers: dict[str, int]  # by question


class Sums:
    """The rows of every plain sum that a site has told, in ``path`` or in memory. Sums that differ by one row tell
    its feature, and many that differ by a dozen each can be solved for the feature of every row. So in no
    combination of all that was told may a row count for more than one of ``fewest`` rows does in their sum; one
    that stands there several times is one row, which counts for as many."""

    fewest = 5  # rows that tell little of each other

    def __init__(self, path: Path | None):
        self.path = path
        self.told: list[list[str]] = []

    def tell(self, rows: Sequence[bytes], sums: Sequence[slice]) -> None:
        """Remember sums over these parts of the rows, or :class:`Declined` where all that were told would then tell
        of too few of them."""
        mend = "restore it: it says of which rows this site has told sums"
        if self.path is not None and (known := read_json(self.path, dict[str, list[list[str]]], mend)) is not None:
            self.told = known["rows"]
        names = [hashlib.sha256(row).hexdigest()[:16] for row in rows]
        told = self.told + [own for part in sums if (own := sorted(names[part])) and own not in self.told]
        if told and largest_part(told) > 1 / self.fewest + 1e-9:
            raise Declined(f"this sum and earlier ones together would tell of fewer than {self.fewest} rows")
        self.told = told
        if self.path is not None and told:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, {"rows": self.told})


def largest_part(sums: Sequence[Sequence[str]]) -> float:
    """The most that one row counts for in any combination of these sums of rows, in squares: its leverage,
    max over w of (w·a)² / |w·A|², where A [sums, rows] says how often who is in which, and a is
    the row's column."""
    counts = [Counter(name.partition(".")[0] for name in own) for own in sums]  # earlier versions numbered the same
    place = {name: i for i, name in enumerate(dict.fromkeys(name for own in counts for name in own))}
    members = np.zeros((len(sums), len(place)))
    for row, own in zip(members, counts, strict=True):
        row[[place[name] for name in own]] = list(own.values())
    inverse = np.linalg.pinv(members @ members.T, rcond=1e-9, hermitian=True)
    return float(((inverse @ members) * members).sum(0).max())


class Ledger:
    """In ``path``, or in memory where a simulation plays the site."""

    def __init__(self, path: Path | None):
        self.path = path
        self.entries: dict[str, Entry] = {}

    def spend(self, federation: str, config: Config, step: str, floors: Floors) -> None:
        """Count an answer to ``step``, or :class:`Declined`."""
        if self.path is not None and self.path.is_file():
            mend = "restore it: it says what this site has spent of its privacy"
            self.entries = read_json(self.path, dict[str, Entry], mend) or {}
        private, budget = config.privacy.level != "none", Budget(config)
        epsilon, terms = (config.privacy.epsilon, budget.terms()) if private else (0.0, "")
        entry = self.entries.get(federation)
        if entry is None:
            entry = Entry(epsilon=epsilon, terms=terms, answers={})
            if sum(other["epsilon"] for other in self.entries.values()) + epsilon > floors.epsilon:
                raise Declined(
                    f"this federation would spend more of its privacy than floors.epsilon={floors.epsilon:g}"
                )
        if entry["terms"] != terms:
            raise Declined("the federation has changed what its noise follows from; start a new one")
        if private and entry["answers"].get(step, 0) >= budget.limit(step):
            raise Declined(f"its privacy budget is spent: {step!r} was answered as often as was agreed")
        if sum(one["answers"].get(step, 0) for one in self.entries.values()) >= floors.rounds:
            raise Declined(f"this site answers {step!r} {floors.rounds} times at most (floors.rounds)")
        entry["answers"][step] = entry["answers"].get(step, 0) + 1
        self.entries[federation] = entry
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, self.entries)
