"""Was it worth it? A run against each client alone and against one shared adapter, client by client.

The clients are the sample: each has a figure under both, so differences are paired, and their spread says how far
the clients agree. It does not say how another seed would turn out.
"""

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypedDict

import numpy as np
from scipy.stats import t as student

from fedweave.console import table
from fedweave.errors import UserError
from fedweave.json_files import read_json
from fedweave.schema import ClientFigures, Tested

FILE = "worth.json"
REFERENCES = {"local-only": "alone", "fedit": "one adapter"}  # method -> what it stands for
Figure = Literal["score", "loss"]
ByClient = Mapping[str, ClientFigures]


class Paired(TypedDict):
    """One figure of the same clients under two methods."""

    figure: Figure
    ours: float  # means over clients
    theirs: float
    gain: float  # above 0: ours is better, in scores and in losses
    low: float | None
    high: float | None  # 95 % interval of the gain; one client has none
    better: int
    worse: int
    clients: int


class Worth(TypedDict):
    """worth.json"""

    method: str
    experts: int
    clients: dict[str, dict[str, ClientFigures]]  # client -> ours, alone, one adapter
    against: dict[str, list[Paired]]  # reference -> scores, where there are some, and losses
    answer: str


def worth(method: str, experts: int, ours: Tested, references: Mapping[str, Tested]) -> Worth:
    """``references`` by method: the same clients' tests under each."""
    named = {"ours": ours, **{REFERENCES[name]: tested for name, tested in references.items()}}
    figures = {name: tested.get("clients", {}) for name, tested in named.items()}
    clients = [name for name in figures["ours"] if all(name in measured for measured in figures.values())]
    scored = all("score" in figures[name][client] for name in figures for client in clients)
    kinds: tuple[Figure, ...] = ("score", "loss") if scored else ("loss",)
    against = {
        name: [paired(kind, figures["ours"], figures[name], clients) for kind in kinds]
        for name in figures
        if name != "ours"
    }
    return {
        "method": method,
        "experts": experts,
        "clients": {client: {name: figures[name][client] for name in figures} for client in clients},
        "against": against,
        "answer": answer(against, experts),
    }


def read_worth(run: Path) -> Worth | None:
    """What a run has been held against; None where it has not."""
    mend = f"`fedweave worth {run}` makes it again"
    found = read_json(run / FILE, Worth, mend)
    if found is not None and not _fits(found):
        raise UserError(f"{run / FILE} is damaged (its parts do not belong together); {mend}.")
    return found


def _fits(found: Worth) -> bool:
    """Whether every client has every figure under everything that the run is held against."""
    names, against = {"ours", *found["against"]}, found["against"]
    measured = [figures for each in found["clients"].values() for figures in each.values()]
    return (
        bool(measured)
        and set(against) <= set(REFERENCES.values())
        and all(figures for figures in against.values())
        and all(set(each) == names for each in found["clients"].values())
        and all(kind in figures for kind in kinds(found) for figures in measured)
    )


def paired(figure: Figure, ours: ByClient, theirs: ByClient, clients: list[str]) -> Paired:
    mine = np.array([value(ours[client], figure) for client in clients])
    other = np.array([value(theirs[client], figure) for client in clients])
    gains = mine - other if figure == "score" else other - mine
    n = len(gains)
    half = float(student.ppf(0.975, n - 1) * gains.std(ddof=1) / np.sqrt(n)) if n > 1 else None
    mean = float(gains.mean())
    return {
        "figure": figure,
        "ours": float(mine.mean()),
        "theirs": float(other.mean()),
        "gain": mean,
        "low": None if half is None else mean - half,
        "high": None if half is None else mean + half,
        "better": int((gains > 1e-9).sum()),
        "worse": int((gains < -1e-9).sum()),
        "clients": n,
    }


def value(figures: ClientFigures, figure: Figure) -> float:
    return figures["score"] if figure == "score" else figures["loss"]


# -------------------------------------------------------------------------------------- in words


def verdict(found: Paired) -> Literal["better", "worse", "unclear"]:
    """Only what the whole interval says."""
    if found["low"] is None or found["high"] is None:
        return "unclear"
    return "better" if found["low"] > 0 else "worse" if found["high"] < 0 else "unclear"


def answer(against: Mapping[str, list[Paired]], experts: int) -> str:
    """One sentence for each reference; scores speak first, losses where they do not."""
    parts = []
    for name, figures in against.items():
        told = next((found for found in figures if verdict(found) != "unclear"), figures[0])
        what = f"{experts} experts" if experts > 1 else "This method"
        if name == "alone":
            said = {"better": "Federating was worth it", "worse": "Federating did harm"}
            unclear, helped = "Federating made no clear difference", "Federating helped every client here"
        else:
            said = {
                "better": f"{what} beat one shared adapter",
                "worse": f"{what} did worse than one shared adapter",
            }
            unclear = f"{what} and one shared adapter differ by nothing clear"
            helped = f"{what} beat one shared adapter at every client here"
        if told["better"] == told["clients"] > 1:
            unclear = f"{helped}, by amounts too uneven, or at clients too few, to be sure"
        parts.append(f"{said.get(verdict(told), unclear)}: {evidence(told, name)}.")
    return " ".join(parts)


def evidence(found: Paired, name: str) -> str:
    """The figures behind a verdict."""
    than = "when every client trains alone" if name == "alone" else "with one adapter for all"
    means = f"mean {found['figure']} {found['ours']:.3f} against {found['theirs']:.3f} {than}"
    if found["low"] is None or found["high"] is None:
        return f"{means}, at one client, which proves nothing"
    counts = f"better for {found['better']} and worse for {found['worse']} of {found['clients']} clients"
    return f"{means}, {counts}, 95 % interval of the gain {found['low']:+.3f} to {found['high']:+.3f}"


def rows(found: Worth, figure: Figure) -> tuple[list[str], list[list[str]]]:
    """(header, rows) of the figure for every client."""
    names = list(next(iter(found["clients"].values()), {}))
    titles = [found["method"] if name == "ours" else name for name in names]
    body = [
        [client, *(f"{value(measured[name], figure):.3f}" for name in names)]
        for client, measured in found["clients"].items()
    ]
    means = [
        float(np.mean([value(measured[name], figure) for measured in found["clients"].values()])) for name in names
    ]
    arrow = "↑" if figure == "score" else "↓"
    return [f"{figure} {arrow}", *titles], [*body, ["mean of clients", *(f"{mean:.3f}" for mean in means)]]


def kinds(found: Worth) -> list[Figure]:
    return [paired["figure"] for paired in next(iter(found["against"].values()), [])]


CAVEAT = (
    "One seed, and every method with this run's settings; the intervals say how far clients agree, not how another "
    "seed or a rate chosen for each method would turn out."
)


def worth_text(found: Worth) -> str:
    tables = [table(*rows(found, figure)) for figure in kinds(found)]
    return "\n\n".join([*tables, textwrap.fill(found["answer"], 116), textwrap.fill(CAVEAT, 116)])
