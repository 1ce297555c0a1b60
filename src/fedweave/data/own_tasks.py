"""The tasks of own data: how the answers of every label are called, decoded and scored.

A metric comes from ``evaluation.metrics``, else from ``tasks.yaml`` in the data folder, else from the answers
themselves. ``tasks.yaml`` holds one entry per task, a metric or more:

    sum: number
    letters: {metric: chrf, title: Letters to patients, max_new_tokens: 200}

Data must not run code, so a function of the user's own can be named in the config alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from os.path import expanduser  # of another machine's ~user it makes nothing, where Path raises
from pathlib import Path

from fedweave.config import Config, EvaluationConfig
from fedweave.data.examples import Example, Task
from fedweave.data.files import shown
from fedweave.errors import UserError, nearest
from fedweave.metrics.scores import find_metric
from fedweave.metrics.scripts import word_count
from fedweave.settings import build, read_yaml, setting

TASKS_FILE = "tasks.yaml"
# What a user writes, and what evaluation.scores calls it.
NAMES = {
    "exact": "exact",
    "label": "labels",
    "number": "number",
    "letter": "letter",
    "f1": "f1",
    "rouge": "rouge-unicode",
    "chrf": "chrf",
}
SHORT = 5  # words of a short answer
MOST_LABELS = 100


@dataclass(frozen=True)
class TaskSettings:
    metric: str = setting("auto", f"auto, {', '.join(NAMES)}.")
    title: str | None = setting(None, "As shown in tables.")
    max_new_tokens: int | None = setting(None, "Longest answer; evaluation.max_new_tokens when empty.", low=1)


def own_tasks(config: Config, examples: Sequence[Example]) -> tuple[dict[str, Task], list[str]]:
    """(tasks, notes) of examples that a user brought; the notes say how each task is scored, and why."""
    rows: dict[str, list[Example]] = {}
    for example in examples:
        rows.setdefault(example.task, []).append(example)
    folder = Path(expanduser(str(config.data.path))) if config.data.source == "jsonl" else None
    settings = read_task_settings(folder / TASKS_FILE) if folder else {}
    chosen = _chosen(config.evaluation)
    tasks, said, notes = {}, [], []
    for name in sorted(rows):
        own = settings.get(name, TaskSettings())
        metric = chosen.get(name, chosen.get("", own.metric))
        why = ""
        if metric == "auto":
            some = rows[name][:: 1 + len(rows[name]) // 1000]  # a thousand tell as much as a million
            metric, why = choose_metric([e.response for e in some])
        task = Task(
            name,
            own.title or name,
            NAMES.get(metric, metric),
            own.max_new_tokens or config.evaluation.max_new_tokens,
            _labels(name, rows[name]) if metric == "label" else (),
        )
        notes += _try(task, rows[name])
        tasks[name] = task
        said.append(f"{task.title} by {metric}{why and f' ({why})'}")
    for name in [*chosen, *settings]:
        if name and name not in tasks:
            notes.append(f"a metric is named for {shown(name)!r}, but no row has that task: {nearest(name, tasks)}")
    return tasks, [*([f"scores: {'; '.join(said)}; evaluation.metrics chooses others."] if said else []), *notes]


def choose_metric(answers: Sequence[str]) -> tuple[str, str]:
    """(metric, reason) for a task whose user chose none."""
    if all("####" in answer for answer in answers):
        return "number", "answers end in #### and a number"
    short = sum(word_count(answer) <= SHORT for answer in answers)
    return ("exact", "short answers") if short >= 0.9 * len(answers) else ("rouge", "longer answers")


def read_task_settings(path: Path) -> dict[str, TaskSettings]:
    """The entries of a tasks.yaml; none where there is no such file."""
    try:
        if not path.exists():
            return {}
        if not path.is_file():  # a pipe would wait for ever
            raise UserError(f"{path} is no file.")
        tree = read_yaml(path.read_text(encoding="utf-8-sig"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as UTF-8 text: {error}.") from None
    found = {}
    for name, entry in tree.items():
        own = entry if isinstance(entry, dict) else {"metric": entry}
        where = f"{path}: {shown(str(name))}"
        found[str(name)] = build(TaskSettings, own, f"{where}.", what="key")
        _check_name(found[str(name)].metric, where, code=False)
    return found


def _chosen(evaluation: EvaluationConfig) -> dict[str, str]:
    """{task: metric} of ``evaluation.metrics``; the empty name stands for all other tasks."""
    chosen = {}
    for item in evaluation.metrics:
        name, _, metric = item.rpartition("=")
        _check_name(metric, f"evaluation.metrics={item}", code=True)
        chosen[name] = metric
    return chosen


def _check_name(metric: str, where: str, code: bool) -> None:
    if ":" in metric and not code:
        raise UserError(
            f"{where}: {shown(metric)} is a Python function, and data does not run code; name it in "
            "evaluation.metrics."
        )
    if metric != "auto" and metric not in NAMES and ":" not in metric:
        own = ", module:function" if code else ""
        raise UserError(f"{where}: there is no metric {shown(metric)!r}; there are auto, {', '.join(NAMES)}{own}.")


def _labels(name: str, rows: Sequence[Example]) -> tuple[str, ...]:
    labels = sorted({e.response.strip() for e in rows})
    if len(labels) > MOST_LABELS:
        raise UserError(
            f"the task {name!r} has {len(labels)} different answers, too many for the metric label; use exact."
        )
    return tuple(labels)


def _try(task: Task, rows: Sequence[Example]) -> list[str]:
    """Score perfect answers before anything long runs: a metric that cannot be loaded stops here, one that cannot
    read some of the answers is remarked."""
    score = find_metric(task.metric, task.labels)
    tried = rows if task.metric in ("number", "letter") else rows[:1]  # the others read any text
    missed = [e.origin for e in tried if score(e.response, e.response) < 1]
    if not missed:
        return []
    return [
        f"{task.title}: {len(missed)} of {len(tried)} answers score below 1 even when they are perfect by the "
        f"metric {task.metric} (the first is {missed[0]})."
    ]
