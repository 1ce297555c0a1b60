"""Pictures of a diagnosis (`fedweave diagnose`): what contaminates experts, and how much training each one got."""

from fedweave.analysis.diagnosis import Diagnosis, sources
from fedweave.report.style import INK, MUTED, PALETTE, SURFACE, Picture, canvas, colour, legend, named_rows


def contamination(found: Diagnosis, titles: dict[str, str]) -> Picture | None:
    """χ_m and the three parts that bound it, beside what whole clients as units would mix."""
    if "contamination" not in found:
        return None
    report = found["contamination"]
    now = report["rounds"][str(found["round"])]
    alive = [(m, chi) for m, chi in enumerate(now["chi"]) if chi is not None]
    if not alive:
        return None
    figure, ax = canvas(height=1.5 + 0.42 * len(alive))
    for y, (m, chi) in enumerate(alive):
        left = 0.0
        for i, (name, part) in enumerate(sources(now).items()):
            width = part[m] or 0.0
            ax.barh(y, width, 0.56, left, color=colour(i), edgecolor=SURFACE, label=name if y == 0 else None)
            left += width
        ax.plot(chi, y, "o", color=INK, markersize=6, label="χ, measured" if y == 0 else None)
        whole = report["client_mixture"][m]
        if whole is not None:
            label = "whole clients as units" if y == 0 else None
            ax.plot(whole, y, "D", color=MUTED, markerfacecolor=SURFACE, markersize=6, label=label)
    targets = [(m, report["target"][m]) for m, _ in alive]
    named_rows(ax, [f"E{m} · {titles.get(k, k)}" for m, k in targets], "share of off-pattern weight")
    ax.set_xlim(left=0)
    legend(ax)
    caption = "The measured contamination χ of every expert stays below the sum of its three sources (the bars)."
    return Picture("contamination", "What contaminates experts", caption, figure)


def effective_budget(found: Diagnosis) -> Picture | None:
    """The mean routed weight behind A_{m,U}: an expert far below an even share starves."""
    weights = found["effective_budget"]["mean_weight"] if "effective_budget" in found else []
    if len(weights) < 2:
        return None
    figure, ax = canvas(height=1.2 + 0.34 * len(weights))
    ax.barh(range(len(weights)), weights, 0.6, color=PALETTE[0], alpha=0.85)
    ax.axvline(1 / len(weights), color=PALETTE[1], linestyle=(0, (4, 3)), linewidth=1.4, label="even share")
    named_rows(ax, [f"expert {m}" for m in range(len(weights))], "mean routed weight")
    legend(ax)
    caption = "An expert's effective budget A is this weight × rate × steps; below a quarter of even it starves."
    return Picture("effective-budget", "How much training each expert got", caption, figure)
