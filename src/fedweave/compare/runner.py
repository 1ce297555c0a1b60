"""Runs grids, resumable cell by cell.

A finished cell is never run again, not even where several comparisons share it or only a record of it is left. An
interrupted one is resumed: a crash loses at most the round that was under way.
"""

import time
import traceback
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from fedweave.compare.grid import Cell
from fedweave.compare.life import with_life
from fedweave.compare.record import Record
from fedweave.console import Console
from fedweave.errors import UserError
from fedweave.federation.engines.distributed import world
from fedweave.federation.message import Message
from fedweave.runs.lock import Busy, locked
from fedweave.runs.run import resume, start
from fedweave.runs.workspace import Kept
from fedweave.schema import Summary

# a finished run's folder (None: it stands in the record alone) and summary (None: another process has it)
Known = tuple[Path | None, Summary | None]


@dataclass
class Outcome:
    finished: list[tuple[Cell, Summary]] = field(default_factory=list)
    folders: list[Path | None] = field(default_factory=list)  # of the finished; may be another grid's
    failed: list[Cell] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # of the failed, a sentence each
    left: list[Cell] = field(default_factory=list)  # not begun, because time was up
    taken: list[Cell] = field(default_factory=list)  # by other processes, which have not finished them


def faults(outcomes: Iterable[Outcome]) -> list[str]:
    """Why cells failed; a reason that many have, such as rows that are not there, is one sentence."""
    why: dict[str, list[Cell]] = {}
    for outcome in outcomes:
        for cell, failure in zip(outcome.failed, outcome.failures, strict=True):
            why.setdefault(failure, []).append(cell)
    return [
        f"{cells[0].title if len(cells) == 1 else f'{len(cells)} cells ({cells[0].title}; …)'}: {failure}"
        for failure, cells in why.items()
    ]


class Runner:
    """Runs the cells of several grids. All share one loaded backbone and one prepared data set, and a cell that
    stands in several grids runs once, one that stands in the record not at all. Every grid gets its first seed
    before any gets its second, so that there is something of each whenever it stops. After ``minutes`` no cell
    begins, nor one that would not end in time. Several processes may have the same grids: each takes cells that no
    other has."""

    def __init__(
        self,
        grids: dict[str, list[Cell]],
        console: Console,
        minutes: float | None = None,
        record: Record | None = None,
    ):
        self.grids, self.console, self.minutes, self.record = grids, console, minutes, record
        self._kept = Kept()
        everything = [cell for grid in grids.values() for cell in grid]
        self._known: dict[str, Known] = {c.identity: known for c in everything if (known := _here(c)) is not None}
        for cell in everything:  # once, before anything runs: the processes of one run must agree
            if record and cell.identity not in self._known and (found := record.find(cell)) is not None:
                self._known[cell.identity] = (None, found)
        self._started = time.monotonic()
        self._spent: list[float] = []  # seconds of every cell

    def run(self) -> dict[str, Outcome]:
        """What became of every grid, by its name."""
        grids = self.grids
        seeds = {name: list(dict.fromkeys(cell.config.seed for cell in grid)) for name, grid in grids.items()}
        turns = [(name, cell) for name, grid in grids.items() for cell in grid]
        turns.sort(key=lambda turn: seeds[turn[0]].index(turn[1].config.seed))  # all first seeds, all second …
        outcomes = {name: Outcome() for name in grids}
        waiting, before = list(enumerate(turns, start=1)), len(turns) + 1
        while len(waiting) < before:  # whoever has the others may give one up
            before, taken = len(waiting), []
            for number, (name, cell) in waiting:
                try:
                    self._turn(f"[{number}/{len(turns)}]", name, cell, outcomes[name])
                except Busy:
                    taken.append((number, (name, cell)))
            waiting = taken
        for _, (name, cell) in waiting:
            outcomes[name].taken.append(cell)
        return outcomes

    def _turn(self, place: str, name: str, cell: Cell, outcome: Outcome) -> None:
        known = self._known.get(cell.identity)
        if known is None and (known := _here(cell)) is not None:  # by another process, in the meantime
            self._known[cell.identity] = known
        if known is None and self._late():
            outcome.left.append(cell)
            return
        study = f"{name}: " if len(self.grids) > 1 else ""
        where = "" if known is None else " (finished before)" if known[0] else " (in the record)"
        self.console.say(f"{place} {study}{cell.title}{where}")
        folder, summary = known or self._tried(cell, outcome)
        if summary is None:
            return
        outcome.finished.append((cell, summary))
        outcome.folders.append(folder)
        processes = world()
        if self.record and folder and (processes is None or processes.rank == 0):
            self.record.add(cell, summary)  # at once: a machine that is lent may be gone at any time

    def _tried(self, cell: Cell, outcome: Outcome) -> Known:
        """A cell that was run here; what becomes of one that fails is said at the end."""
        try:
            return cell.folder, self._run(cell)
        except Busy:
            self.console.say("another process has it")
            raise
        except UserError as error:
            outcome.failures.append(str(error))
        except Exception:  # one broken cell must not cost the others
            note = cell.folder.parent / f"{cell.folder.name}.error"
            note.write_text(traceback.format_exc(), encoding="utf-8")
            outcome.failures.append(f"see {note}")
        outcome.failed.append(cell)
        return None, None

    def _late(self) -> bool:
        """Whether a cell as long as the longest so far would end too late. The first one also loads and compiles,
        so it counts only until there is a second. Where processes share a run, the first one's clock decides."""
        if self.minutes is None:
            return False
        spent = time.monotonic() - self._started
        late = spent + max(self._spent[1:] or self._spent, default=0.0) > 60 * self.minutes
        if (processes := world()) is None:
            return late
        return bool(processes.pass_on(0, Message(facts={"late": late})).facts["late"])

    def _run(self, cell: Cell) -> Summary | None:
        began, claim = time.monotonic(), cell.folder.with_name(f"{cell.folder.name}.claim")
        claim.mkdir(parents=True, exist_ok=True)
        with locked(claim) if world() is None else nullcontext():  # processes of one run share its cells' clients
            cell.settle()
            if (found := cell.finished) is not None:  # between the look and the lock
                summary: Summary | None = found
            elif (cell.folder / "config.yaml").is_file():
                summary = resume(cell.folder, [], self.console, self._kept)
            else:
                summary = start(cell.config, cell.folder, self.console, self._kept)
        self._spent.append(time.monotonic() - began)
        summary = summary and with_life(summary, cell)
        self._known[cell.identity] = (cell.folder, summary)
        return summary


def _here(cell: Cell) -> Known | None:
    """A cell that has finished on this machine."""
    cell.settle()
    found = cell.finished
    return None if found is None else (cell.folder, with_life(found, cell))
