"""What a chapter of the page is made of."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedweave.report.enlist import Finding
from fedweave.report.style import Picture


@dataclass
class Table:
    header: list[str]
    rows: list[list[str]]
    best: int | None = None  # the row to stress
    prose: bool = False  # sentences, not figures


@dataclass
class Section:
    """One chapter. ``missing`` says what could stand here, and what to do to get it."""

    key: str
    title: str
    intro: str = ""
    findings: list[Finding] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    experts: list[dict[str, object]] = field(default_factory=list)  # an Expert each, in words
    folded: list[dict[str, str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    small: bool = False  # three pictures in a row

    def show(self, *pictures: Picture | None) -> Section:
        self.pictures += [picture for picture in pictures if picture is not None]
        return self

    def lacks(self, condition: bool, sentence: str) -> None:
        if condition:
            self.missing.append(sentence)

    @property
    def empty(self) -> bool:
        return not (self.findings or self.tables or self.pictures or self.experts or self.folded or self.missing)
