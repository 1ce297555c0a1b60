"""How pictures look: one palette that colour-blind readers can tell apart, one set of marks, two themes.

A picture is drawn once, in its light colours. Inside the page every one of these colours becomes a CSS variable, so
that the same drawing follows the reader's light or dark setting; the PNG and SVG files keep the light ones.
"""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

import numpy as np

from fedweave.console import columns_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID, SURFACE = "#1f2328", "#656d76", "#d8dee4", "#fffffe"
# Okabe and Ito's colours without yellow and black, then grey
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7e")
HEAT, ON_HEAT = "#0072b1", "#fffffd"  # cells of a table and figures on the strongest: each theme has its own
LONGEST_NAME = 24  # columns of a row's name
_TIP = "tip: "  # an artist with such an id says the rest of it when the pointer rests on it
_PART = "\u2063"  # invisible; what follows says whose the artist is, for the page's chooser
Dashes = str | tuple[float, tuple[float, ...]]
LINES: tuple[Dashes, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

_VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
    SURFACE: "--surface",
    HEAT: "--heat",
    ON_HEAT: "--on-heat",
    **{colour: f"--c{i}" for i, colour in enumerate(PALETTE)},
}
# For letters that matplotlib's own font lacks, in the files; a page is drawn with the reader's fonts.
_FONTS = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "WenQuanYi Zen Hei", "PingFang SC", "Hiragino Sans",
    "Microsoft YaHei", "Arial Unicode MS", "Noto Sans Arabic", "Noto Sans Devanagari", "Noto Sans",
)  # fmt: skip


def tip(text: str, client: str | None = None, expert: int | None = None) -> str:
    """The id of an artist that says ``text`` when the pointer rests on it, and that fades while the reader looks at
    another client or expert than its own."""
    parts = {"client": client, "expert": expert}
    said = [text, *(f"{key}={value}" for key, value in parts.items() if value is not None)]
    return _TIP + _PART.join(one.replace(_PART, "") for one in said)


def _tipped(found: re.Match[str]) -> str:
    """The SVG group of such an artist."""
    text, *parts = found[2].replace('"', "&quot;").split(_PART)
    owned = "".join(' data-{}="{}"'.format(*part.split("=", 1)) for part in parts)
    return f'<g class="tip"{owned}>' + (f"<title>{text}</title>" if text else "")


def colour(index: int) -> str:
    return PALETTE[index % len(PALETTE)]


class LineStyle(TypedDict):
    color: str
    linestyle: Dashes


def line_style(index: int) -> LineStyle:
    """Colour first; when colours run out, dashes."""
    return {"color": colour(index), "linestyle": LINES[(index // len(PALETTE)) % len(LINES)]}


@dataclass
class Picture:
    """A drawing with the words around it."""

    name: str  # of its files
    title: str
    caption: str
    figure: Figure
    wide: bool = False  # takes a whole row of the page

    @cached_property
    def _drawing(self) -> str:
        """The SVG in light colours; drawn once, laid out once."""
        _spell_out(self.figure)
        with _settings(self.name):
            out = io.StringIO()
            self.figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
            self.figure.set_layout_engine("none")
        text = out.getvalue()
        text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
        text = re.sub(rf"<g id=([\"']){_TIP}(.*?)\1>", _tipped, text)
        # names that clash with no other picture's on the page
        text = re.sub(r'\bid="([^"]+)"', rf'id="{self.name}-\1"', text)
        return re.sub(r'(href="#|url\(#)', rf"\g<1>{self.name}-", text)

    def svg(self) -> str:
        """The drawing for the inside of a page: scalable, and every colour of ours a variable of the page."""
        text = self._drawing
        for plain, variable in _VARIABLES.items():
            text = text.replace(plain, f"var({variable})")
        head, rest = text.split(">", 1)
        head = re.sub(r' (width|height)="[^"]*"', "", head)
        width = self.figure.get_size_inches()[0]
        return f'{head} role="img" aria-label="{escape(self.title)}" style="--width:{96 * width:.0f}px">{rest}'

    def save(self, folder: Path) -> None:
        """PNG and SVG files in light colours."""
        from matplotlib.font_manager import fontManager
        from matplotlib.text import Text

        (folder / f"{self.name}.svg").write_text(self._drawing, encoding="utf-8")
        installed = fontManager.get_font_names()
        for text in self.figure.findobj(Text):
            text.set_fontfamily(["DejaVu Sans", *(name for name in _FONTS if name in installed)])
        with _settings(self.name):
            self.figure.savefig(folder / f"{self.name}.png", facecolor="white", dpi=160)


def _spell_out(figure: Figure) -> None:
    """Dollars are dollars: names of clients, kinds and runs are no formulas."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)


@contextmanager
def _settings(salt: str) -> Iterator[None]:
    import matplotlib

    settings = {"svg.fonttype": "none", "svg.hashsalt": salt, "font.family": "sans-serif"}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*missing from font")  # no font of this machine has it
        yield


def canvas(width: float = 5.4, height: float = 3.5) -> tuple[Figure, Axes]:
    """A drawing without a window system, in our colours."""
    figure, (ax,) = stacked(width, height, [1.0])
    return figure, ax


def stacked(width: float, height: float, heights: Sequence[float]) -> tuple[Figure, Sequence[Axes]]:
    """Drawings above each other with one horizontal axis; ``heights`` are their shares."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(len(heights), 1, height_ratios=heights, sharex=True, squeeze=False)[:, 0]
    for ax in axes:
        plain_axes(ax)
    return figure, list(axes)


def plain_axes(ax: Axes) -> None:
    """Left and bottom lines only, quiet ticks, a faint grid behind."""
    ax.set_facecolor("none")
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GRID)
    ax.tick_params(colors=MUTED, labelcolor=INK, labelsize=9, length=3)
    ax.xaxis.label.set(color=MUTED, size=9.5)
    ax.yaxis.label.set(color=MUTED, size=9.5)
    ax.title.set(color=INK, size=10)
    ax.grid(True, color=GRID, linewidth=0.7)
    ax.set_axisbelow(True)


def bare_axes(ax: Axes) -> None:
    """Nothing but what is drawn."""
    plain_axes(ax)
    ax.grid(False)
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.tick_params(length=0)


def legend(ax: Axes) -> None:
    """Names above the plot, in as many columns as there is room for. They hide nothing: the figure grows by what
    they take beyond two lines, and a name that is too long is wrapped. More names than colours and dashes can tell
    apart are left out."""
    handles, labels = ax.get_legend_handles_labels()
    if not handles or len(labels) > len(PALETTE) * len(LINES):
        return
    figure = cast("Figure", ax.figure)
    grid = ax.get_gridspec()
    width, height = figure.get_size_inches()
    room = width / (grid.ncols if grid else 1) - 0.7  # inches, without the axis on the left
    labels = [textwrap.fill(label, int((room - 0.4) / 0.07)) for label in labels]
    longest = max(columns_of(line) for label in labels for line in label.split("\n"))
    columns = min(len(labels), max(1, int(room / (0.4 + 0.07 * longest))))
    lines = -(-sum(label.count("\n") + 1 for label in labels) // columns)
    figure.set_size_inches(width, height + 0.17 * max(0, lines - 2))
    ax.legend(
        handles, labels, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, frameon=False, fontsize=9,
        labelcolor=INK, handlelength=1.4, columnspacing=1.2, borderaxespad=0.2,
    )  # fmt: skip


def band(
    ax: Axes,
    curve: dict[int, list[float]],
    label: str,
    color: str,
    linestyle: Dashes = "-",
    linewidth: float = 1.9,
) -> None:
    """Mean over seeds as a line, one standard deviation as a shade; a single seed is a line alone."""
    if not curve:
        return
    x = list(curve)
    means = np.array([np.mean(v) for v in curve.values()])
    spread = np.array([np.std(v, ddof=1) if len(v) > 1 else 0.0 for v in curve.values()])
    ax.plot(
        x, means, label=label, color=color, linestyle=linestyle, linewidth=linewidth, marker="o", markersize=3.2
    )
    for place, mean in zip(x, means, strict=True):  # something to point at
        ax.plot(
            place, mean, "o", color=color, alpha=0.0, markersize=9, gid=tip(f"{label}, round {place}: {mean:.3f}")
        )
    if spread.any():
        ax.fill_between(x, means - spread, means + spread, color=color, alpha=0.16, linewidth=0)


def named_rows(ax: Axes, names: Iterable[str], what: str, limits: tuple[float, float] | None = None) -> None:
    """Row y is called names[y], the first on top; ``what`` is measured to the right."""
    names = list(names)
    ax.set_yticks(range(len(names)), [row_name(name) for name in names])
    ax.set(xlabel=what, ylim=limits or (len(names) - 0.4, -0.6))
    ax.grid(axis="y", visible=False)


def row_name(name: str) -> str:
    """A name beside a drawing. A long one loses its middle; one with wide letters gets as many blanks before it as
    they need more room than matplotlib's font gives them (a browser, which has those letters, leaves them out)."""
    if columns_of(name) > LONGEST_NAME:
        name = f"{name[: LONGEST_NAME // 2]}…{name[-LONGEST_NAME // 3 :]}"
    return " " * (columns_of(name) - len(name)) + name


def whole_rounds(ax: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("round")


def shaded_table(
    ax: Axes, values: np.ndarray, rows: Sequence[str], columns: Sequence[str], form: str, clients: bool = False
) -> None:
    """A heat map whose cells are one colour at the strength of their value (0 to 1), with figures on top. Columns
    are experts; rows are clients or something else."""
    from matplotlib.patches import Rectangle

    bare_axes(ax)
    strongest = max(1e-12, float(np.nanmax(values)))
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            strength = 0.04 + 0.96 * float(value) / max(1.0, strongest)
            said = tip(f"{rows[i]}, {columns[j]}: {form.format(value)}", rows[i] if clients else None, j)
            box = Rectangle((j - 0.48, i - 0.46), 0.96, 0.92, color=HEAT, alpha=strength, linewidth=0, gid=said)
            ax.add_patch(box)
            ink = ON_HEAT if strength > 0.86 else INK  # where dark and light figures are equally easy to read
            ax.text(j, i, form.format(value), ha="center", va="center", fontsize=9, color=ink)
    ax.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5))
    ax.set_xticks(range(len(columns)), columns)
    ax.set_yticks(range(len(rows)), [row_name(row) for row in rows])
