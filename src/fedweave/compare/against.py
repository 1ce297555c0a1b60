"""The second table of a comparison with hostile clients or with privacy: by how much either moves the loss of a run
with the same seed and without it."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fedweave.aggregation.robust import FOR_STRANGERS, RULES, chosen_rule
from fedweave.compare.grid import Cell
from fedweave.schema import Summary

# of attacks, as the config lists them
KINDS = ("none", "absent", "flip", "shout", "claim", "inflate", "labels", "bucket")
NO_ATTACK = ("none", "absent")
# hostile clients, the most by which they may move the macro loss, and under which rule; none: the best
BARS = ((0.05, 0.02, FOR_STRANGERS), (0.3, 0.05, ""))
_MOST_TASKS = 12  # of a table
Losses = dict[int, dict[str, float]]  # seed -> task -> loss
Case = tuple[float, str, str]  # share of hostile clients, attack, rule
Finished = Sequence[tuple[Cell, Summary]]
# axes that the rows of the tables tell; whatever else a grid varies has tables of its own
_ATTACK_AXES = ("attack.clients", "attack.kind", "federation.rule", "federation.quarantine", "seed")
_PRIVATE_AXES = ("data.clients", "privacy.level", "privacy.epsilon", "discovery.max_buckets", "seed")


def attack_table(finished: Finished, left: Sequence[Cell] = ()) -> str:
    """Markdown: the worst that any attack of a size does to a rule, and what every attack does to every task. Each
    is held against honest clients with the same rule and the same seeds, and against a federation without the
    hostile ones, since a rule that leaves them out can do no better. Nothing where nobody attacks. ``left`` are
    cells that have not finished: a bar is not met while one of its attacks is to come."""

    def table(part: Finished, place: str) -> str:
        return _attack_table(part, [cell for cell in left if _place_of(cell, varied) == place])

    varied = _varied([*(cell for cell, _ in finished), *left], _ATTACK_AXES)
    return _for_each(finished, varied, table)


def private_table(finished: Finished) -> str:
    """Markdown: what every level and ε costs, against no privacy with the same clients and buckets, and with the
    most buckets. Nothing where there is no privacy, or nothing else."""
    varied = _varied([cell for cell, _ in finished], _PRIVATE_AXES)
    return _for_each(finished, varied, lambda part, _: _private_table(part))


def _varied(cells: Sequence[Cell], told: Sequence[str]) -> list[str]:
    """Axes of which these cells have several values, but for those that a table's own rows tell."""
    axes = [axis for axis in (cells[0].values if cells else ()) if axis not in told]
    return [axis for axis in axes if len({str(cell.values[axis]) for cell in cells}) > 1]


def _place_of(cell: Cell, varied: Sequence[str]) -> str:
    return ", ".join(f"{axis}={cell.values[axis]}" for axis in varied)


def _for_each(finished: Finished, varied: Sequence[str], table: Callable[[Finished, str], str]) -> str:
    """A table for every combination of what else varies: one of all would show the last cell of each row."""
    places = dict.fromkeys(_place_of(cell, varied) for cell, _ in finished)
    made = {
        place: table([one for one in finished if _place_of(one[0], varied) == place], place) for place in places
    }
    return "\n".join(f"**{place}**\n\n{text}" if place else text for place, text in made.items() if text)


def _attack_table(finished: Finished, left: Sequence[Cell]) -> str:
    found: dict[Case, Losses] = {}
    for cell, summary in finished:
        if last := summary["test"].get("last"):  # what a validation set of the server's own would not have avoided
            attack = cell.config.attack
            share = attack.clients if attack.kind != "none" else 0.0
            found.setdefault((share, attack.kind, _rule(cell)), {})[summary["seed"]] = last["loss"][last["used"]]
    honest = {rule: losses for (_, kind, rule), losses in found.items() if kind == "none"}
    cases = sorted(found, key=lambda case: (case[0], KINDS.index(case[1]), _place(case[2])))
    attacked = [
        case
        for case in cases
        if case[1] not in NO_ATTACK and any(s in honest.get(case[2], ()) for s in found[case])
    ]
    if not attacked:
        return ""
    default = FOR_STRANGERS if FOR_STRANGERS in honest else next(iter(honest))
    moved = {case: _moves(found[case], honest[case[2]]) for case in attacked}
    costs = {case: _moves(found[case], honest[default]) for case in cases}
    beyond = {case: _moves(found[case], _absent(found, case, default)) for case in attacked}
    tasks = list(next(iter(next(iter(honest.values())).values())))
    tasks = tasks if len(tasks) <= 1 + _MOST_TASKS else ["macro"]
    worst: dict[tuple[float, str], Case] = {}
    for case in [case for case in cases if case[1] == "none"] + sorted(attacked, key=lambda c: _mean(moved[c])):
        worst[case[0], case[2]] = case
    lines = [f"{TITLE} {default} is what sites have unless they say otherwise.", "", *_HEAD]
    for share, rule in sorted(worst, key=lambda row: (row[0], _place(row[1]))):
        case = worst[share, rule]
        figures = [_shown(moves.get(case, {}), "macro") for moves in (moved, beyond, costs)]
        lines.append(f"| {share:.0%} | {rule} | {case[1]} | {' | '.join(figures)} |")
    lines += ["", "| the bar | at most | worst attack | without them | met |", "|---|---:|---:|---:|---|"]
    for share, most, named in BARS:
        rules = {rule: case for (size, rule), case in worst.items() if size == share and named in (rule, "")}
        if rules:
            rule = min(rules, key=lambda rule: _mean(moved[rules[rule]]))
            met = _verdict(_mean(moved[rules[rule]]) <= most, share, rule, left)
            title = f"{share:.0%} of the clients against {rule}, {'the default' if named else 'the best rule'}"
            figures = [_shown(moves[rules[rule]], "macro") for moves in (moved, beyond)]
            lines.append(f"| {title} | {most:+.1%} | {' | '.join(figures)} | {met} |")
    lines += ["", "Every attack and every task, against honest clients with the same rule:", ""]
    lines += [f"| clients | attack | rule | {' | '.join(tasks)} |", f"|---|---|---|{'---:|' * len(tasks)}"]
    for share, kind, rule in [case for case in cases if case[1] != "none" and case[2] in honest]:
        figures = [_shown(_moves(found[share, kind, rule], honest[rule]), task) for task in tasks]
        lines.append(f"| {share:.0%} | {kind} | {rule} | {' | '.join(figures)} |")
    return "\n".join([*lines, ""])


def _verdict(within: bool, share: float, rule: str, left: Sequence[Cell]) -> str:
    """Whether a bar is met by every attack of every seed, as far as they have run."""
    attacks = [cell.config.attack for cell in left if _rule(cell) == rule]
    to_come = sum(attack.clients == share and attack.kind not in NO_ATTACK for attack in attacks)
    if not within:
        return "**no**"
    return f"so far; {to_come} attacks to come" if to_come else "yes"


def _private_table(finished: Finished) -> str:
    found: dict[tuple[int, str, int], Losses] = {}
    spent: dict[tuple[int, str, int], list[float]] = {}
    for cell, summary in finished:
        if best := summary["test"].get("best"):
            private = cell.config.privacy
            name = f"{private.level}, ε = {private.epsilon:g}" if private.level != "none" else "none"
            row = (cell.config.data.clients, name, cell.config.discovery.max_buckets)
            found.setdefault(row, {})[summary["seed"]] = best["loss"][best["used"]]
            if "privacy" in summary:
                spent.setdefault(row, []).append(summary["privacy"]["spent"])
    open_ones = {row: losses for row, losses in found.items() if row[1] == "none"}
    if not spent or not open_ones:
        return ""
    lines = [
        "| clients | privacy | buckets | ε spent | macro loss | none, same buckets | none, most buckets |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for clients, name, buckets in sorted(found, key=lambda row: row[0]):
        row, most = (clients, name, buckets), max((b for n, _, b in open_ones if n == clients), default=buckets)
        same, usual = (open_ones.get((clients, "none", count), {}) for count in (buckets, most))
        macro = np.mean([losses["macro"] for losses in found[row].values()])
        figures = [_shown(_moves(found[row], other), "macro") for other in (same, usual)]
        own = f"{max(spent[row]):.2f}" if row in spent else "∞"
        lines.append(f"| {clients} | {name} | {buckets} | {own} | {macro:.4f} | {' | '.join(figures)} |")
    return "\n".join(
        ["What privacy costs, against none with the same clients (± is the deviation over seeds):", "", *lines, ""]
    )


TITLE = "By how much hostile clients move the loss of the last round (± is the deviation over seeds)."
_HEAD = [
    "| clients | rule | worst attack | macro, same rule honest | without them | default honest |",
    "|---|---|---|---:|---:|---:|",
]


def _absent(found: Mapping[Case, Losses], case: Case, default: str) -> Losses:
    """A federation without the hostile clients of a case: by its rule, or by the default."""
    share, _, rule = case
    return found.get((share, "absent", rule)) or found.get((share, "absent", default)) or {}


def _rule(cell: Cell) -> str:
    return chosen_rule(cell.config) + (", quarantine" if cell.config.federation.quarantine else "")


def _place(rule: str) -> tuple[int, str]:
    """Where a rule stands in a table."""
    return [*RULES].index(rule.partition(",")[0]), rule


def _moves(attacked: Losses, honest: Losses) -> dict[str, list[float]]:
    """task -> how much higher its loss is, for every seed that both have."""
    seeds = [seed for seed in attacked if seed in honest]
    tasks = attacked[seeds[0]] if seeds else {"macro": 0.0}
    return {task: [attacked[seed][task] / honest[seed][task] - 1 for seed in seeds] for task in tasks}


def _mean(moves: Mapping[str, list[float]]) -> float:
    """Of the macro loss; what shares no seed with honest clients has moved by nothing that is known."""
    return float(np.mean(moves["macro"])) if moves["macro"] else 0.0


def _shown(moves: Mapping[str, list[float]], task: str) -> str:
    found = moves.get(task, [])
    if not found:
        return "–"
    return f"{np.mean(found):+.1%}" + (f" ± {100 * np.std(found, ddof=1):.1f}" if len(found) > 1 else "")
