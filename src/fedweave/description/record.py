"""experts.json: what each expert is for. A run has one for itself; a bundle has as much of it as was asked for."""

from pathlib import Path
from typing import TypedDict

from typing_extensions import NotRequired

from fedweave.errors import UserError
from fedweave.json_files import read_json, write_json

FILE = "experts.json"
LEVELS = ("words", "examples")  # how much of the data's own text may be told


class Example(TypedDict):
    """One held-out prompt with its answers."""

    prompt: str
    answer: str  # the expert's
    bare: str  # the model's before training
    reference: str


class Expert(TypedDict):
    name: str  # given by a person; empty without
    share: float  # of the prompts that the router gives it
    words: list[str]  # that set its prompts apart, the clearest first
    clients: NotRequired[dict[str, int]]  # whose prompts they are
    tasks: NotRequired[dict[str, int]]  # labels of its prompts, where there are some
    typical: NotRequired[list[str]]  # prompts
    examples: NotRequired[list[Example]]


class Experts(TypedDict):
    """experts.json"""

    schema: int
    source: str  # whose prompts were looked at, as in "240 training prompts of 4 clients"
    round: int
    experts: list[Expert]


def read_experts(folder: Path) -> Experts | None:
    """What a run or a bundle says of its experts; None where it says nothing."""
    return read_json(folder / FILE, Experts, "remove it, and `fedweave describe` makes it again")


def write_experts(folder: Path, found: Experts) -> None:
    write_json(folder / FILE, found)


def limited(found: Experts, level: str) -> Experts:
    """As much as may be told: with ``words`` neither prompts nor answers nor whose they are."""
    if level == "examples":
        return found
    kept: list[Expert] = [{"name": e["name"], "share": e["share"], "words": e["words"]} for e in found["experts"]]
    return {**found, "experts": kept}


def title(found: Experts, expert: int) -> str:
    name = found["experts"][expert]["name"]
    return f"expert {expert}, {name}" if name else f"expert {expert}"


def rename(found: Experts, names: dict[int, str]) -> Experts:
    """The same with names that a person gave."""
    unknown = [number for number in names if not 0 <= number < len(found["experts"])]
    if unknown:
        raise UserError(f"there is no expert {unknown[0]}; the model has experts 0 to {len(found['experts']) - 1}.")
    renamed: list[Expert] = [{**e, "name": names.get(m, e["name"])} for m, e in enumerate(found["experts"])]
    return {**found, "experts": renamed}
