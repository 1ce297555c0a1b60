"""What a person sees: bars on a terminal, plain lines elsewhere, small text tables everywhere."""

from __future__ import annotations

import re
import sys
import time
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TextIO

from tqdm import tqdm


class ProgressBar:
    """One long phase. On a terminal a bar; in a file or a pipe a line at most every few seconds."""

    def __init__(self, label: str, total: int, unit: str, console: Console, transient: bool = False):
        self.label, self.total, self.unit, self.console = label, total, unit, console
        self.stream = stream = console.stream
        self.transient = transient  # a phase within a phase leaves no closing line
        self.done, self.note = 0, ""
        self.start = self.last = time.monotonic()
        live = stream is not None and stream.isatty()
        self.bar = tqdm(total=total, desc=label, unit=f" {unit}", leave=False, file=stream) if live else None
        console.on_progress(label, 0, total)

    def advance(self, count: int = 1, note: str = "") -> None:
        self.done += count
        self.note = note or self.note
        self.console.on_progress(self.label, self.done, self.total)
        if self.bar is not None:
            self.bar.set_postfix_str(printable(self.note), refresh=False)
            self.bar.update(count)
        elif time.monotonic() - self.last > 5 and self.done < self.total:
            self._line()

    def close(self) -> None:
        self.console.spent[self.label.rstrip(" 0123456789")] += time.monotonic() - self.start
        if self.bar is not None:
            self.bar.close()
        if not self.transient:
            self._line()

    def _line(self) -> None:
        self.last = time.monotonic()
        if self.stream is not None:
            text = f"  {self.label}: {self.done}/{self.total} {self.unit}, {self.last - self.start:.1f} s"
            print(printable(f"{text}, {self.note}" if self.note else text), file=self.stream, flush=True)


class Console:
    """Messages go to one stream, so that standard output stays free for results."""

    def __init__(self, quiet: bool = False, stream: TextIO | None = None):
        self.stream = None if quiet else stream or sys.stderr
        self.spent: dict[str, float] = defaultdict(float)  # seconds of every finished phase, by label
        self.on_progress: Callable[[str, int, int], None] = lambda label, done, total: None

    def say(self, text: str = "") -> None:
        if self.stream is not None:
            print(printable(text), file=self.stream, flush=True)

    def warn(self, text: str) -> None:
        self.say(f"warning: {text}")

    def progress(self, label: str, total: int, unit: str, transient: bool = False) -> ProgressBar:
        return ProgressBar(label, total, unit, self, transient)


_STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Text of others, such as names of sites, with whatever would steer a terminal written out instead."""
    return _STEERS.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def show(text: str) -> None:
    """A result on standard output: into a file or a pipe as it is, on a terminal with nothing that steers it."""
    print(printable(text) if sys.stdout.isatty() else text)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned first column, right-aligned figures."""
    cells = [list(header), *[list(row) for row in rows]]
    widths = [max(columns_of(row[i]) for row in cells) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        blanks = [" " * (width - columns_of(cell)) for cell, width in zip(row, widths, strict=True)]
        rest = [blank + cell for cell, blank in zip(row[1:], blanks[1:], strict=True)]
        return "  " + "  ".join([row[0] + blanks[0], *rest]).rstrip()

    return "\n".join([line(cells[0]), "  " + "-" * (sum(widths) + 2 * len(widths) - 2), *map(line, cells[1:])])


def columns_of(text: str) -> int:
    """How many columns of a terminal a text takes: two for a Chinese character, none for a combining mark."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(unicodedata.combining(character) > 0 for character in text)


def shade(weight: float) -> str:
    """A share between 0 and 1 as a figure and a block whose darkness repeats it."""
    return f"{weight:.2f} {' ░▒▓█'[min(4, int(weight * 5))]}"


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
