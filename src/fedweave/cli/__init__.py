"""The command line: ``fedweave VERB …``. Every mistake a user can make ends in one sentence and exit code 2.

Each module of this package holds one family of verbs and lists them in ``register``.
"""

import argparse
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import fedweave
from fedweave.cli import analyse, check, deliver, deploy, look, show, train, use
from fedweave.cli.verbs import Verbs
from fedweave.config import Config
from fedweave.console import Console, printable
from fedweave.errors import UserError
from fedweave.settings import describe, environment_number

FAMILIES = (train, check, deploy, use, show, deliver, analyse, look)


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    arguments, extra = parser.parse_known_args(argv)
    # argparse takes no positionals after an option; overrides may stand anywhere
    if extra and hasattr(arguments, "overrides") and all("=" in e and not e.startswith("-") for e in extra):
        arguments.overrides += extra
    elif extra:
        parser.error(f"unrecognized arguments: {' '.join(extra)}{_as_setting(extra, arguments)}")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        with _terminated_like_interrupted():
            console = Console(quiet=getattr(arguments, "quiet", False) or environment_number("RANK", 0) > 0)
            return arguments.run(arguments, console) or 0
    except UserError as error:
        return _complain(str(error))
    except KeyboardInterrupt as interrupt:
        _complain("; ".join(["interrupted", *map(str, interrupt.args)]) + ".")
        return 130
    except BrokenPipeError:  # `fedweave … | head`
        sys.stderr.close()
        return 0
    except OSError as error:  # a file or folder that cannot be read or written, wherever it is
        if error.filename is None or error.strerror is None:
            raise
        return _complain(f"{error.filename} cannot be used: {error.strerror}.")
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not re.search("out of memory|can't allocate memory", str(error)):
            raise
        return _complain(
            "there is not enough memory for this; ask for less at a time: smaller batches, shorter answers, lower "
            "ranks."
        )


def _as_setting(extra: Sequence[str], arguments: argparse.Namespace) -> str:
    """How to type an unknown option that is a config key, where the verb takes those."""
    if not hasattr(arguments, "overrides") or not extra[0].startswith("--"):
        return ""
    option, equals, value = extra[0].removeprefix("--").partition("=")
    name, value = option.replace("-", "_"), value if equals else " ".join(extra[1:2])
    keys = [key for key, *_ in describe(Config) if name in (key, key.rpartition(".")[2])]
    typed = " or ".join(f"{key}={value}" for key in sorted(keys, key=len))
    return f"; settings have no dashes: {typed}" if typed else ""


def _complain(sentence: str) -> int:
    print(f"fedweave: {printable(' '.join(sentence.splitlines()))}", file=sys.stderr)
    return 2


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM, which queues and containers send, ends a command as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fedweave", description="Federated mixture-of-LoRA-experts fine-tuning.")
    parser.add_argument("--version", action="version", version=f"fedweave {fedweave.__version__}")
    verbs = Verbs(parser)
    for family in FAMILIES:
        family.register(verbs)
    return parser
