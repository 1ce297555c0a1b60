"""Verbs of a real federation: federate (the server) and site check, start, work (a site)."""

import argparse
import os
from pathlib import Path

from fedweave.cli.verbs import Verbs, shared
from fedweave.config import load_config
from fedweave.console import Console, show
from fedweave.errors import UserError, needed

FLOWER = ("flwr", "a federation needs Flower: pip install 'fedweave[flower]'.")


def register(verbs: Verbs) -> None:
    server = verbs.add("federate", _federate, "Train over real sites: fedweave federate RECIPE federation.sites=3")
    server.add_argument("recipe", nargs="?", help="a recipe's name or a YAML file")
    shared(server, "overrides")
    server.add_argument("--resume", type=Path, metavar="RUN", help="continue this run folder instead")
    shared(server, "--checkpoint")
    server.add_argument("--superlink", default="127.0.0.1:8000", help="host and port of the SuperLink")
    server.add_argument("--root-certificates", type=Path, help="who signed the SuperLink's certificate")
    server.add_argument("--secret", type=Path, help="the file that the SuperLink was given for its ServerApps")
    server.add_argument("--insecure", action="store_true", help="no TLS: for a try on one machine only")
    shared(server, "--quiet")
    site = verbs.add("site", _site, "A site of a federation: check it, start it, or only its worker.")
    site.add_argument("what", choices=["check", "start", "work"])
    site.add_argument("file", type=Path, help="the site's YAML file")
    site.add_argument("recipe", nargs="?", default="quickstart", help="check: the federation's recipe")
    shared(site, "overrides", "--quiet")


def _federate(arguments: argparse.Namespace, console: Console) -> None:
    needed(*FLOWER)
    from fedweave.federation.engines.flower.tasks import Runtime
    from fedweave.runs import federated

    if arguments.recipe and "=" in arguments.recipe:  # --resume RUN key=value: there is no recipe
        arguments.overrides.insert(0, arguments.recipe)
        arguments.recipe = None
    if not arguments.insecure and not arguments.root_certificates:
        raise UserError("--root-certificates is missing; give it, or --insecure for a try on one machine.")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing calls out unless it is told to
    runtime = Runtime(
        arguments.superlink, None if arguments.insecure else arguments.root_certificates, arguments.secret
    )
    if arguments.resume:
        federated.resume(arguments.resume, arguments.overrides, runtime, console, arguments.checkpoint)
        return
    if not arguments.recipe:
        raise UserError("name a recipe, or a run to continue with --resume.")
    settings = [*arguments.overrides, "data.source=sites", "data.path=null", "engine=flower"]
    config = load_config(arguments.recipe, settings)
    output = Path(config.output or Path("runs") / Path(arguments.recipe).stem)
    federated.start(config, output, runtime, console)


def _site(arguments: argparse.Namespace, console: Console) -> None:
    from fedweave.federation.site.settings import check_link, load_site

    if "=" in arguments.recipe:
        arguments.overrides.insert(0, arguments.recipe)
        arguments.recipe = "quickstart"
    site = load_site(arguments.file)
    if arguments.what != "work":  # who starts the SuperNode of a worker alone has its key
        check_link(site.superlink)
    if not site.backbone.download:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if arguments.what == "check":
        from fedweave.federation.site.rehearsal import check_site
        from fedweave.methods import build_method

        settings = [*arguments.overrides, "data.source=sites", "data.path=null"]
        show(check_site(site, load_config(arguments.recipe, settings), build_method, console))
        return
    needed(*FLOWER)
    from fedweave.federation.engines.flower.worker import work
    from fedweave.methods import build_method

    work(site, build_method, console, own_supernode=arguments.what == "start")
