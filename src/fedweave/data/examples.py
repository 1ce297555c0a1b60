"""The unit of data: a prompt, its answer, and, for building and auditing only, a task label."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypedDict

Message = dict[str, str]
Prompt = str | tuple[Message, ...]


@dataclass(frozen=True)
class Example:
    """One instruction. ``task`` builds the benchmark and audits it; no method ever sees it."""

    prompt: Prompt
    response: str
    task: str
    origin: str  # where the row came from, as in "gsm8k/train:17" or "site_a.jsonl:3"


@dataclass(frozen=True)
class Task:
    """How answers of one kind are decoded and scored."""

    name: str
    title: str  # as shown in tables
    metric: str  # a key of evaluation.scores.METRICS
    max_new_tokens: int


class Manifest(TypedDict):
    """manifest.json: where every example came from, in order."""

    source: str
    seed: int
    notes: list[str]
    tasks: dict[str, str]  # name -> title
    clients: dict[str, list[str]]
    validation: list[str]
    test: list[str]


@dataclass
class FederatedData:
    """Everything a run trains and tests on."""

    clients: dict[str, list[Example]]
    validation: list[Example]
    test: list[Example]
    tasks: dict[str, Task]
    notes: list[str] = field(default_factory=list)  # remarks that belong beside every result
    manifest: Manifest = field(init=False, repr=False, compare=False)

    def sizes(self) -> dict[str, int]:
        return {name: len(rows) for name, rows in self.clients.items()}
