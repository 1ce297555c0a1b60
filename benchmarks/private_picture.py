"""What privacy costs, as a picture: purity of alignment over ε, and the loss of models trained with it.

    python -m benchmarks.private_picture docs/privacy.svg

Drawn from benchmarks/results/private_signatures.json and docs/results/private.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PLACE = Path(__file__).parents[1]
SIGNATURES = PLACE / "benchmarks/results/private_signatures.json"
STUDY = PLACE / "docs/results/private.json"
STUDIED = "private/"  # of its cells; the others searched for clips and rates, with another seed
# (level, examples a client, what else ε pays for) of the curves
CURVES = [
    ("example", 400, "in a run", "examples, 400 a client, in a run", "#0072B2", "-"),
    ("example", 40, "alone", "examples, 40 a client, signatures alone", "#56B4E9", "-"),
    ("example", 40, "in a run", "examples, 40 a client, in a run", "#56B4E9", "--"),
    ("client", 400, "in a run", "clients, in a run", "#D55E00", "-"),
]
BARS = [("none", 8.0, "none"), ("example", 8.0, "examples, ε = 8"), ("example", 2.0, "examples, ε = 2"),
        ("client", 8.0, "clients, ε = 8"), ("client", 2.0, "clients, ε = 2")]  # fmt: skip
COLOURS = {"none": "#999999", "example": "#0072B2", "client": "#D55E00"}


def losses(cells: dict[str, dict[str, Any]]) -> dict[tuple[int, str, float], float]:
    """(clients, level, ε) -> macro test loss with one active expert: the study's cells with one bucket a client."""
    found: dict[tuple[int, str, float], list[float]] = {}
    for name, cell in cells.items():
        settings, best = cell["settings"], cell["test"]["best"]
        if name.startswith(STUDIED) and settings.get("discovery.max_buckets") == 1:
            level, epsilon = settings.get("privacy.level", "none"), settings.get("privacy.epsilon", 8.0)
            found.setdefault((cell["clients"], level, epsilon), []).append(best["loss"][best["used"]]["macro"])
    return {key: sum(values) / len(values) for key, values in found.items()}


def draw(target: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "fedweave", "svg.fonttype": "none"}  # the same file every time
    import matplotlib.pyplot as plt

    rows = json.loads(SIGNATURES.read_text(encoding="utf-8"))
    cells = json.loads(STUDY.read_text(encoding="utf-8"))["cells"]
    found = losses(cells)
    untouched = next(c["test"]["untouched"]["loss"]["macro"] for n, c in cells.items() if n.startswith(STUDIED))
    figure, (left, *panels) = plt.subplots(1, 3, figsize=(11, 3.4), width_ratios=[1.5, 1, 1])
    for level, examples, spent, label, colour, style in CURVES:
        points = sorted(
            (row["epsilon"], row["purity"])
            for row in rows
            if (row["level"], row["examples"], row["spent"]) == (level, examples, spent)
        )
        left.plot(*zip(*points, strict=True), style, color=colour, marker="o", markersize=3.5, label=label)
    left.set_xscale("log", base=2)
    ticks = sorted({row["epsilon"] for row in rows if row["epsilon"]})
    left.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    left.set_ylim(0.4, 1.03)
    left.set_xlabel("ε", fontsize=9)
    left.set_title("purity of the experts", fontsize=10)
    left.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(0.17, 0.92))
    blank = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    for panel, clients in zip(panels, (20, 200), strict=True):
        for place, (level, epsilon, _) in enumerate(BARS):
            loss = found.get((clients, level, epsilon))
            if loss is None:
                panel.text(0.05, place, "not run", va="center", fontsize=8, color="#666666")
                continue
            panel.barh(place, loss, color=COLOURS[level], height=0.65)
            panel.text(loss + 0.05, place, f"{loss:.3f}", va="center", fontsize=8, bbox=blank)
        panel.axvline(untouched, color="#000000", linewidth=1, linestyle=":")
        panel.set_xlim(0, 1.25 * untouched)
        panel.set_yticks(range(len(BARS)), [title for *_, title in BARS] if clients == 20 else [])
        panel.tick_params(length=0, axis="y")
        panel.invert_yaxis()
        panel.set_title(f"macro test loss, {clients} clients", fontsize=10)
        panel.set_xlabel("dotted: the untouched model", fontsize=8)
    for axes in (left, *panels):
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
