"""Tables of a comparison: mean ± standard deviation over seeds, best bold, second underlined, paired tests."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from scipy.stats import ttest_rel

from fedweave.compare.grid import Cell
from fedweave.methods import METHODS, method_class
from fedweave.runs.text import FEW_TASKS
from fedweave.schema import Summary

Row = tuple[str, ...]  # the values of all axes but the seed
Finished = Sequence[tuple[Cell, Summary]]
Test = TypeVar("Test")  # what a test is known by
# of buckets (local) and experts (global) with tasks, and with kinds where several tasks are one; of prompts
_AGREEMENT = ("purity", "nmi", "ari", "kind-", "decided")


@dataclass
class Figure:
    """One quantity of one row over seeds."""

    by_seed: dict[int, float]

    @property
    def values(self) -> list[float]:
        return list(self.by_seed.values())

    def over(self, seeds: Sequence[int]) -> list[float]:
        return [self.by_seed[seed] for seed in seeds if seed in self.by_seed]

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @property
    def deviation(self) -> float:
        """Sample standard deviation; of one seed there is none."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else float("nan")


@dataclass
class Results:
    """A comparison's figures, by row and column."""

    axes: list[str]  # without the seed
    columns: list[str]  # "score macro", "loss gsm8k", …
    titles: dict[str, str]  # task -> title
    rows: dict[Row, dict[str, Figure]]
    seeds: dict[Row, list[int]]
    parameters: dict[Row, list[int]]  # trained, by seed: a method may find another number of experts in each
    bounds: set[Row]  # told the kinds, or given all data: bounds that no method competes with
    notes: list[str]

    @classmethod
    def of(cls, finished: Finished) -> Results:
        axes = [key for key in finished[0][0].values if key != "seed"]
        values: dict[Row, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
        seeds: dict[Row, list[int]] = defaultdict(list)
        parameters: dict[Row, list[int]] = defaultdict(list)
        bounds, columns, notes = set(), [], []
        for cell, summary in finished:
            row = tuple(str(cell.values[a]) for a in axes)
            seed = summary["seed"]
            seeds[row].append(seed)
            parameters[row].append(summary["trained_parameters"])
            kind = method_class(summary["method"]) if summary["method"] in METHODS else None
            if kind is not None and (kind.uses_labels or kind.gathers):
                bounds.add(row)
            for column, value in _figures(summary).items():
                values[row][column][seed] = value
                if column not in columns:
                    columns.append(column)
            notes += [note for note in summary["notes"] if note not in notes]
        rows = {row: {c: Figure(v) for c, v in named.items()} for row, named in values.items()}
        titles = {task: title for _, summary in finished for task, title in summary["tasks"].items()}
        return cls(axes, columns, titles, rows, dict(seeds), dict(parameters), bounds, notes)

    @property
    def shown(self) -> list[str]:
        """The columns of a table; of many tasks it has the mean alone, and results.csv all."""
        return [c for c in self.columns if len(self.titles) <= FEW_TASKS or c.partition(" ")[2] not in self.titles]

    @property
    def common(self) -> list[int]:
        """Seeds that all competing rows have: a mean over other seeds is a mean over other data."""
        competing = [seeds for row, seeds in self.seeds.items() if row not in self.bounds]
        return [s for s in competing[0] if all(s in seeds for seeds in competing)] if competing else []

    def ranks(self, column: str) -> dict[Row, int]:
        """0 for the best row of a column, 1 for the second, and so on, judged by common seeds where there are any;
        rows that look equal share their rank. Upper bounds have none, nor has anyone where nobody is behind."""
        sign = 1 if not column.startswith(("score", "unseen-score", *_AGREEMENT)) else -1
        shown = {
            row: sign * round(float(np.mean(figures[column].over(self.common) or figures[column].values)), 4)
            for row, figures in self.rows.items()
            if column in figures and row not in self.bounds
        }
        order = sorted(set(shown.values()))
        if len(order) < 2:
            return {}
        return {row: order.index(shown[row]) for row in sorted(shown, key=lambda row: shown[row])}

    def paired(self, column: str) -> dict[Row, float]:
        """p of a two-sided paired t-test of the best row against every other, over the seeds that both have."""
        order, out = list(self.ranks(column)), {}
        for row in order[1:]:
            best, other = (self.rows[r][column] for r in (order[0], row))
            both = [seed for seed in best.by_seed if seed in other.by_seed]
            if len(both) > 1:
                out[row] = paired_p(best.over(both), other.over(both))
        return out

    def caveats(self) -> list[str]:
        """What a reader of the table must know about its rows."""
        said = []
        if self.bounds:
            said.append("A bound is told labels or has all data in one place; it is marked †, and not ranked.")
        others = {seed for row, seeds in self.seeds.items() if row not in self.bounds for seed in seeds}
        if others and any(set(self.seeds[row]) != others for row in self.bounds):
            said.append("A bound has other seeds than the rest: its mean is one over other data.")
        if len({tuple(sorted(map(str, s))) for row, s in self.seeds.items() if row not in self.bounds}) > 1:
            seeds = ", ".join(map(str, self.common))
            judged = f"by the seeds that all have ({seeds})" if seeds else "by their means"
            said.append(f"Rows have different seeds so far: best and second are judged {judged}.")
        return said

    def title(self, column: str) -> str:
        kind, _, task = column.partition(" ")
        return f"{kind} {self.titles.get(task, task)}"


def _figures(summary: Summary) -> dict[str, float]:
    """The columns of one run's best round: scores and losses of the method's own routing, both extremes, purity."""
    figures: dict[str, float] = {}
    if best := summary["test"].get("best"):
        tasks = ["macro", *summary["tasks"]]
        if "score" in best:
            figures |= {f"score {t}": best["score"][t] for t in tasks}
        figures |= {f"loss {t}": best["loss"][best["used"]][t] for t in tasks}
        figures |= {f"{routing}-loss macro": best["loss"][routing]["macro"] for routing in best["loss"]}
        for routing, measured in best.get("routings", {}).items():
            figures[f"score-{routing} macro"] = measured["score"]["macro"]
            figures[f"ms-{routing} per prompt"] = measured["ms_per_prompt"]
    if unseen := summary["test"].get("unseen"):
        if "score" in unseen:
            figures["unseen-score macro"] = unseen["score"]["macro"]
        figures["unseen-loss macro"] = unseen["loss"][unseen["used"]]["macro"]
    for prefix, audit in (("", summary["audit"]), ("kind-", summary.get("kind_audit"))):
        for level, found in (("local", audit["local"]), ("global", audit["global"])) if audit else ():
            figures |= {f"{prefix}{name} {level}": x for name, x in found.items() if isinstance(x, float)}
    if best and (decided := best.get("decided")):
        figures |= {"decided mean": float(np.mean(list(decided.values()))), "decided least": min(decided.values())}
    figures["validation loss"] = summary["validation"]["best_loss"]
    return figures


def choose_best(
    finished: Finished, key: str, over: str | None = None
) -> tuple[list[tuple[Cell, Summary]], list[str]]:
    """Give every row its best value of ``key``, by mean validation loss over seeds; test data plays no part. With
    ``over`` it is one value for all values of that axis, data sets say, by the geometric mean: a set whose losses
    are large counts no more than others."""
    # by value, seed and set
    losses: dict[Row, dict[str, dict[Row, float]]] = defaultdict(lambda: defaultdict(dict))

    def row_of(cell: Cell) -> Row:
        return tuple(str(v) for k, v in cell.values.items() if k not in ("seed", key, over))

    for cell, summary in finished:
        measured = summary["validation"]["best_loss"]
        place = (str(summary["seed"]), str(cell.values.get(over or "")))
        losses[row_of(cell)][str(cell.values[key])][place] = float(np.log(measured)) if over else measured
    means = {
        row: {v: _mean_of_common(x, list(tried.values())) for v, x in tried.items()}
        for row, tried in losses.items()
    }
    best = {row: min(tried, key=lambda v: tried[v]) for row, tried in means.items()}
    if over:
        means = {row: {v: float(np.exp(mean)) for v, mean in tried.items()} for row, tried in means.items()}
    lines = [
        f"{', '.join(row) or 'all'}: "
        + ", ".join(f"{key}={v} → {mean:.4f}{' (chosen)' if v == best[row] else ''}" for v, mean in tried.items())
        + ("; at the edge of what was tried" if _at_the_edge(best[row], tried) else "")
        for row, tried in means.items()
    ]
    return [(c, s) for c, s in finished if str(c.values[key]) == best[row_of(c)]], lines


def _mean_of_common(own: dict[Row, float], all_of_them: Sequence[dict[Row, float]]) -> float:
    """Mean over the places (seed and set) that all have, or over its own where they share none."""
    return float(
        np.mean([x for place, x in own.items() if all(place in o for o in all_of_them)] or list(own.values()))
    )


def _at_the_edge(best: str, tried: Iterable[str]) -> bool:
    """Whether a number is the lowest or the highest of those tried: the true best may lie beyond."""
    try:
        values = [float(value) for value in tried]
    except ValueError:
        return False
    return len(values) > 1 and float(best) in (min(values), max(values))


def markdown(results: Results) -> str:
    """Two tables, scores and losses, and what a reader must know beside them."""
    parts = []
    for title, starts in (
        ("Scores ↑", ("score", "unseen-score")),
        ("Losses ↓", ("loss", "sparse-loss", "soft-loss", "unseen-loss", "validation", "ms")),
        ("Buckets, experts and routing against labels ↑", _AGREEMENT),
    ):
        columns = [c for c in results.shown if c.startswith(starts)]
        if columns:
            parts.append(f"**{title}**\n\n" + _markdown_table(results, columns))
    for column in ("loss macro", "score macro", "unseen-loss macro", "unseen-score macro"):
        if column in results.columns and (tests := results.paired(column)):
            corrected, many = holm(tests), len(tests) > 1
            listed = ", ".join(
                f"{' '.join(row)}: {p:.3f}" + (f" ({corrected[row]:.3f})" if many else "")
                for row, p in tests.items()
            )
            what = f"p (after Holm's correction for {len(tests)} tests)" if many else "p"
            parts.append(f"Paired t-test of the best against each, {results.title(column)}, {what}: {listed}.")
    parts += [f"Note: {note}" for note in [*results.caveats(), *results.notes]]
    return "\n\n".join(parts) + "\n"


def paired_p(one: Sequence[float], other: Sequence[float]) -> float:
    """p of a two-sided paired t-test; 1 where no pair differs, of which the test itself knows nothing."""
    return 1.0 if list(one) == list(other) else float(ttest_rel(one, other).pvalue)


def holm(tests: dict[Test, float]) -> dict[Test, float]:
    """p of each test as one of so many: Holm's step-down correction of a family of tests."""
    corrected: dict[Test, float] = {}
    largest = 0.0
    for place, (row, p) in enumerate(sorted(tests.items(), key=lambda test: test[1])):
        largest = max(largest, min(1.0, p * (len(tests) - place)))
        corrected[row] = largest
    return corrected


def _markdown_table(results: Results, columns: list[str]) -> str:
    header = [*results.axes, "seeds", "trained parameters", *(results.title(c) for c in columns)]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row, shown in _cells(results, columns, "**{}**", "<u>{}</u>", " ± ").items():
        cells = [*row, str(len(results.seeds[row])), _millions(results.parameters[row]), *shown]
        cells[0] += " †" if row in results.bounds else ""
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _millions(counts: Sequence[int]) -> str:
    """2.14M, or 1.51M to 3.03M where seeds differ."""
    return " to ".join(dict.fromkeys(f"{count / 1e6:.2f}M" for count in (min(counts), max(counts))))


def latex(results: Results) -> str:
    """The paper's Table 1 layout: a booktabs tabular of all score and loss columns."""
    columns = [c for c in results.shown if c.startswith(("score", "loss", "unseen"))]
    header = " & ".join([*results.axes, *(results.title(c) for c in columns)])
    lines = [rf"\begin{{tabular}}{{{'l' * len(results.axes)}{'c' * len(columns)}}}", r"\toprule", header + r" \\",
             r"\midrule"]  # fmt: skip
    shown = _cells(results, columns, r"\textbf{{{}}}", r"\underline{{{}}}", r"{\scriptsize$\pm$}")
    for row, cells in shown.items():
        names = [r.replace("_", r"\_") for r in row]
        names[-1:] = [f"{names[-1]}$^\\dagger$"] if row in results.bounds else names[-1:]
        lines.append(" & ".join([*names, *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _cells(results: Results, columns: list[str], *style: str) -> dict[Row, list[str]]:
    """Every row's figures, the best and the second best of a column marked."""
    best, second, plus_minus = style
    ranks = {c: results.ranks(c) for c in columns}

    def shown(row: Row, column: str) -> str:
        figure = results.rows[row].get(column)
        if figure is None:
            return "–"
        text = {0: best, 1: second}.get(ranks[column].get(row, 2), "{}").format(f"{figure.mean:.4f}")
        return text if len(figure.values) < 2 else f"{text}{plus_minus}{figure.deviation:.4f}"

    return {row: [shown(row, c) for c in columns] for row in results.rows}


def as_csv(results: Results) -> str:
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow([*results.axes, "quantity", "mean", "standard deviation", "seeds"])
    for row, figures in results.rows.items():
        for column, figure in figures.items():
            writer.writerow([*row, results.title(column), figure.mean, figure.deviation, len(figure.values)])
    return out.getvalue()
