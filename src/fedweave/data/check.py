"""Everything that is wrong with own data at once, and what a person wants to know before a long run.

The rows go through the run's own reader, with a complaint box in place of the first error; so whatever a check
finds, a run refuses, and what it does not find, a run takes.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

import numpy as np

from fedweave.config import Config
from fedweave.data.examples import Example, FederatedData
from fedweave.data.files import shown
from fedweave.data.own import HELD_OUT, Gathered, divide, gather
from fedweave.data.remarks import Asked, Key, overlap, row_key
from fedweave.errors import UserError
from fedweave.metrics.scripts import scripts


@dataclass(frozen=True)
class Length:
    """How long a row is, and what becomes of it in a run."""

    prompt: int
    answer: int
    cut: int = 0  # of the prompt's beginning
    fault: str = ""  # why a run refuses the row
    too_long: bool = False  # its answer leaves no room; data.long_answers=skip drops such rows instead


class Reader(Protocol):
    unit: str

    def lengths(self, rows: Sequence[Example]) -> list[Length]: ...

    def show(self, row: Example) -> str: ...


class Characters:
    """Without a model, rows are as long as their texts, and nothing is known to be cut."""

    unit = "characters"

    def lengths(self, rows: Sequence[Example]) -> list[Length]:
        return [Length(sum(map(len, _texts(row)[:-1])), len(row.response)) for row in rows]

    def show(self, row: Example) -> str:
        turns = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
        return "\n".join(f"[{m['role']}] {m['content']}" for m in turns) + f"\n[assistant] {row.response}"


@dataclass
class ClientCheck:
    """One client, or a set that is held out for everyone."""

    rows: int
    train: int
    prompt: dict[str, int]  # median and max
    answer: dict[str, int]
    cut: int
    tasks: dict[str, int]
    scripts: dict[str, float]  # share of the letters


@dataclass
class Check:
    """What came out; ``faults`` is empty when a run would take the data."""

    data: str
    unit: str
    faults: list[dict[str, str]] = field(default_factory=list)  # where and what
    remarks: list[str] = field(default_factory=list)
    count: int = 0  # of clients
    clients: dict[str, ClientCheck] = field(default_factory=dict)
    held: dict[str, ClientCheck] = field(default_factory=dict)
    sets: dict[str, int] = field(default_factory=dict)  # rows in train, validation and test
    metrics: dict[str, str] = field(default_factory=dict)  # by task
    duplicates: int = 0
    overlap: dict[str, list[tuple[str, str]]] = field(default_factory=dict)  # held-out row, the same in train
    example: dict[str, str] = field(default_factory=dict)

    @property
    def passes(self) -> bool:
        return not self.faults

    def remark(self, count: int, what: str) -> None:
        """What some rows have in common, if there are any."""
        self.remarks += [f"{count} {what}"] if count else []

    def as_dict(self) -> dict[str, object]:
        return {"passes": self.passes, **asdict(self)}


def check_own(config: Config, reader: Reader) -> Check:
    """Read, divide and measure own data as a run would; nothing raises."""
    check = Check(shown(str(config.data.path)), reader.unit)

    def complain(fault: str) -> None:
        check.faults.append(_fault(fault, check.data))

    gathered, data = Gathered(), None
    try:
        gathered = gather(config.data, complain)
        data = divide(config, gathered, complain)
    except UserError as error:
        complain(str(error))
    _measure(check, config, gathered, data, reader)
    check.count = len(gathered.clients)
    if data is not None:
        check.count = len(data.clients)
        check.remarks += data.notes
        held = {"validation": data.validation, "test": data.test}
        check.sets = {"train": sum(data.sizes().values()), **{name: len(rows) for name, rows in held.items()}}
        check.metrics = {name: task.metric for name, task in data.tasks.items()}
        for name, rows in held.items():
            check.overlap[name] = [(e.origin, same.origin) for e, same in overlap(data.clients, rows)]
    _repeated(check, gathered)
    _small(check, config, gathered)
    return check


def _fault(message: str, folder: str) -> dict[str, str]:
    """A sentence taken apart into where and what, for sorting; the folder goes without saying."""
    found = re.match(r"(.*?:\d+):? (.*)", message, re.DOTALL)
    where, what = found.groups() if found else ("", message)
    return {"where": where.removeprefix(folder).lstrip("/"), "what": what}


def _measure(check: Check, config: Config, gathered: Gathered, data: FederatedData | None, reader: Reader) -> None:
    """Lengths, scripts and tasks of every client, and what a model will not take whole."""
    groups: Mapping[str, list[Example]] = gathered.clients or {"rows to deal out": gathered.pool}
    cut = dropped = unreached = 0
    limits = {name: task.max_new_tokens for name, task in data.tasks.items()} if data else {}
    for name, rows in [*groups.items(), *gathered.held.items()]:
        if not rows:
            continue
        lengths = reader.lengths(rows)
        drop = config.data.long_answers == "skip"
        refused = [x.fault for x in lengths if x.fault and not (drop and x.too_long)]
        check.faults += [_fault(message, check.data) for message in refused]
        one = ClientCheck(
            rows=len(rows),
            train=len(data.clients.get(name, [])) if data else 0,
            prompt=_spread([length.prompt for length in lengths]),
            answer=_spread([length.answer for length in lengths]),
            cut=sum(length.cut > 0 for length in lengths),
            tasks=dict(Counter(row.task for row in rows).most_common()),
            scripts=_scripts(rows),
        )
        (check.held if name in HELD_OUT and name in gathered.held else check.clients)[name] = one
        if not check.example:
            check.example = {"origin": rows[0].origin, "text": reader.show(rows[0])}
        cut, dropped = cut + one.cut, dropped + sum(drop and x.too_long for x in lengths)
        if reader.unit == "tokens":
            unreached += sum(
                x.answer > limits.get(row.task, x.answer) for x, row in zip(lengths, rows, strict=True)
            )
    total = sum(map(len, [*groups.values(), *gathered.held.values()]))
    check.remark(
        cut,
        f"of {total} prompts are longer than backbone.max_length={config.backbone.max_length} allows and lose "
        "their beginning.",
    )
    check.remark(dropped, f"of {total} rows are dropped, since their answers leave no room for a prompt.")
    check.remark(
        unreached,
        f"of {total} answers are longer than the {config.evaluation.max_new_tokens} tokens that a test generates, "
        "so not even a perfect model scores 1; raise evaluation.max_new_tokens.",
    )


def _repeated(check: Check, gathered: Gathered) -> None:
    """Rows that stand more than once, questions with several answers, chats of which only the end is learned."""
    rows = [row for group in [*gathered.clients.values(), gathered.pool] for row in group]
    first: dict[Key, Example] = {}
    answers: dict[Asked, set[str]] = {}
    chats, example = 0, ""
    for row in rows:
        key = row_key(row)
        same = first.setdefault(key, row)
        if same is not row:
            check.duplicates += 1
            example = example or f"{row.origin} is {same.origin}"
        answers.setdefault(key[0], set()).add(key[1])
        chats += not isinstance(row.prompt, str) and any(m["role"] == "assistant" for m in row.prompt)
    check.remark(check.duplicates, f"of {len(rows)} rows repeat another one ({example}).")
    check.remark(sum(len(found) > 1 for found in answers.values()), "prompts have several different answers.")
    check.remark(chats, "chats have several answers, of which the last is learned and the others are read.")


def _small(check: Check, config: Config, gathered: Gathered) -> None:
    """Clients that keep nothing back, and such as are too small for buckets."""
    missing = [k for k in HELD_OUT if k not in gathered.held]
    none = [name for name, rows in gathered.clients.items() if int(config.data.holdout * len(rows)) == 0]
    if missing and none:
        check.remarks.append(
            f"{_some(none)} too few rows to keep one back for {' or '.join(missing)} at "
            f"data.holdout={config.data.holdout:g}."
        )
    tiny = [name for name, rows in gathered.clients.items() if len(rows) < 3]
    if tiny:
        check.remarks.append(f"{_some(tiny)} fewer than three rows, which make one bucket.")


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"{shown} {'has' if len(names) == 1 else 'have'}"


def _scripts(rows: Sequence[Example]) -> dict[str, float]:
    some = rows[:: 1 + len(rows) // 1000]  # a thousand tell as much as a million
    return {name: round(share, 4) for name, share in scripts(text for row in some for text in _texts(row)).items()}


def _spread(lengths: Sequence[int]) -> dict[str, int]:
    return {"median": int(np.median(lengths)), "max": int(max(lengths))}


def _texts(row: Example) -> list[str]:
    """All that a row says, the answer last."""
    prompt = [row.prompt] if isinstance(row.prompt, str) else [m["content"] for m in row.prompt]
    return [*prompt, row.response]
