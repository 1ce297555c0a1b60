"""The second table of a comparison whose runs changed in mid-run: noticed when, opened how many, at what cost.

Losses are those of validation, round by round; ``course.json`` keeps them for a picture.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedweave.compare.grid import Cell
from fedweave.data.changes import new_kinds, vanishing_kinds
from fedweave.runs.reading import RunRecord, read_run
from fedweave.schema import LifeCourse, Summary

AFTER = 5  # rounds of training on a new kind, after which its loss is told


def life_table(finished: Sequence[tuple[Cell, Summary]], folders: Sequence[Path]) -> str:
    """Markdown, a row for every cell over its seeds; nothing where no run changed."""
    rows: dict[str, list[dict[str, float]]] = {}
    for (cell, summary), folder in zip(finished, folders, strict=True):
        if cell.config.data.changes:
            rows.setdefault(arm_of(cell), []).append(figures(read_run(folder), summary))
    if not rows:
        return ""
    names = list(dict.fromkeys(name for found in rows.values() for one in found for name in one))
    lines = [f"| what changed | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    lines += [f"| {title} | {' | '.join(_shown(found, name) for name in names)} |" for title, found in rows.items()]
    return "\n".join(lines) + "\n"


def life_courses(finished: Sequence[tuple[Cell, Summary]], folders: Sequence[Path]) -> list[LifeCourse]:
    """Every run's losses by round, of kinds that came and of those that were there and stayed."""
    found: list[LifeCourse] = []
    for (cell, _), folder in zip(finished, folders, strict=True):
        if cell.config.data.changes:
            run = read_run(folder)
            came, stayed = kinds(run)
            losses = {e["round"]: e.get("tasks", {}) for e in run.validations}
            found.append({
                "title": arm_of(cell), "seed": cell.config.seed, "came": came,
                "opened": [event["round"] for event in run.changes for _ in event["opened"]],
                "new": {kind: {t: tasks[kind] for t, tasks in losses.items()} for kind in came},
                "old": {t: float(np.mean([tasks[kind] for kind in stayed])) for t, tasks in losses.items()},
            })  # fmt: skip
    return found


def arm_of(cell: Cell) -> str:
    """What a cell is, whatever its seed."""
    return ", ".join(str(value) for key, value in cell.values.items() if key != "seed")


def kinds(run: RunRecord) -> tuple[dict[str, int], list[str]]:
    """(kinds that came and before which round, kinds that were there and stayed)"""
    texts, rounds = run.config.data.changes, run.config.training.rounds
    ever = 10**9  # some may come or go later than the run ends: the control of one in which they do
    came, others = new_kinds(texts, rounds), {*new_kinds(texts, ever), *vanishing_kinds(texts, ever)}
    return came, [task for task in run.tasks if task not in others]


def figures(run: RunRecord, summary: Summary) -> dict[str, float]:
    """What a run's log says of its changes."""
    came, stayed = kinds(run)
    losses = {event["round"]: event.get("tasks", {}) for event in run.validations}
    last = losses[max(losses)]
    opened = [event["round"] for event in run.changes for _ in event["opened"]]
    late = noticed(came, opened)
    traffic = _traffic(summary)
    between = traffic.get("changes_up", 0) + traffic.get("changes_down", 0)
    found = {"experts opened": float(len(opened)), "of these for nothing": float(len(opened) - len(late))}
    notices = run.config.living.notice != "off"
    if came and notices:
        found["new kinds without one"] = float(len(came) - len(late))
    if late:
        found["rounds until noticed, at most"] = float(max(late))
    soon = [losses[r + AFTER - 1][kind] for kind, r in came.items() if r + AFTER - 1 in losses]
    if soon:
        found[f"loss, new kinds after {AFTER} rounds"] = float(np.mean(soon))
    if came:
        found["loss, new kinds"] = float(np.mean([last[kind] for kind in came]))
        best = summary["test"].get("best")
        if best and opened:  # of the experts that are there in the end
            born = np.array(run.changes[-1]["born"]) > 0
            top1 = {kind: np.array(shares) for kind, shares in best["top1"].items() if len(shares) == len(born)}
            for name, those in (("new prompts to new experts", came), ("other prompts to new experts", stayed)):
                found[name] = float(np.mean([top1[kind][born].sum() for kind in those])) if top1 else np.nan
    found["loss, kinds that stayed"] = float(np.mean([last[kind] for kind in stayed]))
    found["MB in rounds"] = (traffic["rounds_up"] + traffic["rounds_down"]) / 1e6
    found["bytes between rounds"] = between / max(1, traffic["rounds_up"] + traffic["rounds_down"])
    return found


def _traffic(summary: Summary) -> Mapping[str, int]:
    traffic: Mapping[str, int] = summary["communication"]  # type: ignore[assignment]
    return traffic


def total_bytes(summary: Summary) -> float:
    """All that travelled, in both directions: before round 1, in rounds and between them."""
    when = ("before", "rounds", "changes")
    return float(sum(_traffic(summary).get(f"{name}_{way}", 0) for name in when for way in ("up", "down")))


def noticed(came: Mapping[str, int], opened: Sequence[int]) -> list[int]:
    """Rounds from a new kind's arrival until an expert opened, of every kind for which one did."""
    left, late = sorted(opened), []
    for start in sorted(came.values()):
        if first := [number for number in left if number >= start]:
            left.remove(first[0])
            late.append(first[0] - start)
    return late


def _shown(found: Sequence[dict[str, float]], name: str) -> str:
    values = [one[name] for one in found if name in one]
    if not values:
        return "–"
    mean = float(np.max(values) if name.endswith("at most") else np.mean(values))
    if name.startswith(("bytes", "new prompts", "other prompts")):
        return f"{mean:.1%}"
    return f"{mean:.3f}" if name.startswith("loss") else f"{mean:.4g}"
