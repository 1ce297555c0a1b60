"""Tables of a comparison: mean ± standard deviation over seeds, best bold, second underlined, paired tests."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import ttest_rel

from fedweave.compare.grid import Cell

Row = tuple[str, ...]  # the values of all axes but the seed
_AGREEMENT = ("purity", "nmi", "ari")  # of buckets (local) and experts (global) with task labels


@dataclass
class Figure:
    """One quantity of one row over seeds."""

    values: list[float]

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
    seeds: dict[Row, list[Any]]
    parameters: dict[Row, int]
    notes: list[str]

    @classmethod
    def of(cls, finished: Sequence[tuple[Cell, dict[str, Any]]]) -> Results:
        axes = [key for key in finished[0][0].values if key != "seed"]
        values: dict[Row, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        seeds: dict[Row, list[Any]] = defaultdict(list)
        parameters, columns, notes = {}, [], []
        for cell, summary in finished:
            row = tuple(str(cell.values[a]) for a in axes)
            seeds[row].append(cell.values.get("seed", summary["seed"]))
            everything = sum(summary["parameters"].values())  # older runs did not tell frozen ones apart
            parameters[row] = summary.get("trained_parameters", everything)
            for column, value in _figures(summary).items():
                values[row][column].append(value)
                if column not in columns:
                    columns.append(column)
            notes += [note for note in summary["notes"] if note not in notes]
        rows = {row: {c: Figure(v) for c, v in named.items()} for row, named in values.items()}
        return cls(axes, columns, finished[0][1]["tasks"], rows, dict(seeds), parameters, notes)

    def ranks(self, column: str) -> dict[Row, int]:
        """0 for the best row of a column, 1 for the second, and so on; rows that look equal share their rank."""
        sign = 1 if not column.startswith(("score", *_AGREEMENT)) else -1
        shown = {row: sign * round(f[column].mean, 4) for row, f in self.rows.items() if column in f}
        order = sorted(set(shown.values()))
        return {row: order.index(shown[row]) for row in sorted(shown, key=lambda row: shown[row])}

    def paired(self, column: str) -> dict[Row, float]:
        """p of a two-sided paired t-test of the best row against every other, over common seeds."""
        ranks = self.ranks(column)
        best = min(ranks, key=lambda row: ranks[row])
        out = {}
        for row in ranks:
            common = [s for s in self.seeds[best] if s in self.seeds[row]]
            if row != best and len(common) > 1:
                a, b = ([self.rows[r][column].values[self.seeds[r].index(s)] for s in common] for r in (best, row))
                out[row] = float(ttest_rel(a, b).pvalue)
        return out

    def title(self, column: str) -> str:
        kind, _, task = column.partition(" ")
        return f"{kind} {self.titles.get(task, task)}"


def _figures(summary: dict[str, Any]) -> dict[str, float]:
    """The columns of one run's best round: scores and losses of the method's own routing, both extremes, purity."""
    best = summary["test"]["best"]
    tasks = ["macro", *summary["tasks"]]
    figures: dict[str, float] = {}
    if "score" in best:
        figures |= {f"score {t}": best["score"][t] for t in tasks}
    figures |= {f"loss {t}": best["loss"][best["used"]][t] for t in tasks}
    figures |= {f"{routing}-loss macro": best["loss"][routing]["macro"] for routing in best["loss"]}
    for routing, measured in best.get("routings", {}).items():
        figures[f"score-{routing} macro"] = measured["score"]["macro"]
        figures[f"ms-{routing} per prompt"] = measured["ms_per_prompt"]
    if summary.get("audit"):
        audit = summary["audit"]
        figures |= {f"{k} {level}": audit[level][k] for level in ("local", "global") for k in _AGREEMENT}
    figures["validation loss"] = summary["validation"]["best_loss"]
    return figures


def choose_best(
    finished: Sequence[tuple[Cell, dict[str, Any]]], key: str
) -> tuple[list[tuple[Cell, dict[str, Any]]], list[str]]:
    """Give every row its best value of ``key``, by mean validation loss over seeds; test data plays no part."""
    losses: dict[Row, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def row_of(cell: Cell) -> Row:
        return tuple(str(v) for k, v in cell.values.items() if k not in ("seed", key))

    for cell, summary in finished:
        losses[row_of(cell)][str(cell.values[key])].append(summary["validation"]["best_loss"])
    best = {row: min(tried, key=lambda v: float(np.mean(tried[v]))) for row, tried in losses.items()}
    lines = [
        f"{', '.join(row) or 'all'}: "
        + ", ".join(
            f"{key}={v} → {np.mean(x):.4f}{' (chosen)' if v == best[row] else ''}" for v, x in tried.items()
        )
        for row, tried in losses.items()
    ]
    return [(c, s) for c, s in finished if str(c.values[key]) == best[row_of(c)]], lines


def markdown(results: Results) -> str:
    """Two tables, scores and losses, and what a reader must know beside them."""
    parts = []
    for title, starts in (
        ("Scores ↑", ("score",)),
        ("Losses ↓", ("loss", "sparse-loss", "soft-loss", "validation", "ms")),
        ("Buckets and experts against task labels ↑", _AGREEMENT),
    ):
        columns = [c for c in results.columns if c.startswith(starts)]
        if columns:
            parts.append(f"**{title}**\n\n" + _markdown_table(results, columns))
    for column in ("loss macro", "score macro"):
        if column in results.columns and (tests := results.paired(column)):
            listed = ", ".join(f"{' '.join(row)} p = {p:.3f}" for row, p in tests.items())
            parts.append(f"Paired t-test over seeds of the best against each, {results.title(column)}: {listed}.")
    parts += [f"Note: {note}" for note in results.notes]
    return "\n\n".join(parts) + "\n"


def _markdown_table(results: Results, columns: list[str]) -> str:
    ranks = {c: results.ranks(c) for c in columns}
    header = [*results.axes, "seeds", "trained parameters", *(results.title(c) for c in columns)]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row, figures in results.rows.items():
        cells = [*row, str(len(results.seeds[row])), f"{results.parameters[row] / 1e6:.2f}M"]
        for c in columns:
            cells.append(_decorate(figures.get(c), ranks[c].get(row), "**{}**", "<u>{}</u>", " ± "))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def latex(results: Results) -> str:
    """The paper's Table 1 layout: a booktabs tabular of all score and loss columns."""
    columns = [c for c in results.columns if c.startswith(("score", "loss"))]
    ranks = {c: results.ranks(c) for c in columns}
    header = " & ".join([*results.axes, *(results.title(c) for c in columns)])
    lines = [rf"\begin{{tabular}}{{{'l' * len(results.axes)}{'c' * len(columns)}}}", r"\toprule", header + r" \\",
             r"\midrule"]  # fmt: skip
    for row, figures in results.rows.items():
        cells = [
            _decorate(
                figures.get(c), ranks[c].get(row), r"\textbf{{{}}}", r"\underline{{{}}}", r"{\scriptsize$\pm$}"
            )
            for c in columns
        ]
        lines.append(" & ".join([*(r.replace("_", r"\_") for r in row), *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _decorate(figure: Figure | None, rank: int | None, bold: str, underline: str, plus_minus: str) -> str:
    if figure is None:
        return "–"
    text = f"{figure.mean:.4f}"
    text = bold.format(text) if rank == 0 else underline.format(text) if rank == 1 else text
    return text if len(figure.values) < 2 else f"{text}{plus_minus}{figure.deviation:.4f}"


def as_csv(results: Results) -> str:
    """One line per row and column."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow([*results.axes, "quantity", "mean", "standard deviation", "seeds"])
    for row, figures in results.rows.items():
        for column, figure in figures.items():
            writer.writerow([*row, results.title(column), figure.mean, figure.deviation, len(figure.values)])
    return out.getvalue()
