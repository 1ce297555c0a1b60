"""progress.json: where a run stands right now, for `fedweave watch` and a report that refreshes itself.

It holds clock times, which no two runs share, so it is kept apart from everything that resuming compares. A run
that cannot write it goes on without it.
"""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from fedweave.console import Console
from fedweave.files import write_if_possible
from fedweave.json_files import Damaged, parse
from fedweave.runs.lock import alive
from fedweave.schema import LiveState, Phase

NAME = "progress.json"
_PAUSE = 1.0  # seconds between two writes


@contextmanager
def followed(folder: Path, rounds: int, console: Console) -> Iterator[None]:
    """Whoever watches a run sees that it goes on, long before its first round: models load, sites are waited for.
    Afterwards the process may do other things, and their phases are not the run's."""
    live = LiveProgress(folder, rounds)
    live.begin()
    console.on_progress = live.phase
    try:
        yield
    finally:
        console.on_progress = lambda label, done, total: None
        live.leave()


class LiveProgress:
    """The writer's side: one small file, replaced at most once a second."""

    def __init__(self, folder: Path, rounds: int):
        self.path = folder / NAME
        self.rounds = rounds
        earlier = read_live(folder)
        self.round_seconds: list[float] = earlier["round_seconds"] if earlier else []  # of a run that is resumed
        self._phase: Phase = {}
        self._written = 0.0
        self._round_began = time.monotonic()

    def begin(self) -> None:
        self._write("running")

    def begin_rounds(self, completed: int) -> None:
        """Training starts, or goes on after ``completed`` rounds; their times are remembered."""
        self.round_seconds = self.round_seconds[:completed]
        self._round_began = time.monotonic()
        self._write("running")

    def phase(self, label: str, done: int, total: int) -> None:
        self._phase = {"label": label, "done": done, "total": total}
        if time.monotonic() - self._written > _PAUSE:
            self._write("running")

    def round_done(self) -> None:
        now = time.monotonic()
        self.round_seconds.append(round(now - self._round_began, 3))
        self._round_began = now
        self._write("running")

    def finish(self) -> None:
        self._write("finished")

    def leave(self) -> None:
        """Nobody works on the run any more, whether or not it has finished."""
        if (last := read_live(self.path.parent)) is not None and last["state"] == "running":
            self.round_seconds = last["round_seconds"]
            self._write("stopped")

    def _write(self, state: Literal["running", "finished", "stopped"]) -> None:
        self._written = time.monotonic()
        content: LiveState = {
            "state": state,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "updated": time.time(),
            "phase": self._phase,
            "rounds": self.rounds,
            "round_seconds": self.round_seconds,
        }
        write_if_possible(self.path, json.dumps(content))  # a full disk will be reported by what matters


def read_live(folder: Path) -> LiveState | None:
    """The reader's side: None when there is none. A process that is gone turns "running" into "stopped"."""
    try:
        content = parse((folder / NAME).read_bytes(), LiveState)
    except (OSError, Damaged):
        return None
    if content["state"] == "running" and not alive({"pid": content["pid"], "host": content["host"]}):
        content["state"] = "stopped"
    return content
