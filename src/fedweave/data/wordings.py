"""How an instruction and its text become a prompt: one wording for every row, or another one for each.

A wording is a template with ``{text}`` (the row's own input) and, where it wants them, ``{instruction}`` and
``{short}`` (a few words of the instruction). ``data.wording=varied`` draws one of its task's wordings for every
row, by the seed and the row's origin alone: people ask for the same thing in different words.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fedweave.errors import UserError
from fedweave.streams import stream_key

USUAL = "{instruction}\n\n{text}"

# For a task that brings none of its own: the instruction before or after, whole or shortened, or missing.
WORDINGS = (
    USUAL,
    "{text}\n\n{instruction}",
    "{short}\n{text}",
    "{text}\n{short}",
    "{text}",
    "Hello! Can you help me with this?\n{instruction}\n\n{text}\n\nThank you.",
    "Input: {text}\nTask: {instruction}",
    "{text}\n\nThat was the input. {short} What do you answer?",
)

_PLACE = re.compile(r"\{(instruction|text|short)\}")


@dataclass(frozen=True)
class Request:
    """What a row asks for, before it is put into words."""

    instruction: str
    text: str
    short: str = ""  # the instruction in a few words; its first sentence where there are none


def check_wording(template: object, where: str) -> str:
    if not isinstance(template, str) or "{text}" not in template:
        raise UserError(f"{where}: a wording must be a text with {{text}} in it, not {template!r}.")
    return template


def render(template: str, request: Request) -> str:
    """The prompt. Braces in a row's own text stay what they are."""
    short = request.short or re.split(r"(?<=[.!?])\s", request.instruction.strip(), maxsplit=1)[0]
    values = {"instruction": request.instruction, "text": request.text, "short": short}
    return _PLACE.sub(lambda found: values[found.group(1)], template).strip()


def choose(wordings: Sequence[str], varied: bool, seed: int, origin: str) -> str:
    """The template of one row: its task's first, or one drawn for it."""
    return wordings[stream_key("wording", seed, origin) % len(wordings)] if varied else wordings[0]
