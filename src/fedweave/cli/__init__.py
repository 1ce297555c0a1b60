"""The command line: ``fedweave VERB …``. Every mistake a user can make ends in one sentence and exit code 2.

Each module of this package holds one family of verbs and lists them in ``register``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import fedweave
from fedweave.cli import analyse, check, deliver, deploy, explain, look, show, train, use
from fedweave.cli.verbs import Verbs
from fedweave.console import Console
from fedweave.errors import UserError

FAMILIES = (train, check, deploy, use, explain, deliver, show, analyse, look)


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    arguments, extra = parser.parse_known_args(argv)
    # argparse takes no positionals after an option; overrides may stand anywhere
    if extra and hasattr(arguments, "overrides") and all("=" in e and not e.startswith("-") for e in extra):
        arguments.overrides += extra
    elif extra:
        parser.error(f"unrecognized arguments: {' '.join(extra)}")
    console = Console(quiet=getattr(arguments, "quiet", False) or int(os.environ.get("RANK", 0)) > 0)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        return arguments.run(arguments, console) or 0
    except UserError as error:
        print(f"fedweave: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fedweave: interrupted; `fedweave resume RUN` goes on from the last checkpoint.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `fedweave … | head`
        sys.stderr.close()
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fedweave", description="Federated mixture-of-LoRA-experts fine-tuning.")
    parser.add_argument("--version", action="version", version=f"fedweave {fedweave.__version__}")
    verbs = Verbs(parser)
    for family in FAMILIES:
        family.register(verbs)
    return parser
