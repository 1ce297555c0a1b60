"""Pictures of a diagnosis (`fedweave diagnose`): what contaminates experts, and how much training each one got."""

from __future__ import annotations

from fedweave.report.records import RunRecord
from fedweave.report.style import INK, MUTED, PALETTE, SURFACE, Picture, canvas, colour, legend


def contamination(run: RunRecord) -> Picture | None:
    """χ_m and the three parts that bound it, beside what whole clients as units would mix."""
    found = (run.diagnostics or {}).get("contamination")
    if not found:
        return None
    assert run.diagnostics is not None
    now = found["rounds"][str(run.diagnostics["round"])]
    alive = [m for m, chi in enumerate(now["chi"]) if chi is not None]
    if not alive:
        return None
    figure, ax = canvas(height=1.5 + 0.42 * len(alive))
    for y, m in enumerate(alive):
        left = 0.0
        for i, (part, name) in enumerate(
            (("local", "impure buckets"), ("misalignment", "misaligned buckets"), ("leakage", "leaking routes"))
        ):
            ax.barh(y, now[part][m], 0.56, left, color=colour(i), edgecolor=SURFACE, label=name if y == 0 else None)
            left += now[part][m]
        ax.plot(now["chi"][m], y, "o", color=INK, markersize=6, label="χ, measured" if y == 0 else None)
        whole = found["client_mixture"][m]
        if whole is not None:
            label = "whole clients as units" if y == 0 else None
            ax.plot(whole, y, "D", color=MUTED, markerfacecolor=SURFACE, markersize=6, label=label)
    targets = [run.tasks.get(found["target"][m], found["target"][m]) for m in alive]
    ax.set_yticks(range(len(alive)), [f"E{m} · {target}" for m, target in zip(alive, targets, strict=True)])
    ax.set(xlabel="share of off-pattern weight", ylim=(len(alive) - 0.4, -0.6))
    ax.set_xlim(left=0)
    ax.grid(axis="y", visible=False)
    legend(ax)
    caption = "The measured contamination χ of every expert stays below the sum of its three sources (the bars)."
    return Picture("contamination", "What contaminates experts", caption, figure)


def effective_budget(run: RunRecord) -> Picture | None:
    """The mean routed weight behind A_{m,U}: an expert far below an even share starves."""
    found = (run.diagnostics or {}).get("effective_budget")
    if not found or len(found["mean_weight"]) < 2:
        return None
    weights = found["mean_weight"]
    figure, ax = canvas(height=1.2 + 0.34 * len(weights))
    ax.barh(range(len(weights)), weights, 0.6, color=PALETTE[0], alpha=0.85)
    ax.axvline(1 / len(weights), color=PALETTE[1], linestyle=(0, (4, 3)), linewidth=1.4, label="even share")
    ax.set_yticks(range(len(weights)), [f"expert {m}" for m in range(len(weights))])
    ax.set(xlabel="mean routed weight", ylim=(len(weights) - 0.4, -0.6))
    ax.grid(axis="y", visible=False)
    legend(ax)
    caption = "An expert's effective budget A is this weight × rate × steps; below a quarter of even it starves."
    return Picture("effective-budget", "How much training each expert got", caption, figure)
