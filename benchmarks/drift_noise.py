"""How much of a drift study is chance: python -m benchmarks.drift_noise docs/results/drift-course.json

By how much the loss on new kinds moves from round to round beside its trend; by how much each arm lies above the
oracle, kind by kind and for both, five rounds after they came, as in the bar, and over several rounds together; by
how much noticing lies above not noticing, and what each has in a kind's first round; and by how much kinds that
stayed lie above a run to which nothing comes. Shares have the 95 % interval of their mean.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from scipy import stats

ORACLE, STILL = "drift, oracle, off", "still, fedweave, open"
ARMS = ("drift, fedweave, open", "drift, fedweave, off", ORACLE)
AFTER = 5  # as in the bar


def wobble(losses: list[float]) -> float:
    """The standard deviation of what is no trend: of second differences, which have six times the variance."""
    return float(np.sqrt(np.mean(np.diff(losses, 2) ** 2) / 6))


def window(course: dict[str, float], rounds: range) -> float:
    return float(np.mean([course[str(t)] for t in rounds]))


def soon(run: dict, after: range) -> float:
    """Mean loss of the kinds that came, each so many rounds of training after it did."""
    return float(
        np.mean([run["new"][kind][str(first + n - 1)] for kind, first in run["came"].items() for n in after])
    )


def new_kinds(run: dict, t: int) -> float:
    """Mean loss of the kinds that came, in one round."""
    return float(np.mean([run["new"][kind][str(t)] for kind in run["came"]]))


def named(rounds: range) -> str:
    return f"{rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else str(rounds[0])


def row(title: str, values: Sequence[float], shown: str, mean: str = "") -> str:
    return f"| {' | '.join([title, *(format(one, shown) for one in values), *([mean] if mean else [])])} |"


def head(title: str, columns: Sequence[object]) -> list[str]:
    return ["", f"| {title} | {' | '.join(map(str, columns))} |", f"|---|{'---:|' * len(columns)}"]


def lines(courses: list[dict]) -> Iterator[str]:
    arms = {(one["title"], one["seed"]): one for one in courses}
    seeds = sorted({seed for title, seed in arms if title == ORACLE})
    came = arms[ORACLE, seeds[0]]["came"]
    last = max(int(t) for t in arms[ORACLE, seeds[0]]["old"])

    def compared(title: str, other: str, figure: Callable[[dict], float]) -> list[tuple[float, float]]:
        return [(figure(arms[title, seed]), figure(arms[other, seed])) for seed in seeds]

    def shares(label: str, pairs: list[tuple[float, float]]) -> str:
        found = [ours / theirs - 1 for ours, theirs in pairs]
        half = stats.sem(found) * stats.t.ppf(0.975, len(found) - 1) if len(found) > 1 else np.nan
        return row(label, found, "+.2%", f"{np.mean(found):+.2%} ± {half:.2%}")

    settled = range(max(came.values()) + 1, last + 1)
    yield from head("mean loss on new kinds, from round to round", seeds)[1:]
    for title in ARMS:
        own = [arms[title, seed]["new"] for seed in seeds]
        means = [[float(np.mean([new[kind][str(t)] for kind in came])) for t in settled] for new in own]
        yield row(title, [wobble(one) / float(np.mean(one)) for one in means], ".1%")

    yield from head("above the oracle, a kind alone, rounds", [*seeds, "mean"])
    for kind, first in came.items():
        spans = range(first, first + 2), range(first + 2, first + 7), range(last - 3, last + 1)
        for title in ARMS[:2]:
            for rounds in (range(first + AFTER - 1, first + AFTER), *spans):
                pairs = compared(title, ORACLE, lambda run: window(run["new"][kind], rounds))  # noqa: B023
                above = [ours - theirs for ours, theirs in pairs]
                yield row(f"{kind}: {title}, {named(rounds)}", [*above, float(np.mean(above))], "+.3f")

    yield from head("above the oracle, both kinds, rounds after they came", [*seeds, "mean"])
    for title in ARMS[:2]:
        for after in (range(AFTER, AFTER + 1), range(AFTER - 2, AFTER + 3)):
            pairs = compared(title, ORACLE, lambda run: soon(run, after))  # noqa: B023
            yield shares(f"{title}, {named(after)}", pairs)

    yield from head("noticing above not noticing, both kinds, rounds after they came", [*seeds, "mean"])
    for after in (range(1, 2), range(AFTER, AFTER + 1), range(AFTER - 2, AFTER + 3)):
        yield shares(named(after), compared(*ARMS[:2], partial(soon, after=after)))
    yield shares("in the last round", compared(*ARMS[:2], partial(new_kinds, t=last)))

    yield from head("loss in the first round of a kind", [*seeds, "mean"])
    for kind, first in came.items():
        for title in ARMS:
            losses = [arms[title, seed]["new"][kind][str(first)] for seed in seeds]
            yield row(f"round {first}, {kind}: {title}", [*losses, float(np.mean(losses))], ".2f")

    yield from head("kinds that stayed, above a run to which nothing comes, rounds", [*seeds, "mean"])
    for title in ARMS:
        for rounds in (range(last, last + 1), range(last - 4, last + 1)):
            pairs = compared(title, STILL, lambda run: window(run["old"], rounds))  # noqa: B023
            yield shares(f"{title}, {named(rounds)}", pairs)


if __name__ == "__main__":
    print("\n".join(lines(json.loads(Path(sys.argv[1]).read_text()))))
