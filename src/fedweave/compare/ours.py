"""One method against every other one with the same data, seed by seed: by how much its losses lie above theirs.

Means over seeds hide whether a lead repeats, and seeds differ more from each other than methods do. So every seed's
own difference is shown, and the paired test of these differences, corrected for all tests of the table.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fedweave.compare.grid import Cell
from fedweave.compare.tables import Figure, Results, Row, holm, paired_p
from fedweave.schema import Summary

LOSSES = ("loss macro", "unseen-loss macro")


@dataclass(frozen=True)
class Lead:
    """What one row has against another in the same column, over the seeds that both have."""

    shares: dict[int, float]  # seed -> by which share its loss lies above the other's
    p: float | None  # of a paired t-test; None: fewer than two seeds
    score: float | None  # its score less the other's, in the mean

    @classmethod
    def of(cls, ours: dict[str, Figure], other: dict[str, Figure], column: str) -> "Lead":
        both = _common(ours[column], other[column])
        mine, theirs = ours[column].over(both), other[column].over(both)
        p = paired_p(mine, theirs) if len(both) > 1 else None
        points = column.replace("loss", "score")
        scored = _common(ours.get(points), other.get(points))
        score = np.mean(ours[points].over(scored)) - np.mean(other[points].over(scored)) if scored else None
        shares = {seed: a / b - 1 for seed, a, b in zip(both, mine, theirs, strict=True)}
        return cls(shares, p, None if score is None else float(score))


def ours_table(finished: Sequence[tuple[Cell, Summary]], ours: str | None) -> str:
    """Markdown: a row for every other method and set, on seen and on unseen tasks; nothing without ``ours``."""
    if ours is None or not finished:
        return ""
    results = Results.of(finished)
    leads = {
        (column, row, other): Lead.of(results.rows[row], results.rows[other], column)
        for column in LOSSES
        for row, other in _pairs(results, ours)
        if _common(results.rows[row].get(column), results.rows[other].get(column))
    }
    if not leads:
        return ""
    corrected = holm({key: x.p for key, x in leads.items() if x.p is not None and key[2] not in results.bounds})
    method = results.axes.index("method")
    others = [axis for axis in results.axes if axis != "method"]
    seeds = sorted({seed for lead in leads.values() for seed in lead.shares})
    head = [*others, f"{ours} against", *(f"seed {seed}" for seed in seeds), "mean", "p", "corrected", "score"]
    lines = [
        f"Loss of {ours} above that of every other method, seed by seed (paired t-tests, corrected by Holm for the "
        f"{len(corrected)} tests of this table; score: the mean difference in points of 100):",
        "",
        f"| {' | '.join(head)} |",
        "|" + "---|" * (len(others) + 1) + "---:|" * (len(seeds) + 4),
    ]
    for (column, row, other), lead in leads.items():
        place = [value for i, value in enumerate(row) if i != method]
        place[0:1] = [f"{place[0]}, unseen" if column.startswith("unseen") else place[0]] if place else []
        shares = [f"{lead.shares[seed]:+.1%}" if seed in lead.shares else "–" for seed in seeds]
        p = [f"{x:.3f}" if x is not None else "–" for x in (lead.p, corrected.get((column, row, other)))]
        score = "–" if lead.score is None else f"{100 * lead.score:+.1f}"
        name = other[method] + (" †" if other in results.bounds else "")
        mean = f"{np.mean(list(lead.shares.values())):+.1%}"
        lines.append(f"| {' | '.join([*place, name, *shares, mean, *p, score])} |")
    return "\n".join([*lines, "", *_one_expert(results, ours), ""])


def _pairs(results: Results, ours: str) -> Iterator[tuple[Row, Row]]:
    """Rows of our method, each with every row that differs from it in nothing but the method."""
    method = results.axes.index("method")
    for row in results.rows:
        if row[method] == ours:
            rest = row[:method] + row[method + 1 :]
            yield from (
                (row, other)
                for other in results.rows
                if other != row and other[:method] + other[method + 1 :] == rest
            )


def _common(one: Figure | None, other: Figure | None) -> list[int]:
    """Seeds that both have."""
    return [seed for seed in one.by_seed if seed in other.by_seed] if one and other else []


def _one_expert(results: Results, ours: str) -> list[str]:
    """What one active expert costs our method against the mixture of all, where both were measured."""
    method, told = results.axes.index("method"), []
    for row, figures in results.rows.items():
        if row[method] == ours and {"sparse-loss macro", "soft-loss macro"} <= set(figures):
            sparse, soft = figures["sparse-loss macro"], figures["soft-loss macro"]
            shares = [sparse.by_seed[seed] / soft.by_seed[seed] - 1 for seed in _common(sparse, soft)]
            place = ", ".join(value for i, value in enumerate(row) if i != method) or ours
            told.append(f"{place} {np.mean(shares):+.2%} (at most {max(shares):+.2%})")
    return [f"One active expert against the mixture of all: {'; '.join(told)}."] if told else []
