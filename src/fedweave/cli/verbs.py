"""How a family of verbs registers itself: one call per verb, shared arguments in one place."""

import argparse
import os
import shlex
from collections.abc import Callable
from typing import Any

from fedweave.console import Console
from fedweave.errors import UserError, first_line

Run = Callable[[argparse.Namespace, Console], int | None]  # the exit code, where it is not 0


class Verbs:
    """The verbs of ``fedweave``; ``add`` gives the verb's own parser, to which its arguments are added."""

    def __init__(self, parser: argparse.ArgumentParser):
        self._verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")

    def add(self, name: str, run: Run, help: str) -> argparse.ArgumentParser:
        parser = self._verbs.add_parser(name, help=help, description=help)
        parser.set_defaults(run=run)
        return parser


SHARED: dict[str, dict[str, Any]] = {  # arguments that several verbs have
    # settings; `main` also takes them after options, where argparse takes no positionals
    "overrides": {"nargs": "*", "metavar": "key=value", "help": "config overrides, as in training.rounds=5"},
    "--quiet": {"action": "store_true", "help": "no progress, no table"},
    "--last": {"action": "store_true", "help": "the last round instead of the best"},
    "--backbone": {"metavar": "MODEL", "help": "where the backbone lies, if elsewhere than trained"},
    "--checkpoint": {
        "type": int, "metavar": "ROUND", "help": "the run as it stood after this round, if it is still kept"
    },
    "--doubt": {
        "type": float, "metavar": "TIMES",
        "help": "experts answer prompts up to so many times as strange as router.familiar allows (default 1)",
    },
}  # fmt: skip


def shared(parser: argparse._ActionsContainer, *names: str) -> None:
    for name in names:
        parser.add_argument(name, **SHARED[name])


def with_environment(typed: list[str]) -> list[str]:
    """Settings of this machine from FEDWEAVE_OVERRIDES ("key=value …"), then what was typed, which wins."""
    text = os.environ.get("FEDWEAVE_OVERRIDES", "")
    try:
        return [*shlex.split(text), *typed]
    except ValueError as error:
        raise UserError(
            f"FEDWEAVE_OVERRIDES={text!r} cannot be split into settings: {first_line(error)}."
        ) from None
