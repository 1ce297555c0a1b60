"""A drift study as a picture: python -m benchmarks.drift_picture compare/drift/course.json docs/drift.svg

Above the loss on kinds that came in mid-run, below that on kinds that were there and stayed, over the rounds; means
over seeds. A run that started anew with all data begins where the first new kind came.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

# what the study calls an arm, what a reader does, and its colour
ARMS = {
    "drift, fedweave, open": ("FedWeave that notices", "#0072B2"),
    "drift, fedweave, off": ("FedWeave that does not", "#56B4E9"),
    "drift, ifca, off": ("IFCA", "#D55E00"),
    "drift, oracle, off": ("an oracle that is told", "#009E73"),
    "restart, fedweave, off": ("restarted from nothing", "#999999"),
    "still, fedweave, open": ("nothing comes", "#000000"),
}


def mean_by_round(courses: list[dict[int, float]], later: int = 0) -> tuple[list[int], list[float]]:
    """(rounds, means over those that have them)"""
    found = defaultdict(list)
    for course in courses:
        for t, loss in course.items():
            found[int(t) + later].append(loss)
    rounds = sorted(found)
    return rounds, [float(np.mean(found[t])) for t in rounds]


def draw(source: Path, target: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "fedweave", "svg.fonttype": "none"}  # the same file every time
    import matplotlib.pyplot as plt

    runs = json.loads(source.read_text(encoding="utf-8"))
    arrivals = sorted({t for run in runs if run["title"].startswith("drift") for t in run["came"].values()})
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 6.2), sharex=True)
    for title, (label, colour) in ARMS.items():
        own = [run for run in runs if run["title"] == title]
        later = arrivals[0] - 1 if title.startswith("restart") else 0
        new = [course for run in own for course in run["new"].values()]
        if new:
            above.plot(*mean_by_round(new, later), color=colour, label=label)
        if own:
            below.plot(*mean_by_round([run["old"] for run in own], later), color=colour, label=label)
    for panel, what in ((above, "loss on kinds that came"), (below, "loss on kinds that stayed")):
        for t in arrivals:
            panel.axvline(t - 0.5, color="#cccccc", linewidth=1, zorder=0)
        panel.set_ylabel(what, fontsize=9)
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    below.xaxis.get_major_locator().set_params(integer=True)
    below.set_xlabel("round; grey: a new kind came before it", fontsize=9)
    below.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
