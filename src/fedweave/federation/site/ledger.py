"""What a site has answered and spent of its privacy, in a file of its own: no server can make it forget.

Every answer is counted before it is made. All federations together get no more than ``floors.rounds`` to any one
question. With noise a federation gets as many as that was solved for, on the terms of its first question, and all
together no more than ``floors.epsilon``.
"""

from pathlib import Path
from typing import TypedDict

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
