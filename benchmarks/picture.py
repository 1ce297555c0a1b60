"""A ladder's JSON as a picture: python -m benchmarks.picture benchmarks/results/h200.json docs/ladder.svg"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def draw(source: Path, target: Path) -> None:
    """One panel a shape: seconds a round of every rung, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "fedweave", "svg.fonttype": "none"}  # the same file every time
    import matplotlib.pyplot as plt

    result = json.loads(source.read_text(encoding="utf-8"))
    shapes = result["shapes"]
    figure, panels = plt.subplots(len(shapes), 1, figsize=(8, 2.9 * len(shapes)), squeeze=False)
    for (name, shape), panel in zip(shapes.items(), panels[:, 0], strict=True):
        rungs = [r for r in shape["rungs"] if "seconds" in r]
        colours = ["#999999" if r["name"].startswith("PEFT") else "#0072B2" for r in rungs]
        panel.barh([r["name"] for r in rungs], [r["seconds"] for r in rungs], color=colours)
        panel.set_xscale("log")
        panel.invert_yaxis()
        for y, r in enumerate(rungs):
            label = f" {r['seconds']:.2f} s" + (f"  ({r['speedup']:.0f}×)" if r.get("speedup", 0) > 1.5 else "")
            panel.text(r["seconds"], y, label, va="center", fontsize=8)
        panel.set_xlim(0.1, max(r["seconds"] for r in rungs) * 8)
        panel.set_title(
            f"{name}: {shape['clients']} clients × {shape['steps']} steps × batch {shape['batch']}", fontsize=10
        )
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel(f"seconds a round, {result['device']} (× against the PEFT soft mixture)", fontsize=9)
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
