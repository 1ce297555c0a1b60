"""experts.json: what each expert is for. A run has one for itself; a bundle has as much of it as was asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

from fedweave.errors import UserError
from fedweave.files import write_atomic

if TYPE_CHECKING:
    from typing import NotRequired

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

    schema: Literal[1]
    source: str  # whose prompts were looked at, as in "240 training prompts of 4 clients"
    round: int
    experts: list[Expert]


def read_experts(folder: Path) -> Experts | None:
    """What a run or a bundle says of its experts; None where it says nothing."""
    try:
        found: Experts = json.loads((folder / FILE).read_text(encoding="utf-8"))
        if found["schema"] != 1 or not isinstance(found["source"], str) or not all(map(_whole, found["experts"])):
            raise ValueError
        int(found["round"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        raise UserError(f"{folder / FILE} is damaged; remove it, and `fedweave describe` makes it again.") from None
    return found


def _whole(expert: Expert) -> bool:
    """Whether all parts have their types; one that is missing raises."""
    counts = [*expert.get("clients", {}).values(), *expert.get("tasks", {}).values()]
    texts = [expert["name"], *expert["words"], *expert.get("typical", [])]
    for example in expert.get("examples", []):
        texts += [example["prompt"], example["answer"], example["bare"], example["reference"]]
    return (
        isinstance(expert["share"], float)
        and all(isinstance(n, int) for n in counts)
        and all(isinstance(text, str) for text in texts)
    )


def write_experts(folder: Path, found: Experts) -> None:
    write_atomic(folder / FILE, json.dumps(found, ensure_ascii=False, indent=1))


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
