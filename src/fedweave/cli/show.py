"""Verbs that show runs: report, watch."""

import argparse
import time
from pathlib import Path

from fedweave.cli.verbs import Verbs
from fedweave.console import Console


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
