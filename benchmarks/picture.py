"""A ladder's JSON as a picture: python -m benchmarks.picture benchmarks/results/h200.json docs/ladder.svg"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def draw(source: Path, target: Path) -> None:
    """One panel a shape: seconds a round of every rung, on a logarithmic axis; the last one for the sweeps."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "fedweave", "svg.fonttype": "none"}  # the same file every time
    import matplotlib.pyplot as plt

    result = json.loads(source.read_text(encoding="utf-8"))
    shapes = result["shapes"]
    swept = {name: shape["sweep"] for name, shape in shapes.items() if "sweep" in shape}
    count = len(shapes) + bool(swept)
    figure, panels = plt.subplots(count, 1, figsize=(8, 2.9 * count), squeeze=False)
    for (name, shape), panel in zip(shapes.items(), panels[: len(shapes), 0], strict=True):
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
    last = panels[len(shapes) - 1, 0]
    last.set_xlabel(f"seconds a round, {result['device']} (× against the PEFT soft mixture)", fontsize=9)
    if swept:
        _draw_sweeps(panels[-1, 0], swept)
    for panel in panels[:, 0]:
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


def _draw_sweeps(panel: Any, swept: dict[str, list[dict[str, Any]]]) -> None:
    """Tokens a second over tokens a round, whether they come with more clients or with larger batches."""
    for (name, rows), colour in zip(swept.items(), ("#0072B2", "#D55E00", "#009E73"), strict=False):
        for kind, marker in (("clients", "o"), ("batch", "s")):
            points = sorted(
                (r["tokens"] / 1e3, r["tokens_per_second"] / 1e3)
                for r in rows
                if kind in r["name"] and "seconds" in r and "note" not in r
            )
            panel.plot(
                *zip(*points, strict=True),
                marker=marker,
                color=colour,
                label=f"{name}, {'more clients' if kind == 'clients' else 'larger batches'}",
            )
    panel.set_ylim(bottom=0)
    panel.set_xlabel("thousands of tokens a round", fontsize=9)
    panel.set_title("thousands of tokens a second", fontsize=10)
    panel.legend(fontsize=7, frameon=False)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
