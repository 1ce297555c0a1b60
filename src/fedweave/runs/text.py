"""The last thing a run prints: scores, losses, who answers what, and where the time went."""

from __future__ import annotations

from typing import Any

from fedweave.console import shade, table


def summary_text(summary: dict[str, Any]) -> str:
    """A summary as text."""
    best, chosen = summary["test"].get("best"), summary["validation"]
    parts = [
        "",
        f"{summary['method']} · {summary['backbone']['model']} · {summary['clients']} clients · "
        f"{summary['examples']} examples · {summary['buckets']} buckets → {summary['experts']} experts · "
        f"best of {summary['rounds']} rounds: {chosen['best_round']}",
        "",
    ]
    if best:
        parts += [_results(summary, best), "", _routing(summary, best)]
    else:
        parts.append(f"validation loss of all sites: {chosen['best_loss']:.3f}")
    if summary.get("audit"):
        rows = [
            [level, *(f"{summary['audit'][level][k]:.3f}" for k in ("purity", "nmi", "ari"))]
            for level in ("local", "global")
        ]
        parts += ["", table(["alignment audit", "purity", "NMI", "ARI"], rows)]
    parts += [""] + [f"note: {note}" for note in summary["notes"]]
    if "timing" in summary:
        parts.append(f"time: {summary['timing']['total_s']:.0f} s")
    return "\n".join(parts)


def _results(summary: dict[str, Any], best: dict[str, Any]) -> str:
    names = {**summary["tasks"], "macro": "macro average"}
    untouched = summary["test"].get("untouched", {}).get("loss")
    routings = list(best["loss"])
    scored = best.get("score")
    header = ["test", *([f"score {best['used']} ↑"] if scored else []), *(f"loss {r} ↓" for r in routings)]
    header += ["loss untouched"] if untouched else []
    rows = []
    for task in best["loss"][routings[0]]:
        row = [names[task], *([f"{scored[task]:.3f}"] if scored else [])]
        row += [f"{best['loss'][r][task]:.3f}" for r in routings]
        row += [f"{untouched[task]:.3f}"] if untouched else []
        rows.append(row)
    return table(header, rows)


def _routing(summary: dict[str, Any], best: dict[str, Any]) -> str:
    experts = [f"expert {m}" for m in range(summary["experts"])]
    rows = [[summary["tasks"][task], *map(shade, weights)] for task, weights in best["routing"].items()]
    return table(["router weights", *experts], rows)
