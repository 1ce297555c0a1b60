"""The one exception that is shown to a user as a sentence instead of a traceback."""

import difflib
import importlib
from collections.abc import Iterable
from types import ModuleType


class UserError(Exception):
    """Something the user can mend. The message says what is wrong and what to do; the CLI exits with 2."""


def needed(package: str, sentence: str) -> ModuleType:
    """A package that not everybody has installed; where it is missing the sentence says how to get it."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise UserError(sentence) from None


def nearest(word: str, valid: Iterable[str]) -> str:
    """A hint that names the closest valid word, else all of them."""
    valid = list(valid)
    close = difflib.get_close_matches(word, valid, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"valid: {', '.join(valid)}."


def first_line(error: BaseException) -> str:
    """Another library's message, short enough to stand inside a sentence."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
