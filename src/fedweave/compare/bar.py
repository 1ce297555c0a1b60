"""The bar of the drift study, seed by seed: what FedWeave that notices must reach, and whether it does.

Each line is a figure of one arm or against another arm of the same seed, and a limit that was set before the study
was run. A line whose arms have not finished says so.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedweave.compare.grid import Cell
from fedweave.compare.life import AROUND, SOON, arm_of, figures, total_bytes
from fedweave.schema import Summary

NOTICES = "drift, fedweave, open"  # the arm that the bar is about; the others are what it is held against
UNAWARE, TOLD = "drift, fedweave, off", "drift, oracle, off"
CONTROL, STILL = "control, fedweave, open", "still, fedweave, open"

Arms = Mapping[str, Mapping[str, float]]  # arm -> its figures, of one seed


def _late(arms: Arms) -> float:
    """Rounds until the last new kind was noticed; never, where one was not."""
    ours = arms[NOTICES]
    return math.inf if ours["new kinds without one"] else ours["rounds until noticed, at most"]


def _above(name: str, other: str) -> Callable[[Arms], float]:
    """By which share our figure lies above another arm's."""
    return lambda arms: arms[NOTICES][name] / arms[other][name] - 1


@dataclass(frozen=True)
class Line:
    """One demand: a figure, and the most that it may be."""

    title: str
    most: float
    figure: Callable[[Arms], float]
    shown: Callable[[float], str]


def _count(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:.3g}"


def _share(value: float) -> str:
    return f"{value:+.2%}"


BAR = (
    Line("rounds until a new kind was noticed", 2, _late, _count),
    Line("experts opened in the control", 0, lambda arms: arms[CONTROL]["experts opened"], _count),
    Line("loss on new kinds after 5 rounds, above the oracle's", 0.02, _above(SOON[0], TOLD), _share),
    Line("the same, mean of 3 to 7 rounds", 0.02, _above(AROUND[0], TOLD), _share),
    Line(
        "loss on kinds that stayed, above a run without drift", 0.005, _above("loss, kinds that stayed", STILL),
        _share,
    ),
    Line("bytes in all, above a run without drift", 0.1, _above("bytes", STILL), _share),
    Line("bytes in all, above going on without noticing", 0.1, _above("bytes", UNAWARE), _share),
)  # fmt: skip


def bar_table(finished: Sequence[tuple[Cell, Summary]]) -> str:
    """Markdown, a row for every demand and a column for every seed; nothing where no arm notices drift."""
    seeds: dict[int, dict[str, dict[str, float]]] = {}
    for cell, summary in finished:
        if "life" in summary:
            found = {**figures(cell, summary), "bytes": total_bytes(summary)}
            seeds.setdefault(cell.config.seed, {})[arm_of(cell)] = found
    seeds = {seed: arms for seed, arms in sorted(seeds.items()) if NOTICES in arms}
    if not seeds:
        return ""
    lines = [
        f"| the bar | at most | {' | '.join(f'seed {seed}' for seed in seeds)} | mean | met |",
        f"|---|---:|{'---:|' * (len(seeds) + 1)}---|",
    ]
    return "\n".join([*lines, *(row_of(line, list(seeds.values())) for line in BAR)]) + "\n"


def row_of(line: Line, seeds: Sequence[Arms]) -> str:
    """One demand, a figure for every seed, and whether all are within the limit."""
    values = [_figure(line, arms) for arms in seeds]
    known = [value for value in values if value is not None]
    mean = float(np.mean(known)) if known else math.nan
    cells = ["–" if value is None else line.shown(value) for value in values]
    return (
        f"| {' | '.join([line.title, line.shown(line.most), *cells, line.shown(mean), _verdict(line, values)])} |"
    )


def _figure(line: Line, arms: Arms) -> float | None:
    """None where an arm is missing, or too short for the figure."""
    try:
        return line.figure(arms)
    except KeyError:
        return None


def _verdict(line: Line, values: Sequence[float | None]) -> str:
    """Yes where every seed is within the limit."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return "not measured in every seed"
    within = sum(value <= line.most for value in known)
    return "yes" if within == len(known) else f"**no**, in {within} of {len(known)} seeds"
