"""A user's own metric: a Python function that the config names as ``module:function``.

Only a config may name one, never a file of the data: data does not run code.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import SupportsFloat

from fedweave.errors import UserError, first_line


def user_metric(name: str) -> Callable[[str, str], float]:
    """The function, looked up from the current folder too, with its answers checked."""
    function = _load(name)

    def score(prediction: str, reference: str) -> float:
        try:
            value = function(prediction, reference)
        except Exception as error:  # whatever a stranger's code raises
            raise UserError(
                f"evaluation.metrics: {name} fails on the answer {_short(prediction)} to {_short(reference)} "
                f"({type(error).__name__}: {first_line(error)})."
            ) from error
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = float("nan")
        if not 0.0 <= number <= 1.0:
            raise UserError(f"evaluation.metrics: {name} must give a number between 0 and 1, not {_short(value)}.")
        return number

    return score


def _load(name: str) -> Callable[[str, str], SupportsFloat]:
    module, _, attribute = name.partition(":")
    before = list(sys.path)
    sys.path.append(os.getcwd())
    importlib.invalidate_caches()
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # importing runs a stranger's code
        raise UserError(
            f"evaluation.metrics: {name} cannot be loaded ({type(error).__name__}: {first_line(error)}); it names "
            "a module of this folder or of an installed package and a function in it, as in my_metrics:score."
        ) from error
    finally:
        sys.path[:] = before
    if not callable(found):
        raise UserError(f"evaluation.metrics: {name} is no function of (prediction, reference).")
    return found


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
