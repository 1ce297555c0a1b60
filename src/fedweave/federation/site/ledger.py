"""What a site has spent of its privacy, in a file of its own: no server can make it forget.

Every answer with noise is counted before it is made. A federation gets as many as its noise was solved for, on the
terms of its first question, and all federations together no more than the site's ``floors.epsilon``.
"""

from pathlib import Path
from typing import TypedDict

from fedweave.config import Config
from fedweave.federation.site.floors import Declined
from fedweave.json_files import read_json, write_json
from fedweave.privacy.budget import Budget


class Entry(TypedDict):
    """One federation."""

    epsilon: float  # agreed on
    terms: str  # what the noise follows from
    answers: dict[str, int]  # by question


class Ledger:
    """In ``path``, or in memory where a simulation plays the site."""

    def __init__(self, path: Path | None):
        self.path = path
        self.entries: dict[str, Entry] = {}

    def spend(self, federation: str, config: Config, step: str, most: float) -> None:
        """Count an answer to ``step``, or :class:`Declined`; ``most`` is ε of all federations."""
        if config.privacy.level == "none":
            return
        if self.path is not None and self.path.is_file():
            mend = "restore it: it says what this site has spent of its privacy"
            self.entries = read_json(self.path, dict[str, Entry], mend) or {}
        budget = Budget(config)
        entry = self.entries.get(federation)
        if entry is None:
            entry = Entry(epsilon=config.privacy.epsilon, terms=budget.terms(), answers={})
            if sum(other["epsilon"] for other in self.entries.values()) + entry["epsilon"] > most:
                raise Declined(f"this federation would spend more of its privacy than floors.epsilon={most:g}")
        if entry["terms"] != budget.terms():
            raise Declined("the federation has changed what its noise follows from; start a new one")
        if entry["answers"].get(step, 0) >= budget.limit(step):
            raise Declined(f"its privacy budget is spent: {step!r} was answered as often as was agreed")
        entry["answers"][step] = entry["answers"].get(step, 0) + 1
        self.entries[federation] = entry
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, self.entries)
