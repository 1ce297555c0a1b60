"""Verbs that show what a run came to: report, watch, describe, worth."""

import argparse
import json
import time
from pathlib import Path

from fedweave.cli.verbs import Verbs, shared
from fedweave.console import Console, show
from fedweave.errors import UserError


def register(verbs: Verbs) -> None:
    report = verbs.add(
        "report", _report, "One self-contained HTML page about runs or a comparison, with its figures."
    )
    report.add_argument(
        "folders", nargs="+", type=Path, metavar="RUN", help="run folders, or a comparison's folder"
    )
    report.add_argument("--output", type=Path, help="the page; RUN/report.html when empty")
    report.add_argument("--watch", action="store_true", help="write it again every few seconds while a run goes on")
    watch = verbs.add("watch", _watch, "A run in the terminal: round, losses, experts' load, time left.")
    watch.add_argument("folder", type=Path, help="the run folder")
    watch.add_argument("--once", action="store_true", help="show it once and leave")
    describe = verbs.add(
        "describe", _describe, "What each expert is: words that set it apart, typical prompts, clients, answers."
    )
    describe.add_argument("folder", type=Path, help="a run folder or a bundle")
    describe.add_argument(
        "--data", type=Path, help="describe by these rows instead: a file, or a folder with a file for each client"
    )
    describe.add_argument(
        "--name",
        action="append",
        metavar="K=NAME",
        default=[],
        help="call expert K so, here and wherever it is shown",
    )
    describe.add_argument("--json", action="store_true", help="print JSON instead of text")
    shared(describe, "--backbone", "--last", "--quiet")
    worth = verbs.add("worth", _worth, "Was it worth it? A run against every client alone and one shared adapter.")
    worth.add_argument("folder", type=Path, help="a finished run; the two references are trained into it once")
    worth.add_argument("--json", action="store_true", help="print JSON instead of tables")
    shared(worth, "--backbone", "--quiet")


def _report(arguments: argparse.Namespace, console: Console) -> None:
    from fedweave.report import REFRESH, write_report

    page, running = write_report(arguments.folders, arguments.output)
    console.say(f"{page} written" + ("; it refreshes itself while the run goes on." if running else "."))
    while arguments.watch and running:
        time.sleep(REFRESH)
        page, running = write_report(arguments.folders, arguments.output)
    print(page)


def _watch(arguments: argparse.Namespace, console: Console) -> None:
    from fedweave.report.live import watch

    watch(arguments.folder, arguments.once)


def _describe(arguments: argparse.Namespace, console: Console) -> None:
    from fedweave.description.text import experts_text
    from fedweave.runs.describing import describe_folder

    names = dict(map(_name, arguments.name))
    found = describe_folder(arguments.folder, arguments.data, arguments.last, names, console, arguments.backbone)
    show(json.dumps(found, ensure_ascii=False, indent=1) if arguments.json else experts_text(found))


def _worth(arguments: argparse.Namespace, console: Console) -> None:
    from fedweave.analysis.worth import worth_text
    from fedweave.compare.worth import weigh

    found = weigh(arguments.folder, console, arguments.backbone)
    show(json.dumps(found, ensure_ascii=False, indent=1) if arguments.json else worth_text(found))


def _name(text: str) -> tuple[int, str]:
    number, equals, name = text.partition("=")
    if not equals or not number.strip().isdecimal():
        raise UserError(f"--name {text!r} names no expert; write --name 0=Grammar.")
    name = " ".join(name.split())
    if len(name) > 60 or not name.isprintable():
        raise UserError(f"--name {text!r}: a name has at most 60 printable characters.")
    return int(number), name
