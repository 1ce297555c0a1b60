"""The unit of data: a prompt, its answer, and, for building and auditing only, a task label."""

from dataclasses import dataclass, field

from fedweave.schema import Manifest

Message = dict[str, str]
Prompt = str | tuple[Message, ...]


@dataclass(frozen=True)
class Example:
    """One instruction. ``task`` builds the benchmark and audits it; no method ever sees it."""

    prompt: Prompt
    response: str
    task: str
    origin: str  # where the row came from, as in "gsm8k/train:17" or "site_a.jsonl:3"
    category: str = ""  # the kind of task, where several tasks are wordings of one kind
    content: str = ""  # the row's own words without the instruction, where they are known apart
    client: str = ""  # of a held-out row: whose rows it was kept back from

    @property
    def kind(self) -> str:
        """What clients differ in: the category, or the task where there is none."""
        return self.category or self.task

    @property
    def sameness(self) -> str:
        """Two rows of a task with the same one are one row, however it is asked and written."""
        words = self.content or (self.prompt if isinstance(self.prompt, str) else str(self.prompt))
        return " ".join(words.lower().split())


@dataclass(frozen=True)
class Task:
    """How answers of one kind are decoded and scored."""

    name: str
    title: str  # as shown in tables
    metric: str  # a key of metrics.scores.METRICS; own data: also "module:function"
    max_new_tokens: int
    labels: tuple[str, ...] = ()  # metric "labels": the answers that there are


@dataclass
class Course:
    """A client's rows over the rounds."""

    rows: list[Example]  # all that it ever has; those of the beginning first, then as they come
    here: dict[int, list[int]] = field(default_factory=dict)  # round of a change -> places of the rows from it on

    def last(self, t: int) -> int:
        """The round before which the last change up to round t (counted from 0) happened; 0: none so far."""
        return max(number for number in self.here if number <= t + 1)


@dataclass
class FederatedData:
    """Everything a run trains and tests on."""

    clients: dict[str, list[Example]]
    validation: list[Example]
    test: list[Example]
    tasks: dict[str, Task]
    unseen: list[Example] = field(default_factory=list)  # a second test set
    unseen_tasks: dict[str, Task] = field(default_factory=dict)  # those of it, which nobody trains on
    notes: list[str] = field(default_factory=list)  # remarks that belong beside every result
    courses: dict[str, Course] = field(default_factory=dict)  # clients whose rows change over the rounds
    manifest: Manifest = field(init=False, repr=False, compare=False)  # where all of it came from

    def sizes(self) -> dict[str, int]:
        return {name: len(rows) for name, rows in self.clients.items()}

    def after(self, rounds: int) -> dict[str, list[Example]]:
        """What every client has when a run of so many rounds ends."""
        late = {
            name: [course.rows[i] for i in course.here[course.last(rounds - 1)]]
            for name, course in self.courses.items()
        }
        return {**self.clients, **late}

    def kinds(self) -> list[str]:
        """What an upper bound is told of an example: one of these."""
        later = [course.rows for course in self.courses.values()]
        rows = [self.validation, self.test, *self.clients.values(), *later]
        return list(dict.fromkeys(e.kind for part in rows for e in part))
