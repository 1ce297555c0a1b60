"""The suite as a picture: python -m benchmarks.suite_picture docs/results/suite.json docs/suite.svg

A dot for every seed: by how much FedWeave's test loss, with one active expert, lies above FedIT's on the same data.
Lines are means. To the left of 0 FedWeave is better.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

# what the suite calls a set and what a reader does; the last is what nobody trained on
SETS = {
    "four": "four tasks, one wording each",
    "four-varied": "four tasks, freely worded",
    "natural": "64 natural instructions, 16 kinds",
    "unseen": "… and 28 tasks nobody trained on",
    "pure-clients": "four tasks, one a client",
    "one-kind": "one kind: nothing to gain",
}
OURS, THEIRS = "fedweave", "fedit"


def leads(cells: dict, model: str) -> dict[str, dict[int, float]]:
    """Set -> seed -> by which share our loss lies above the other's."""
    losses: dict[tuple[str, str, int], float] = {}
    for cell in cells.values():
        for name, test in ((cell["set"], cell["test"].get("best")), ("unseen", cell["test"].get("unseen"))):
            if cell["model"].casefold() == model.casefold() and test:
                losses[name, cell["method"], cell["seed"]] = test["loss"][test["used"]]["macro"]
    found: dict[str, dict[int, float]] = {}
    for (name, method, seed), loss in sorted(losses.items()):
        if method == OURS and (other := losses.get((name, THEIRS, seed))) is not None:
            found.setdefault(name, {})[seed] = loss / other - 1
    return found


def draw(source: Path, target: Path, model: str = "SmolLM2-135M-Instruct") -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "fedweave", "svg.fonttype": "none"}  # the same file every time
    import matplotlib.pyplot as plt

    found = leads(json.loads(source.read_text(encoding="utf-8"))["cells"], model)
    names = [name for name in SETS if name in found]
    figure, axes = plt.subplots(figsize=(8, 0.45 * len(names) + 1.1))
    for place, name in enumerate(reversed(names)):
        shares = [100 * share for share in found[name].values()]
        axes.scatter(shares, [place] * len(shares), s=26, color="#0072B2", alpha=0.75, linewidths=0, zorder=2)
        mean = float(np.mean(shares))
        axes.plot([mean, mean], [place - 0.3, place + 0.3], color="#0072B2", linewidth=2.5, zorder=3)
        axes.annotate(f"{mean:+.1f} %".replace("-", "−"), (1.0, place), va="center", fontsize=9)
    axes.axvline(0, color="#000000", linewidth=1, zorder=1)
    axes.set_yticks(range(len(names)), [SETS[name] for name in reversed(names)], fontsize=9)
    axes.set_xlim(min(-6.0, 1.1 * min(100 * x for of in found.values() for x in of.values())), 1.9)
    axes.set_xlabel("FedWeave's test loss above FedIT's, % (dots: seeds; lines: means)", fontsize=9)
    axes.tick_params(labelsize=8, axis="x")
    axes.tick_params(length=0, axis="y")
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
