"""``data.changes``: who gains and loses which rows, and before which round, as a pure function of the seed.

10: client_00, client_01 gain sum        from round 10 on two clients have sums, which nobody had before
10: all gain 30% of edit                 of a kind that everybody knows, as many rows come later
12: all lose mood                        a kind vanishes
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedweave.data.examples import Course, Example
from fedweave.errors import UserError, nearest
from fedweave.streams import stream_key

_CHANGE = re.compile(r"\s*(\d+)\s*:\s*(.+?)\s+(gain|lose)s?\s+(?:(\d+(?:\.\d+)?)\s*%\s+of\s+)?(\S.*?)\s*")
_EVERYBODY = "all"


@dataclass(frozen=True)
class Change:
    """One line of ``data.changes``."""

    text: str = field(compare=False)
    round: int  # before it; 1: from the beginning
    clients: tuple[str, ...]
    gain: bool
    kind: str  # a task, or a kind of several
    share: float  # of the kind's training rows, that come with this change

    def concerns(self, row: Example) -> bool:
        return self.kind in (row.task, row.kind)


def read_changes(texts: Sequence[str], clients: Sequence[str], kinds: Sequence[str]) -> list[Change]:
    """The lines of ``data.changes``, in the order of their rounds."""
    found = [_read(text, clients, kinds) for text in texts]
    for i, change in enumerate(found):
        if change in found[:i]:
            raise UserError(f"data.changes: {change.text!r} stands there twice; leave one of them out.")
    return sorted(found, key=lambda change: change.round)


def too_late(texts: Sequence[str], rounds: int) -> str:
    """What to tell of lines that a run of so many rounds never comes to; empty where there are none."""
    late = [text for text in texts if (match := _CHANGE.fullmatch(text)) and int(match[1]) > rounds]
    if not late:
        return ""
    return (
        f"data.changes: the run ends after round {rounds}, before {', '.join(map(repr, late))}; what would come "
        "then stays away."
    )


def _read(text: str, clients: Sequence[str], kinds: Sequence[str]) -> Change:
    found = _CHANGE.fullmatch(text)
    if found is None:
        raise UserError(
            f"data.changes: {text!r} is not of the form 'ROUND: CLIENTS gain KIND', as in '10: client_0, client_1 "
            "gain sum' or '12: all lose mood'."
        )
    number, who, verb, percent, kind = found.groups()
    names = tuple(dict.fromkeys(re.split(r"[,\s]+", who)))
    named = tuple(clients) if _EVERYBODY in names else names
    for name in named:
        if name not in clients:
            valid = [*clients, _EVERYBODY]
            raise UserError(f"data.changes: {text!r}: there is no client {name!r}; {nearest(name, valid)}")
    if kind not in kinds:
        raise UserError(f"data.changes: {text!r}: there is no kind {kind!r} in the data; {nearest(kind, kinds)}")
    share = float(percent or 100) / 100
    for broken, sentence in (
        (int(number) < 1, "rounds count from 1, which is how it begins"),
        (verb == "lose" and percent, f"a kind is lost as a whole; leave out '{percent}% of'"),
        (not 0 < share <= 1, "more than 0 and up to 100 % of a kind can be gained"),
    ):
        if broken:
            raise UserError(f"data.changes: {text!r}: {sentence}.")
    return Change(" ".join(text.split()), int(number), named, verb == "gain", kind, share)


def new_kinds(texts: Sequence[str], rounds: int) -> dict[str, int]:
    """Kinds that nobody has in the beginning, and the round before which they come, if that is one of these."""
    found = [match.groups() for text in texts if (match := _CHANGE.fullmatch(text))]
    gained = sorted((int(number), kind) for number, _, verb, share, kind in found if verb == "gain" and not share)
    return {kind: number for number, kind in reversed(gained) if number <= rounds}


def vanishing_kinds(texts: Sequence[str], rounds: int) -> set[str]:
    """Kinds that everybody loses in the course of these rounds."""
    found = [match.groups() for text in texts if (match := _CHANGE.fullmatch(text))]
    return {
        kind
        for number, who, verb, _, kind in found
        if (who, verb) == (_EVERYBODY, "lose") and int(number) <= rounds
    }


def hold_back(
    changes: Sequence[Change], rows: Sequence[Example], seed: int
) -> tuple[list[Example], dict[Change, list[Example]]]:
    """(training rows that are there from the beginning, those that come with each gain). Rows go to the earliest
    gain first; where several ask for all of a kind they share it evenly."""
    rest, later = list(rows), {}
    for kind in dict.fromkeys(change.kind for change in changes if change.gain):
        gains = [change for change in changes if change.gain and change.kind == kind]
        pool = [row for row in rest if gains[0].concerns(row)]
        order = np.random.default_rng(stream_key("changes", seed, kind)).permutation(len(pool))
        asked = sum(change.share for change in gains)
        if asked > 1 + 1e-9 and any(change.share < 1 for change in gains):
            raise UserError(
                f"data.changes: {gains[-1].text!r}: with it {asked:.0%} of the rows of {kind} are gained; lower a "
                "share, or leave all of them out, so that these lines share the kind evenly."
            )
        start = 0
        for change in gains:
            count = int(len(pool) * change.share / max(1.0, asked))
            if count < len(change.clients):
                raise UserError(
                    f"data.changes: {change.text!r} has {count} rows for {len(change.clients)} clients; raise "
                    "data.train or name fewer."
                )
            later[change] = [pool[i] for i in order[start : start + count]]
            start += count
        gone = {id(row) for change in gains for row in later[change]}
        rest = [row for row in rest if id(row) not in gone]
    return rest, later


def _lines_of(name: str, changes: Sequence[Change]) -> str:
    """The lines that can leave a client without rows in the beginning: kinds that come later, and early losses."""
    return ", ".join(
        repr(change.text) for change in changes if change.gain or (change.round == 1 and name in change.clients)
    )


def courses(
    clients: Mapping[str, list[Example]], changes: Sequence[Change], later: Mapping[Change, list[Example]]
) -> dict[str, Course]:
    """Every client's rows over the rounds. A gain is dealt out evenly among its clients. Everybody has some in the
    beginning: its buckets are found there."""
    found = {name: Course(list(rows), {0: list(range(len(rows)))}) for name, rows in clients.items()}
    for change in changes:
        before = sum(len(found[name].here[max(found[name].here)]) for name in change.clients)
        for place, name in enumerate(change.clients):
            course = found[name]
            here = course.here[max(course.here)]
            if change.gain:
                new = later[change][place :: len(change.clients)]
                here = [*here, *range(len(course.rows), len(course.rows) + len(new))]
                course.rows += new
            else:
                here = [i for i in here if not change.concerns(course.rows[i])]
            course.here[0 if change.round == 1 else change.round] = here
        if before == sum(len(found[name].here[max(found[name].here)]) for name in change.clients):
            raise UserError(
                f"data.changes: {change.text!r}: no client of these has rows of {change.kind} then; name "
                "others or another round, or leave the line out."
            )
    for name, course in found.items():
        if not course.here[0]:
            raise UserError(
                f"data.changes leave {name!r} without rows in the beginning "
                f"({_lines_of(name, changes)}); let it keep a kind, or raise data.train."
            )
    return found
