"""Verbs that hand a model on: export, push."""

from __future__ import annotations

import argparse
from pathlib import Path

from fedweave.cli.verbs import Verbs, last
from fedweave.console import Console
from fedweave.errors import UserError


def register(verbs: Verbs) -> None:
    export = verbs.add("export", _export, "Write a run's model as a bundle of PEFT adapters and a router.")
    export.add_argument("folder", type=Path, help="the run folder; with --merge or --soft also a bundle")
    export.add_argument("target", type=Path, help="a new folder")
    form = export.add_mutually_exclusive_group()
    form.add_argument("--merge", type=int, metavar="K", help="instead: a dense model with expert K in its weights")
    form.add_argument(
        "--soft",
        metavar="WEIGHTS",
        help="instead: one adapter for a fixed mixture, as in 0.5,0.3,0.2",
    )
    last(export)
    push = verbs.add("push", _push, "Upload a bundle to a repository of the Hugging Face hub.")
    push.add_argument("bundle", type=Path, help="the bundle's folder")
    push.add_argument("repository", help="owner/name; made when it does not exist")
    push.add_argument("--private", action="store_true", help="make the repository private")


def _weights(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--soft {text!r} is not a list of weights, as in 0.5,0.3,0.2.") from None


def _export(arguments: argparse.Namespace, console: Console) -> None:
    from fedweave.bundle import export_merged, export_run, export_soft

    source, target = arguments.folder, arguments.target
    if arguments.merge is not None:
        export_merged(source, target, arguments.merge, arguments.last)
        console.say(f"{target}: a dense model with expert {arguments.merge}; its logits are those of the expert.")
    elif arguments.soft is not None:
        export_soft(source, target, _weights(arguments.soft), arguments.last)
        console.say(f"{target}: one adapter for the mixture; PEFT gives the same logits with it.")
    else:
        written = export_run(source, target, arguments.last)
        experts, rounds = written["experts"], written["round"]
        router = ", and their router" if written["router"] else ""
        console.say(f"{target}: {experts} experts of round {rounds}{router}; PEFT gives the same logits with each.")


def _push(arguments: argparse.Namespace, console: Console) -> None:
    from fedweave.bundle.push import push_bundle

    console.say(f"pushed to {push_bundle(arguments.bundle, arguments.repository, arguments.private)}")
