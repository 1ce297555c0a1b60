"""How much of a drift study is chance: python -m benchmarks.drift_noise docs/results/drift-course.json

By how much the loss on new kinds moves from round to round beside its trend, and by how much each arm lies above
the oracle, kind by kind: five rounds after the kind came, as in the bar, and over several rounds together.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

ORACLE = "drift, oracle, off"
ARMS = ("drift, fedweave, open", "drift, fedweave, off", ORACLE)
AFTER = 5  # as in the bar


def wobble(losses: list[float]) -> float:
    """The standard deviation of what is no trend: of second differences, which have six times the variance."""
    return float(np.sqrt(np.mean(np.diff(losses, 2) ** 2) / 6))


def window(course: dict[str, float], rounds: range) -> float:
    return float(np.mean([course[str(t)] for t in rounds]))


def lines(courses: list[dict]) -> list[str]:
    arms = {(one["title"], one["seed"]): one for one in courses}
    seeds = sorted({seed for title, seed in arms if title == ORACLE})
    came = arms[ORACLE, seeds[0]]["came"]
    last = max(int(t) for t in arms[ORACLE, seeds[0]]["old"])
    settled = range(max(came.values()) + 1, last + 1)
    found = ["| mean loss on new kinds, from round to round | " + " | ".join(map(str, seeds)) + " |"]
    found += ["|---|" + "---:|" * len(seeds)]
    for title in ARMS:
        own = [arms[title, seed]["new"] for seed in seeds]
        means = [[np.mean([new[kind][str(t)] for kind in came]) for t in settled] for new in own]
        shares = [f"{wobble(one) / np.mean(one):.1%}" for one in means]
        found += [f"| {title} | {' | '.join(shares)} |"]
    found += ["", "| above the oracle | rounds | " + " | ".join(map(str, seeds)) + " | mean |"]
    found += ["|---|---|" + "---:|" * (len(seeds) + 1)]
    for kind, first in came.items():
        spans = range(first, first + 2), range(first + 2, first + 7), range(last - 3, last + 1)
        for title in ARMS[:2]:
            for rounds in (range(first + AFTER - 1, first + AFTER), *spans):
                above = [
                    window(arms[title, seed]["new"][kind], rounds) - window(arms[ORACLE, seed]["new"][kind], rounds)
                    for seed in seeds
                ]
                named = f"{rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else f"{rounds[0]}"
                values = " | ".join(f"{one:+.3f}" for one in [*above, float(np.mean(above))])
                found += [f"| {kind}: {title} | {named} | {values} |"]
    return found


if __name__ == "__main__":
    print("\n".join(lines(json.loads(Path(sys.argv[1]).read_text()))))
