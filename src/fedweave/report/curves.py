"""Pictures of results: curves over rounds, scores, who pulls where. Each function gives a picture, or None."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedweave.report.groups import Curve, Group, seeds_note
from fedweave.report.style import (
    INK,
    MUTED,
    PALETTE,
    SURFACE,
    Picture,
    band,
    canvas,
    colour,
    legend,
    line_style,
    named_rows,
    tip,
    whole_rounds,
)
from fedweave.runs.reading import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Named = list[tuple[str, Curve]]

# -------------------------------------------------------------------------------------- over rounds


def _over_rounds(
    what: str, curves: Named, mean: Named | None = None, linewidth: float = 1.9
) -> tuple[Figure, Axes]:
    """One line for each curve, and a stronger one for their mean."""
    figure, ax = canvas()
    for i, (label, curve) in enumerate(curves):
        band(ax, curve, label, **line_style(i), linewidth=linewidth)
    for label, curve in mean or []:
        band(ax, curve, label, color=INK, linewidth=2.4)
    ax.set_ylabel(what)
    whole_rounds(ax)
    legend(ax)
    return figure, ax


def task_losses(group: Group) -> Picture | None:
    """Validation loss of every task, round by round."""
    if not any("tasks" in event for event in group.first.validations):
        return None
    curves = [(title, group.task_losses(task)) for task, title in group.first.tasks.items()]
    mean = [("macro average", group.task_losses("macro"))] if len(curves) > 1 else []
    figure, _ = _over_rounds("validation loss", curves, mean)
    return Picture("loss-by-task", "Validation loss by task", f"Lower is better.{seeds_note([group])}", figure)


def task_scores(group: Group) -> Picture | None:
    """Validation scores by round, when the run measured them."""
    if not any("scores" in event for event in group.first.validations):
        return None
    curves = [(title, group.task_scores(task)) for task, title in group.first.tasks.items()]
    figure, _ = _over_rounds("validation score", curves)
    return Picture("score-by-task", "Validation score by task", f"Higher is better.{seeds_note([group])}", figure)


def site_losses(run: RunRecord) -> Picture | None:
    """Validation loss at every site of a deployment, and over all of their examples."""
    curves: dict[str, Curve] = {}
    for event in run.validations:
        for name, loss in event.get("sites", {}).items():
            curves.setdefault(name, {})[event["round"]] = [loss]
    if not curves:
        return None
    mean = {event["round"]: [event["loss"]] for event in run.validations}
    figure, _ = _over_rounds("validation loss", list(curves.items()), [("all examples", mean)], linewidth=1.4)
    return Picture(
        "loss-by-site", "Validation loss at every site", "Measured by each site on its own rows.", figure
    )


def method_losses(groups: Sequence[Group]) -> Picture | None:
    """Macro loss of several experiments."""
    if len(groups) < 2 or not any(g.first.validations for g in groups):
        return None
    curves = [(group.label, group.losses()) for group in groups]
    figure, ax = _over_rounds("macro validation loss", curves)
    caption = f"Lower is better.{_frame_training(ax, curves)}{seeds_note(groups)}"
    return Picture("loss-by-method", "Macro loss of every experiment", caption, figure)


def _frame_training(ax: Axes, curves: Named) -> str:
    """Where the untrained start would press all that follows flat, the frame is that of the rounds; says so."""
    start = [loss for _, curve in curves for t, losses in curve.items() if t == 0 for loss in losses]
    after = [loss for _, curve in curves for t, losses in curve.items() if t > 0 for loss in losses]
    if not start or not after or max(start) - max(after) <= max(after) - min(after):
        return ""
    margin = 0.05 * (max(after) - min(after))
    ax.set_ylim(min(after) - margin, max(after) + margin)
    return f" The start, before any training, is at up to {max(start):.2f}, beyond the frame."


def training_loss(run: RunRecord) -> Picture | None:
    """Local training loss: the mean, and every client behind it."""
    mean = {e["round"]: [e["train_loss"]] for e in run.rounds if e["train_loss"] is not None}
    if not mean:
        return None
    figure, ax = canvas()
    clients: dict[str, dict[int, float]] = {}
    for event in run.rounds:
        for name, loss in event["client_losses"].items():
            clients.setdefault(name, {})[event["round"]] = loss
    for i, curve in enumerate(clients.values()):
        label = "one client" if i == 0 else None
        ax.plot(list(curve), list(curve.values()), color=MUTED, alpha=0.45, linewidth=1, label=label)
    band(ax, mean, "mean of participants", color=PALETTE[0], linewidth=2.4)
    ax.set_ylabel("training loss")
    whole_rounds(ax)
    legend(ax)
    return Picture("training-loss", "Local training loss", "Mean of each client's steps in a round.", figure)


def router_entropy(groups: Sequence[Group]) -> Picture | None:
    """How decided the routers are, as a share of the entropy of a coin with M sides."""
    groups = [g for g in groups if g.first.entropy is not None]
    if not groups:
        return None
    figure, ax = canvas()
    for i, group in enumerate(groups):
        curve = group.curve(lambda event: event["router_entropy"])
        scale = np.log(group.first.experts)
        band(ax, {t: [v / scale for v in values] for t, values in curve.items()}, group.label, **line_style(i))
    ax.set(ylabel="entropy / log M", ylim=(-0.02, 1.02))
    whole_rounds(ax)
    if len(groups) > 1:
        legend(ax)
    caption = "0: every prompt has one clear expert; 1: the router cannot tell experts apart."
    return Picture("router-entropy", "Router entropy", caption + seeds_note(groups), figure)


def expert_load(run: RunRecord) -> Picture | None:
    """Share of validation prompts that sparse routing sends to each expert."""
    loads = {e["round"]: e["expert_load"] for e in run.validations if len(e.get("expert_load", [])) > 1}
    if not loads:
        return None
    figure, ax = canvas()
    rounds, bottom, most = list(loads), np.zeros(len(loads)), max(map(len, loads.values()))
    padded = [[*load, *[0.0] * (most - len(load))] for load in loads.values()]  # experts may open in mid-run
    for m, share in enumerate(np.array(padded).T):  # [M, rounds]
        hatch = "////" if m >= len(PALETTE) else None
        bars = ax.bar(
            rounds, share, 0.8, bottom, color=colour(m), edgecolor=SURFACE, hatch=hatch, label=f"expert {m}"
        )
        for bar, t, part in zip(bars, rounds, share, strict=True):
            bar.set_gid(tip(f"expert {m}, round {t}: {part:.0%}", expert=m))
        bottom += share
    ax.set(ylabel="share of validation prompts", ylim=(0, 1))
    whole_rounds(ax)
    ax.grid(False)
    legend(ax)
    return Picture("expert-load", "Expert load", "Where arg-max routing sends the validation prompts.", figure)


# -------------------------------------------------------------------------------------- at the end


def test_change(run: RunRecord) -> Picture | None:
    """From the untouched model to the trained one, task by task."""
    bare = run.untouched
    if bare is None or run.best is None:
        return None
    trained = run.best["loss"][run.best["used"]]
    names = {task: title for task, title in run.titles.items() if task in trained}
    figure, ax = canvas(height=1.2 + 0.42 * len(names))
    for y, task in enumerate(names):
        ax.annotate("", (trained[task], y), (bare[task], y),
                    arrowprops={"arrowstyle": "-|>", "color": MUTED, "shrinkA": 5, "shrinkB": 5})  # fmt: skip
    rows = range(len(names))
    ax.plot([bare[t] for t in names], rows, "o", color=MUTED, markerfacecolor=SURFACE, label="untouched model")
    ax.plot([trained[t] for t in names], rows, "o", color=PALETTE[0], label=f"best round, {run.best['used']}")
    named_rows(ax, names.values(), "test loss", (len(names) - 0.5, -0.5))
    legend(ax)
    return Picture("test-loss", "What training changed", "Test loss before and after; left is better.", figure)


def test_scores(groups: Sequence[Group]) -> Picture | None:
    """Test score of every task, one mark per experiment and seed."""
    groups = [g for g in groups if g.test("score", "macro")]
    if not groups:
        return None
    if len(groups) > 3:
        return _macro_scores(groups)
    names = groups[0].first.titles
    step = 0.7 / len(groups)
    figure, ax = canvas(height=1.3 + len(names) * (0.3 + 0.14 * len(groups)))
    for i, group in enumerate(groups):
        for y, task in enumerate(names):
            values = group.test("score", task)
            place = y - 0.35 + step * (i + 0.5)
            ax.barh(place, np.mean(values), step * 0.86, color=colour(i), alpha=0.85, linewidth=0,
                    label=group.label if y == 0 else None)  # fmt: skip
            if len(values) > 1:
                ax.plot(values, [place] * len(values), "o", markersize=3, color=INK, alpha=0.7)
            else:
                ax.text(values[0] + 0.012, place, f"{values[0]:.2f}", va="center", fontsize=8.5, color=MUTED)
    named_rows(ax, names.values(), "test score")
    ax.set_xlim(0, 1.09)
    ax.set_xticks(np.arange(0, 1.01, 0.2))
    if len(groups) > 1:
        legend(ax)
    dots = " Dots: single seeds." if any(len(g.runs) > 1 for g in groups) else ""
    return Picture("test-score", "Test score by task", f"Best round by validation; higher is better.{dots}", figure)


def _macro_scores(groups: Sequence[Group]) -> Picture:
    """Many experiments: only their macro score, one row each."""
    figure, ax = canvas(height=1.0 + 0.28 * len(groups))
    for y, group in enumerate(groups):
        values = group.test("score", "macro")
        ax.barh(y, np.mean(values), 0.7, color=PALETTE[0], alpha=0.85, linewidth=0)
        ax.plot(values, [y] * len(values), "o", markersize=3.4, color=INK, alpha=0.7)
    named_rows(ax, [group.label for group in groups], "macro test score")
    ax.set_xlim(left=0)
    caption = "Best round by validation; higher is better. Bar: mean over seeds; dots: single seeds."
    return Picture("test-score", "Macro test score", caption, figure)


def client_agreement(run: RunRecord) -> Picture | None:
    """Who pulls with the others."""
    if not run.agreement:
        return None
    names = sorted(run.agreement, key=lambda name: run.agreement[name])
    figure, ax = canvas(height=max(2.2, 1.0 + 0.24 * len(names)))
    for y, name in enumerate(names):
        each = [cosine for e in run.rounds if (cosine := e["agreement"].get(name)) is not None]
        mean = run.agreement[name]
        shade = PALETTE[1] if mean < 0 else PALETTE[0]
        own = tip(f"{name}: {mean:+.2f}, from {min(each):+.2f} to {max(each):+.2f}", client=name)
        ax.plot(
            [min(each), max(each)], [y, y], color=shade, alpha=0.35, linewidth=4, solid_capstyle="round", gid=own
        )
        ax.plot(mean, y, "o", color=shade, gid=own)
    ax.axvline(0, color=MUTED, linewidth=1)
    named_rows(ax, names, "cosine with the other clients' updates", (-0.7, len(names) - 0.3))
    caption = "Held against others only on the experts that both serve. Dot: mean over rounds; bar: range."
    return Picture("client-agreement", "Do clients pull together?", caption, figure)
