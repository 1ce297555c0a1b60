"""Pictures of what things cost: sparse inference, heterogeneity, bytes and seconds. Each is a picture, or None."""

from collections.abc import Sequence

import numpy as np

from fedweave.report.groups import Group, on_common_seeds, seeds_note
from fedweave.report.style import (
    INK,
    MARKERS,
    MUTED,
    PALETTE,
    Picture,
    canvas,
    colour,
    legend,
    line_style,
    named_rows,
    whole_rounds,
)
from fedweave.runs.reading import RunRecord


def routing_trade_off(groups: Sequence[Group]) -> Picture | None:
    """Figure 4 of the paper: score against latency of one, two and all experts."""
    groups = [g for g in groups if g.first.experts > 1 and g.routings()]
    if len(groups) > 3:  # the paper's figure is about FedWeave alone
        groups = [g for g in groups if g.first.method == "fedweave"][:3]
    if not groups:
        return None
    figure, ax = canvas()
    for i, group in enumerate(groups):
        runs = group.routings()
        points = []
        for k, routing in enumerate(("sparse", "top2", "soft")):
            times = [r[routing]["ms_per_prompt"] for r in runs]
            scores = [r[routing]["score"]["macro"] for r in runs]
            x, y = float(np.mean(times)), float(np.mean(scores))
            points.append((x, y))
            across, up = (float(np.std(v, ddof=1)) if len(runs) > 1 else None for v in (times, scores))
            ax.errorbar(x, y, xerr=across, yerr=up, fmt=MARKERS[k], color=colour(i), elinewidth=1, markersize=7,
                        alpha=0.95)  # fmt: skip
            ax.annotate(routing, (x, y), (7, 6), textcoords="offset points", fontsize=9, color=INK)
        ax.plot(*zip(*points, strict=True), color=colour(i), alpha=0.4, linewidth=1, zorder=1, label=group.label)
    ax.set(xlabel="ms per prompt", ylabel="macro test score")
    ax.margins(0.22)
    if len(groups) > 1:
        legend(ax)
    caption = "One, two or all experts of the same model (the paper's Figure 4); up and left is better."
    return Picture("sparse-trade-off", "What sparse inference costs and saves", caption, figure)


def heterogeneity(groups: Sequence[Group]) -> list[Picture]:
    """Figure 3 of the paper: score and loss over the Dirichlet α, one line per method."""
    by_method: dict[str, dict[float, Group]] = {}
    groups = on_common_seeds([g for g in groups if g.finished()])
    for group in groups:
        by_method.setdefault(group.first.method, {})[group.first.config.data.alpha] = group
    if max((len(v) for v in by_method.values()), default=0) < 2:
        return []
    pictures = []
    for kind, better in (("score", "higher"), ("loss", "lower")):
        figure, ax = canvas()
        for i, (method, found) in enumerate(by_method.items()):
            alphas = sorted(a for a in found if found[a].test(kind, "macro"))
            values = [found[a].test(kind, "macro") for a in alphas]
            means = np.array([np.mean(v) for v in values])
            spread = np.array([np.std(v, ddof=1) if len(v) > 1 else 0 for v in values])
            ax.plot(alphas, means, marker=MARKERS[i % len(MARKERS)], linewidth=1.9, label=method, **line_style(i))
            ax.fill_between(alphas, means - spread, means + spread, color=colour(i), alpha=0.16, linewidth=0)
        ticks = sorted({a for found in by_method.values() for a in found})
        ax.set_xscale("log")
        ax.set_xticks(ticks, [f"{a:g}" for a in ticks])
        ax.minorticks_off()
        ax.set(xlabel="Dirichlet α (smaller: clients more one-sided)", ylabel=f"macro test {kind}")
        legend(ax)
        title = f"Heterogeneity and macro {kind}"
        caption = f"The paper's Figure 3; {better} is better.{seeds_note(groups)}"
        pictures.append(Picture(f"heterogeneity-{kind}", title, caption, figure))
    return pictures


def loss_for_bytes(groups: Sequence[Group]) -> Picture | None:
    """What a megabyte of upload buys."""
    shown = [g for g in groups if g.first.rounds]
    if not shown:
        return None
    figure, ax = canvas()
    for i, group in enumerate(shown):
        uploaded, total = {0: 0.0}, 0.0
        for event in group.first.rounds:
            total += sum(event["bytes_up"].values()) / 1e6
            uploaded[event["round"]] = total
        curve = {t: v for t, v in group.losses().items() if t in uploaded}
        ax.plot([uploaded[t] for t in curve], [np.mean(v) for v in curve.values()], marker="o", markersize=3.2,
                linewidth=1.9, label=group.label, **line_style(i))  # fmt: skip
    ax.set(xlabel="uploaded by all clients so far, MB", ylabel="macro validation loss")
    if len(shown) > 1:
        legend(ax)
    sent = " or ".join(dict.fromkeys(group.first.config.federation.update_dtype for group in shown))
    caption = f"Updates in {sent}, counted as they were sent."
    return Picture("loss-for-bytes", "Loss for bytes", caption, figure)


def time_spent(run: RunRecord) -> Picture | None:
    """Where the seconds went."""
    phases = {name: s for name, s in run.phases.items() if s > 0 and name != "round"}  # rounds hold their round
    if not phases:
        return None
    figure, ax = canvas(height=1.0 + 0.34 * len(phases))
    rows = range(len(phases))
    ax.barh(rows, list(phases.values()), 0.62, color=PALETTE[0], alpha=0.85)
    widest = max(phases.values())
    for y, seconds in zip(rows, phases.values(), strict=True):
        ax.text(seconds + 0.015 * widest, y, f"{seconds:.1f} s", va="center", fontsize=9, color=MUTED)
    named_rows(ax, phases, "seconds")
    ax.set_xlim(0, 1.18 * widest)
    return Picture("time", "Where the time went", "Phases of the last session of this run.", figure)


def round_times(run: RunRecord) -> Picture | None:
    seconds = run.round_seconds
    if not seconds:
        return None
    figure, ax = canvas(height=2.4)
    ax.bar(range(1, len(seconds) + 1), seconds, 0.7, color=PALETTE[0], alpha=0.85)
    ax.set_ylabel("seconds")
    whole_rounds(ax)
    ax.grid(axis="x", visible=False)
    return Picture("round-times", "Time of every round", "Training, validation and checkpoint.", figure)
