"""The second table of a comparison with hostile clients: what each rule saves, and what it costs."""

from collections.abc import Sequence

import numpy as np

from fedweave.aggregation.robust import RULES, chosen_rule
from fedweave.compare.grid import Cell
from fedweave.schema import Summary

KINDS = ("none", "flip", "shout", "inflate", "labels", "bucket")  # of attacks, as the config lists them
Losses = dict[tuple[str, float, str], dict[int, dict[str, float]]]  # attack, share, rule -> seed -> task -> loss


def attack_table(finished: Sequence[tuple[Cell, Summary]]) -> str:
    """Markdown: by how much every attack moves the macro loss, and that of the task which it moves most, against
    the mean of honest clients with the same seed; a column for every rule. Nothing where nobody attacks."""
    losses: Losses = {}
    for cell, summary in finished:
        if last := summary["test"].get("last"):  # what a validation set of the server's own would not have avoided
            attack, rule = cell.config.attack, chosen_rule(cell.config)
            share = attack.clients if attack.kind != "none" else 0.0
            losses.setdefault((attack.kind, share, rule), {})[summary["seed"]] = last["loss"][last["used"]]
    kinds = {kind for kind, _, _ in losses}
    rules = sorted({rule for _, _, rule in losses}, key=[*RULES].index)
    honest = next((found for (kind, _, rule), found in losses.items() if kind == "none" and rule == "mean"), None)
    if kinds <= {"none"} or honest is None:
        return ""
    lines = [f"| attack | clients | {' | '.join(rules)} |", f"|---|---|{'---:|' * len(rules)}"]
    order = {kind: place for place, kind in enumerate(KINDS)}
    for kind, share in sorted(
        {(kind, share) for kind, share, _ in losses}, key=lambda row: (order[row[0]], row[1])
    ):
        shown = [_moved(losses.get((kind, share, rule), {}), honest) for rule in rules]
        lines.append(f"| {kind} | {share:.0%} | {' | '.join(shown)} |")
    return "\n".join([TITLE, "", *lines, ""])


TITLE = "Macro loss of the last round against the mean of honest clients, and in brackets the task that moved most:"


def _moved(attacked: dict[int, dict[str, float]], honest: dict[int, dict[str, float]]) -> str:
    seeds = [seed for seed in attacked if seed in honest]
    if not seeds:
        return "–"
    ratios = {
        task: float(np.mean([attacked[seed][task] / honest[seed][task] for seed in seeds])) - 1
        for task in honest[seeds[0]]
    }
    worst = max((task for task in ratios if task != "macro"), key=lambda task: ratios[task], default="macro")
    return f"{ratios['macro']:+.1%} ({worst} {ratios[worst]:+.1%})"
