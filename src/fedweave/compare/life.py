"""The second table of a comparison whose runs changed in mid-run: noticed when, opened how many, at what cost."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedweave.compare.grid import Cell
from fedweave.data.changes import new_kinds
from fedweave.runs.reading import RunRecord, read_run
from fedweave.schema import Summary


def life_table(finished: Sequence[tuple[Cell, Summary]], folders: Sequence[Path]) -> str:
    """Markdown, a row for every cell over its seeds; nothing where no run changed."""
    rows: dict[str, list[dict[str, float]]] = {}
    for (cell, summary), folder in zip(finished, folders, strict=True):
        if cell.config.data.changes:
            title = ", ".join(str(value) for key, value in cell.values.items() if key != "seed")
            rows.setdefault(title, []).append(figures(read_run(folder), summary))
    if not rows:
        return ""
    names = list(dict.fromkeys(name for found in rows.values() for one in found for name in one))
    lines = [f"| what changed | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    lines += [f"| {title} | {' | '.join(_shown(found, name) for name in names)} |" for title, found in rows.items()]
    return "\n".join(lines) + "\n"


def figures(run: RunRecord, summary: Summary) -> dict[str, float]:
    """What a run's log says of its changes. Losses are the last round's, of kinds that came and of all others."""
    came, last = new_kinds(run.config.data.changes), run.validations[-1].get("tasks", {})
    tasks = {name: loss for name, loss in last.items() if name != "macro"}
    opened = sorted(event["round"] for event in run.changes for _ in event["opened"])
    traffic: Mapping[str, int] = summary["communication"]  # type: ignore[assignment]
    between = traffic.get("changes_up", 0) + traffic.get("changes_down", 0)
    found = {"experts opened": float(len(opened)), "of these for nothing": float(max(0, len(opened) - len(came)))}
    if opened and came:
        late = [min((r - start for r in opened if r >= start), default=np.nan) for start in came.values()]
        found["rounds until noticed"] = float(np.mean(late))
    if new := [loss for name, loss in tasks.items() if name in came]:
        found["loss, new kinds"] = float(np.mean(new))
    found["loss, other kinds"] = float(np.mean([loss for name, loss in tasks.items() if name not in came]))
    found["bytes between rounds"] = between / max(1, traffic["rounds_up"] + traffic["rounds_down"])
    return found


def _shown(found: Sequence[dict[str, float]], name: str) -> str:
    values = [one[name] for one in found if name in one]
    if not values:
        return "–"
    mean = float(np.mean(values))
    if name.startswith("bytes"):
        return f"{mean:.1%}"
    return f"{mean:.3f}" if name.startswith("loss") else f"{mean:g}"
