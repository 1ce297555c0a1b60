"""The second table of a comparison whose runs changed in mid-run: noticed when, opened how many, at what cost.

Losses are those of validation, round by round; ``course.json`` keeps them for a picture.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from fedweave.compare.grid import Cell
from fedweave.config import Config
from fedweave.data.changes import new_kinds, vanishing_kinds
from fedweave.runs.reading import read_run
from fedweave.schema import Life, Summary

# after how many rounds of training on a new kind its loss is told; as a mean over some, since one is chance in part
SOON = "loss, new kinds after 5 rounds", range(5, 6)
AROUND = "loss, new kinds after 3 to 7 rounds", range(3, 8)


class LifeCourse(Life):
    """One of course.json."""

    title: str
    seed: int


def with_life(summary: Summary, cell: Cell) -> Summary:
    """A run's summary with what its log says of its changes, where it had any; sites of Flower tell no kinds."""
    run = read_run(cell.folder) if cell.config.data.changes else None
    if run is None or not any("tasks" in event for event in run.validations):
        return summary
    came, stayed = kinds(cell.config, summary)
    losses = {str(event["round"]): event["tasks"] for event in run.validations if "tasks" in event}
    return {**summary, "life": {
        "came": came,
        "opened": [event["round"] for event in run.changes for _ in event["opened"]],
        "born": run.changes[-1]["born"] if run.changes else [],
        "new": {kind: {t: tasks[kind] for t, tasks in losses.items()} for kind in came},
        "old": {t: float(np.mean([tasks[kind] for kind in stayed])) for t, tasks in losses.items()},
    }}  # fmt: skip


def life_table(finished: Sequence[tuple[Cell, Summary]]) -> str:
    """Markdown, a row for every cell over its seeds; nothing where no run changed."""
    rows: dict[str, list[dict[str, float]]] = {}
    for cell, summary in finished:
        if "life" in summary:
            rows.setdefault(arm_of(cell), []).append(figures(cell, summary))
    names = list(dict.fromkeys(name for found in rows.values() for one in found for name in one))
    lines = [f"| what changed | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"] if rows else []
    lines += [f"| {title} | {' | '.join(_shown(found, name) for name in names)} |" for title, found in rows.items()]
    if untold := sum(bool(cell.config.data.changes) and "life" not in summary for cell, summary in finished):
        lines += ["", f"Of {untold} runs the record does not say what changed when: an older version wrote it."]
    return "\n".join([*lines, ""]) if lines else ""


def life_courses(finished: Sequence[tuple[Cell, Summary]]) -> list[LifeCourse]:
    """Every run's losses by round, of kinds that came and of those that were there and stayed."""
    return [
        {"title": arm_of(cell), "seed": cell.config.seed, **summary["life"]}
        for cell, summary in finished
        if "life" in summary
    ]


def arm_of(cell: Cell) -> str:
    """What a cell is, whatever its seed."""
    return ", ".join(str(value) for key, value in cell.values.items() if key != "seed")


def kinds(config: Config, summary: Summary) -> tuple[dict[str, int], list[str]]:
    """(kinds that came and before which round, kinds that were there and stayed)"""
    texts, rounds = config.data.changes, config.training.rounds
    ever = 10**9  # some may come or go later than the run ends: the control of one in which they do
    came, others = new_kinds(texts, rounds), {*new_kinds(texts, ever), *vanishing_kinds(texts, ever)}
    return came, [task for task in summary["tasks"] if task not in others]


def figures(cell: Cell, summary: Summary) -> dict[str, float]:
    """What became of a run's changes."""
    life, (came, stayed) = summary["life"], kinds(cell.config, summary)
    opened, new, old = life["opened"], life["new"], life["old"]
    last = max(old, key=int)
    late = noticed(came, opened)
    traffic = _traffic(summary)
    between = traffic.get("changes_up", 0) + traffic.get("changes_down", 0)
    found = {"experts opened": float(len(opened)), "of these for nothing": float(len(opened) - len(late))}
    notices = cell.config.living.notice != "off"
    if came and notices:
        found["new kinds without one"] = float(len(came) - len(late))
    if late:
        found["rounds until noticed, at most"] = float(max(late))
    for name, rounds in (SOON, AROUND):  # left out where a kind came too late for it
        reached = [(kind, str(r + n - 1)) for kind, r in came.items() for n in rounds]
        if reached and all(t in new[kind] for kind, t in reached):
            found[name] = float(np.mean([new[kind][t] for kind, t in reached]))
    if came:
        found["loss, new kinds"] = float(np.mean([new[kind][last] for kind in came]))
        best = summary["test"].get("best")
        if best and opened:  # of the experts that are there in the end
            born = np.array(life["born"]) > 0
            top1 = {kind: np.array(shares) for kind, shares in best["top1"].items() if len(shares) == len(born)}
            for name, those in (("new prompts to new experts", came), ("other prompts to new experts", stayed)):
                found[name] = float(np.mean([top1[kind][born].sum() for kind in those])) if top1 else np.nan
    found["loss, kinds that stayed"] = old[last]
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
