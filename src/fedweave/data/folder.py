"""A benchmark of one's own: a folder of tasks, each with an instruction and rows.

``tasks.jsonl`` has a row for every task: ``task`` (its name) and ``definition`` (the instruction), and where wanted
``category`` (tasks of one category are one kind in several wordings), ``role`` (``unseen`` is for testing alone),
``title``, ``metric``, ``max_new_tokens``, ``short`` and ``wordings``. Every other JSONL file holds rows: ``task``,
``input``, ``output``. Super-NaturalInstructions comes in this form.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from fedweave.data.examples import Example, Task
from fedweave.data.files import Row, read_rows
from fedweave.data.rows import RESERVED
from fedweave.data.tasks import WORDINGS, Pool, Request, choose, render
from fedweave.errors import UserError, nearest
from fedweave.metrics.scores import METRICS

ROLES = ("seen", "unseen")
FEW_ANSWERS = 20  # a task with no more different answers than that is a choice, not free text


@dataclass(frozen=True)
class Entry:
    task: Task  # its metric is empty until its answers have been seen, unless the row names one
    category: str
    unseen: bool
    definition: str
    short: str
    wordings: tuple[str, ...]


@dataclass
class TaskFolder:
    pools: dict[str, Pool]
    unseen: dict[str, Pool]
    tasks: dict[str, Task]


def load_task_folder(folder: Path, varied: bool, seed: int, max_new_tokens: int) -> TaskFolder:
    """Read the tasks and their rows; with ``varied`` every row has one of its task's wordings."""
    if not folder.is_dir():
        raise UserError(f"data.path={folder}: there is no such folder.")
    files = sorted(p for p in folder.iterdir() if p.name.endswith((".jsonl", ".jsonl.gz")) and p.name[0] != ".")
    listed = [p for p in files if p.name.split(".jsonl")[0] == "tasks"]
    if len(listed) != 1 or len(files) < 2:
        raise UserError(f"{folder} needs one tasks.jsonl and at least one more JSONL file with rows.")
    entries = _entries(listed[0], max_new_tokens)
    pools: dict[str, Pool] = {name: [] for name in entries}
    for path in files:
        if path not in listed:
            for number, row in read_rows(path):
                example = _example(row, entries, varied, seed, path, number)
                pools[example.task].append(example)
    for name, pool in pools.items():
        if not pool:
            raise UserError(f"{listed[0]}: task {name!r} has no row in {folder}; add some or remove the task.")
    tasks = {name: _with_metric(entry.task, pools[name]) for name, entry in entries.items()}
    seen = {name: pool for name, pool in pools.items() if not entries[name].unseen}
    return TaskFolder(seen, {name: pool for name, pool in pools.items() if name not in seen}, tasks)


def _entries(path: Path, max_new_tokens: int) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for number, row in read_rows(path):
        where = f"{path}:{number}"
        for key in ("task", "definition"):
            if not isinstance(row.get(key), str) or not row[key].strip():
                raise UserError(f"{where}: {key!r} must be a non-empty text; a task needs 'task' and 'definition'.")
        for key in ("category", "title", "short", "metric"):
            if not isinstance(row.get(key, ""), str):
                raise UserError(f"{where}: {key!r} must be a text, not {row[key]!r}.")
        if row.get("role", "seen") not in ROLES:
            raise UserError(f"{where}: 'role' must be seen or unseen, not {row['role']!r}.")
        if row["task"] in RESERVED:
            raise UserError(f"{where}: no task can be called {row['task']!r}, which is the name of the average.")
        if row["task"] in entries:
            raise UserError(f"{where}: task {row['task']!r} is listed twice.")
        wordings = row.get("wordings", list(WORDINGS))
        if not isinstance(wordings, list) or not wordings:
            raise UserError(f"{where}: 'wordings' must be a list of texts, the usual one first.")
        for template in wordings:
            if not isinstance(template, str) or "{text}" not in template:
                raise UserError(f"{where}: a wording must be a text with {{text}} in it, not {template!r}.")
        tokens = row.get("max_new_tokens", max_new_tokens)
        if not isinstance(tokens, int) or tokens < 1:
            raise UserError(f"{where}: 'max_new_tokens' must be a whole number of at least 1, not {tokens!r}.")
        metric = row.get("metric", "")
        if metric and metric not in METRICS:
            raise UserError(f"{where}: 'metric' {metric!r} is unknown: {nearest(metric, METRICS)}")
        task = Task(row["task"], row.get("title") or row["task"], metric, tokens)
        entries[row["task"]] = Entry(
            task,
            row.get("category", ""),
            row.get("role") == "unseen",
            row["definition"].strip(),
            row.get("short", ""),
            tuple(wordings),
        )
    if not any(not entry.unseen for entry in entries.values()):
        raise UserError(f"{path} has no task to train on; at least one must not be unseen.")
    return entries


def _example(row: Row, entries: dict[str, Entry], varied: bool, seed: int, path: Path, number: int) -> Example:
    for key in ("task", "input", "output"):
        if not isinstance(row.get(key), str) or not row[key].strip():
            raise UserError(f"{path}:{number}: {key!r} must be a non-empty text; a row has task, input and output.")
    if row["task"] not in entries:
        raise UserError(
            f"{path}:{number}: task {row['task']!r} is not in tasks.jsonl: {nearest(row['task'], entries)}"
        )
    entry, origin = entries[row["task"]], f"{path.name.split('.jsonl')[0]}:{number - 1}"
    request = Request(entry.definition, row["input"].strip(), entry.short)
    prompt = render(choose(entry.wordings, varied, seed, origin), request)
    return Example(prompt, row["output"].strip(), row["task"], origin, entry.category, request.text)


def _with_metric(task: Task, pool: Pool) -> Task:
    """A task that names no metric: one answer out of a few must be that one, free text is compared by words."""
    few = len({e.response for e in pool}) <= FEW_ANSWERS
    return replace(task, metric=task.metric or ("exact" if few else "rouge"))
