"""The list of findings, and how a function gets onto it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps

from fedweave.runs.reading import RunRecord


@dataclass(frozen=True)
class Finding:
    """One remark; ``level`` is warning, note or good."""

    level: str
    title: str
    text: str


Check = Callable[[RunRecord], Finding | None]
FINDINGS: list[Check] = []


def finding(level: str, title: str) -> Callable[[Callable[[RunRecord], str | Finding | None]], Check]:
    """A function that gives a finding's text, or nothing, becomes one of the findings; it may also give another one
    in its place."""

    def enlist(said: Callable[[RunRecord], str | Finding | None]) -> Check:
        @wraps(said)
        def check(run: RunRecord) -> Finding | None:
            found = said(run)
            return Finding(level, title, found) if isinstance(found, str) else found

        FINDINGS.append(check)
        return check

    return enlist


def by_level(found: list[Finding]) -> list[Finding]:
    """Warnings first."""
    return sorted(found, key=lambda finding: ("warning", "note", "good").index(finding.level))
