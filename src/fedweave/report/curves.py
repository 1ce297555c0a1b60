"""Pictures of results: curves over rounds, scores, trade-offs and costs. Each function gives a picture, or None."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedweave.report.records import Group, RunRecord, seeds_note
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
    whole_rounds,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# -------------------------------------------------------------------------------------- quality


def task_losses(group: Group) -> Picture | None:
    """Validation loss of every task, round by round."""
    if not any("tasks" in event for event in group.first.validations):
        return None
    figure, ax = canvas()
    for i, (task, title) in enumerate(group.first.tasks.items()):
        band(ax, group.curve("tasks", task), title, **line_style(i))
    if len(group.first.tasks) > 1:
        band(ax, group.curve("tasks", "macro"), "macro average", color=INK, linewidth=2.4)
    ax.set_ylabel("validation loss")
    whole_rounds(ax)
    legend(ax)
    return Picture("loss-by-task", "Validation loss by task", f"Lower is better.{seeds_note([group])}", figure)


def site_losses(run: RunRecord) -> Picture | None:
    """Validation loss at every site of a deployment, and over all of their examples."""
    sites = list(dict.fromkeys(name for event in run.validations for name in event.get("sites", {})))
    if not sites:
        return None
    figure, ax = canvas()
    for i, name in enumerate(sites):
        curve = {e["round"]: [e["sites"][name]] for e in run.validations if name in e.get("sites", {})}
        band(ax, curve, name, **line_style(i), linewidth=1.4)
    band(ax, {e["round"]: [e["loss"]] for e in run.validations}, "all examples", color=INK, linewidth=2.4)
    ax.set_ylabel("validation loss")
    whole_rounds(ax)
    legend(ax)
    return Picture(
        "loss-by-site", "Validation loss at every site", "Measured by each site on its own rows.", figure
    )


def task_scores(group: Group) -> Picture | None:
    """Validation scores by round, when the run measured them."""
    if not any("scores" in event for event in group.first.validations):
        return None
    figure, ax = canvas()
    for i, (task, title) in enumerate(group.first.tasks.items()):
        band(ax, group.curve("scores", task), title, **line_style(i))
    ax.set_ylabel("validation score")
    whole_rounds(ax)
    legend(ax)
    return Picture("score-by-task", "Validation score by task", f"Higher is better.{seeds_note([group])}", figure)


def method_losses(groups: Sequence[Group]) -> Picture | None:
    """Macro loss of several experiments."""
    if len(groups) < 2 or not any(g.first.validations for g in groups):
        return None
    figure, ax = canvas()
    curves = [group.curve("tasks", "macro") for group in groups]
    for i, (group, curve) in enumerate(zip(groups, curves, strict=True)):
        band(ax, curve, group.label, **line_style(i))
    ax.set_ylabel("macro validation loss")
    whole_rounds(ax)
    legend(ax)
    caption = f"Lower is better.{_frame_training(ax, curves)}{seeds_note(groups)}"
    return Picture("loss-by-method", "Macro loss of every experiment", caption, figure)


def _frame_training(ax: Axes, curves: Sequence[dict[int, list[float]]]) -> str:
    """Where the untrained start would press all that follows flat, the frame is that of the rounds; says so."""
    start = [loss for curve in curves for t, losses in curve.items() if t == 0 for loss in losses]
    after = [loss for curve in curves for t, losses in curve.items() if t > 0 for loss in losses]
    if not start or not after or max(start) - max(after) <= max(after) - min(after):
        return ""
    margin = 0.05 * (max(after) - min(after))
    ax.set_ylim(min(after) - margin, max(after) + margin)
    return f" The start, before any training, is at up to {max(start):.2f}, beyond the frame."


def training_loss(run: RunRecord) -> Picture | None:
    """Local training loss: the mean, and every client behind it."""
    if not run.rounds:
        return None
    figure, ax = canvas()
    clients: dict[str, dict[int, float]] = {}
    for event in run.rounds:
        for name, loss in event.get("client_losses", {}).items():
            clients.setdefault(name, {})[event["round"]] = loss
    for i, curve in enumerate(clients.values()):
        label = "one client" if i == 0 else None
        ax.plot(list(curve), list(curve.values()), color=MUTED, alpha=0.45, linewidth=1, label=label)
    mean = {e["round"]: [e["train_loss"]] for e in run.rounds}
    band(ax, mean, "mean of participants", color=PALETTE[0], linewidth=2.4)
    ax.set_ylabel("training loss")
    whole_rounds(ax)
    legend(ax)
    return Picture("training-loss", "Local training loss", "Mean of each client's steps in a round.", figure)


def test_change(run: RunRecord) -> Picture | None:
    """From the untouched model to the trained one, task by task."""
    bare = (run.summary or {}).get("test", {}).get("untouched", {}).get("loss")
    if not bare or run.best is None:
        return None
    trained = run.best["loss"][run.best["used"]]
    names = {**run.tasks, "macro": "macro average"} if len(run.tasks) > 1 else dict(run.tasks)
    names = {task: title for task, title in names.items() if task in trained}
    figure, ax = canvas(height=1.2 + 0.42 * len(names))
    for y, task in enumerate(names):
        ax.annotate("", (trained[task], y), (bare[task], y),
                    arrowprops={"arrowstyle": "-|>", "color": MUTED, "shrinkA": 5, "shrinkB": 5})  # fmt: skip
    rows = range(len(names))
    ax.plot([bare[t] for t in names], rows, "o", color=MUTED, markerfacecolor=SURFACE, label="untouched model")
    ax.plot([trained[t] for t in names], rows, "o", color=PALETTE[0], label=f"best round, {run.best['used']}")
    ax.set_yticks(rows, list(names.values()))
    ax.set(ylim=(len(names) - 0.5, -0.5), xlabel="test loss")
    ax.grid(axis="y", visible=False)
    legend(ax)
    return Picture("test-loss", "What training changed", "Test loss before and after; left is better.", figure)


def test_scores(groups: Sequence[Group]) -> Picture | None:
    """Test score of every task, one mark per experiment and seed."""
    groups = [g for g in groups if g.test("score", "macro")]
    if not groups:
        return None
    if len(groups) > 3:
        return _macro_scores(groups)
    tasks = groups[0].first.tasks
    names = {**tasks, "macro": "macro average"} if len(tasks) > 1 else dict(tasks)
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
    ax.set_yticks(range(len(names)), list(names.values()))
    ax.set(ylim=(len(names) - 0.4, -0.6), xlim=(0, 1.09), xlabel="test score")
    ax.set_xticks(np.arange(0, 1.01, 0.2))
    ax.grid(axis="y", visible=False)
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
    ax.set_yticks(range(len(groups)), [group.label for group in groups])
    ax.set(ylim=(len(groups) - 0.4, -0.6), xlabel="macro test score")
    ax.set_xlim(left=0)
    ax.grid(axis="y", visible=False)
    caption = "Best round by validation; higher is better. Bar: mean over seeds; dots: single seeds."
    return Picture("test-score", "Macro test score", caption, figure)


# -------------------------------------------------------------------------------------- router and experts


def router_entropy(groups: Sequence[Group]) -> Picture | None:
    """How decided the routers are, as a share of the entropy of a coin with M sides."""
    groups = [g for g in groups if g.first.entropy is not None]
    if not groups:
        return None
    figure, ax = canvas()
    for i, group in enumerate(groups):
        curves = group.curve("router_entropy")
        scale = np.log(group.first.experts)
        band(ax, {t: [v / scale for v in values] for t, values in curves.items()}, group.label, **line_style(i))
    ax.set(ylabel="entropy / log M", ylim=(-0.02, 1.02))
    whole_rounds(ax)
    if len(groups) > 1:
        legend(ax)
    caption = "0: every prompt has one clear expert; 1: the router cannot tell experts apart."
    return Picture("router-entropy", "Router entropy", caption + seeds_note(groups), figure)


def expert_load(run: RunRecord) -> Picture | None:
    """Share of validation prompts that sparse routing sends to each expert."""
    events = [e for e in run.validations if len(e.get("expert_load", [])) > 1]
    if not events:
        return None
    figure, ax = canvas()
    rounds = [e["round"] for e in events]
    shares = np.array([e["expert_load"] for e in events]).T  # [M, rounds]
    bottom = np.zeros(len(rounds))
    for m, share in enumerate(shares):
        hatch = "////" if m >= len(PALETTE) else None
        ax.bar(rounds, share, 0.8, bottom, color=colour(m), edgecolor=SURFACE, hatch=hatch, label=f"expert {m}")
        bottom += share
    ax.set(ylabel="share of validation prompts", ylim=(0, 1))
    whole_rounds(ax)
    ax.grid(False)
    legend(ax)
    return Picture("expert-load", "Expert load", "Where arg-max routing sends the validation prompts.", figure)


def client_agreement(run: RunRecord) -> Picture | None:
    """Who pulls with the others."""
    if not run.agreement:
        return None
    names = sorted(run.agreement, key=lambda name: run.agreement[name])
    figure, ax = canvas(height=max(2.2, 1.0 + 0.24 * len(names)))
    for y, name in enumerate(names):
        each = [e["agreement"].get(name) for e in run.rounds if e.get("agreement", {}).get(name) is not None]
        mean = run.agreement[name]
        shade = PALETTE[1] if mean < 0 else PALETTE[0]
        ax.plot([min(each), max(each)], [y, y], color=shade, alpha=0.35, linewidth=4, solid_capstyle="round")
        ax.plot(mean, y, "o", color=shade)
    ax.axvline(0, color=MUTED, linewidth=1)
    ax.set_yticks(range(len(names)), names)
    ax.set(xlabel="cosine with the other clients' updates", ylim=(-0.7, len(names) - 0.3))
    ax.grid(axis="y", visible=False)
    caption = "Held against others only on the experts that both serve. Dot: mean over rounds; bar: range."
    return Picture("client-agreement", "Do clients pull together?", caption, figure)
