"""A built-in sample with four clearly different instruction patterns, made from a seed.

Small counterparts of the paper's tasks (edit a sentence, solve a sum, name a mood, pick an option) that a
135M model learns within a few rounds on a laptop.
"""

from collections.abc import Callable

import numpy as np

from fedweave.data.examples import Example, Task
from fedweave.data.tasks import Pool
from fedweave.errors import UserError

_PEOPLE = ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gita", "Hugo", "Iris", "Jon", "Kira", "Leo", "Mona", "Nils"]
_PLACES = ["the market", "the school", "the park", "the library", "the station", "the beach", "the office"]
_VERBS = [  # (wrong form, right past form) followed by a place
    ("go", "went"), ("walk", "walked"), ("run", "ran"), ("drive", "drove"), ("ride", "rode"), ("come", "came"),
    ("return", "returned"), ("fly", "flew"),
]  # fmt: skip
_WHEN = ["yesterday", "last week", "on Monday", "two days ago", "last night", "this morning"]
_THINGS = ["apples", "coins", "books", "stamps", "shells", "cards", "pens", "eggs", "marbles", "keys"]
_SUBJECTS = [
    "The food",
    "The film",
    "The hotel",
    "This phone",
    "The service",
    "The concert",
    "This book",
    "The trip",
]
_GOOD = ["wonderful", "delightful", "excellent", "superb", "charming", "fantastic", "a joy", "brilliant"]
_BAD = ["terrible", "boring", "awful", "a waste of money", "disappointing", "horrible", "dreadful", "broken"]
_AFTER = [
    "Never again.",
    "Ask my friends.",
    "That is all.",
    "I mean it.",
    "What a day.",
    "Believe me.",
    "So it goes.",
]
_STRENGTH = ["really", "simply", "truly", "just", "absolutely", "quite"]
_KINDS = {
    "animal": ["dog", "horse", "whale", "sparrow", "tiger", "goat", "frog", "bear"],
    "fruit": ["pear", "mango", "plum", "cherry", "banana", "lemon", "grape", "peach"],
    "tool": ["hammer", "saw", "drill", "wrench", "pliers", "chisel", "shovel", "rake"],
    "colour": ["red", "green", "blue", "yellow", "purple", "orange", "black", "white"],
    "vehicle": ["bus", "truck", "bicycle", "train", "tram", "scooter", "van", "ferry"],
}


def _edit(rng: np.random.Generator) -> tuple[str, str]:
    wrong, right = _VERBS[rng.integers(len(_VERBS))]
    who, place, when = (str(rng.choice(x)) for x in (_PEOPLE, _PLACES, _WHEN))
    return f"Fix the grammar: {who} {wrong} to {place} {when}.", f"{who} {right} to {place} {when}."


def _sum(rng: np.random.Generator) -> tuple[str, str]:
    who, what = str(rng.choice(_PEOPLE)), str(rng.choice(_THINGS))
    a, b = int(rng.integers(2, 30)), int(rng.integers(2, 20))
    return (
        f"{who} has {a} {what} and finds {b} more. How many {what} in all?",
        f"{a} + {b} = {a + b}\n#### {a + b}",
    )


def _mood(rng: np.random.Generator) -> tuple[str, str]:
    good = bool(rng.integers(2))
    subject, strength = str(rng.choice(_SUBJECTS)), str(rng.choice(_STRENGTH))
    word = str(rng.choice(_GOOD if good else _BAD))
    text = f"Review: {subject} was {strength} {word}! {rng.choice(_AFTER)}\nMood of the review, one word:"
    return text, "positive" if good else "negative"


def _choice(rng: np.random.Generator) -> tuple[str, str]:
    kinds = [str(k) for k in rng.permutation(list(_KINDS))[:3]]
    words = [str(rng.choice(_KINDS[kind])) for kind in kinds]
    right = int(rng.integers(3))
    return f"Pick the {kinds[right]} from this list: {words[0]}, {words[1]}, {words[2]}.", words[right]


TRIES = 100_000  # twelve for each of all that some patterns have; asking for more must not take for ever

_MAKERS: dict[str, tuple[Task, Callable[[np.random.Generator], tuple[str, str]]]] = {
    "edit": (Task("edit", "Edit", "rouge", 24), _edit),
    "sum": (Task("sum", "Sum", "number", 20), _sum),
    "mood": (Task("mood", "Mood", "label", 4), _mood),
    "choice": (Task("choice", "Choice", "exact", 6), _choice),
}


def make_sample(per_task: int, seed: int) -> tuple[dict[str, Pool], dict[str, Task]]:
    """``per_task`` distinct examples of each pattern."""
    pools: dict[str, Pool] = {}
    for position, (name, (_, make)) in enumerate(_MAKERS.items()):
        rng = np.random.default_rng([seed, position])
        seen: dict[str, str] = {}
        for _ in range(min(12 * per_task, TRIES)):
            if len(seen) == per_task:
                break
            prompt, answer = make(rng)
            seen.setdefault(prompt, answer)
        if len(seen) < per_task:
            raise UserError(
                f"the built-in sample has fewer than {per_task} distinct {name!r} examples; lower data.train, "
                "data.validation or data.test."
            )
        pools[name] = [Example(p, a, name, f"sample/{name}:{n}") for n, (p, a) in enumerate(seen.items())]
    return pools, {name: task for name, (task, _) in _MAKERS.items()}
