"""Verbs that train: run, resume, compare."""

import argparse
from pathlib import Path

from fedweave.cli.verbs import Verbs, shared, with_environment
from fedweave.config import Config, load_config
from fedweave.console import Console, show
from fedweave.errors import UserError


def register(verbs: Verbs) -> None:
    run = verbs.add("run", _run, "Train a federation: fedweave run quickstart training.rounds=5")
    run.add_argument("recipe", help="a recipe's name or a YAML file")
    shared(run, "overrides", "--quiet")
    resume = verbs.add("resume", _resume, "Continue an interrupted run from its last checkpoint.")
    resume.add_argument("folder", type=Path, help="the run folder")
    shared(resume, "overrides", "--checkpoint", "--quiet")
    compare = verbs.add(
        "compare", _compare, "Run a grid: fedweave compare benchmark method=fedit,fedweave seed=42,43,44"
    )
    compare.add_argument("name", help="a comparison, a recipe, or a YAML file of either; several run in turn")
    shared(compare, "overrides")
    compare.add_argument(
        "--output", type=Path, help="folder of cells and tables (compare/NAME), or of a folder for each of several"
    )
    compare.add_argument("--minutes", type=float, help="begin no cell that would end later; run again to go on")
    compare.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="a JSON file that gets every finished cell in short; what stands in it is not run again",
    )
    compare.add_argument("--best-of", metavar="KEY", help="an axis of which every method gets its best value")
    shared(compare, "--quiet")


def _run(arguments: argparse.Namespace, console: Console) -> None:
    config = load_config(arguments.recipe, with_environment(arguments.overrides))
    output = Path(config.output) if config.output else _free_folder(Path("runs"), Path(arguments.recipe).stem)
    from fedweave.runs.run import start

    if start(config, output, console) is not None:
        _finish(output, config, console)


def _finish(folder: Path, config: Config, console: Console) -> None:
    """What the config asks for after a run. The run is done whatever becomes of it."""
    from fedweave.analysis.worth import worth_text
    from fedweave.compare.worth import weigh
    from fedweave.federation.engines.distributed import world
    from fedweave.report import write_report

    if config.finish and world() is not None:
        console.warn(f"several processes made this run; one is enough to finish it: {', '.join(config.finish)}.")
        return
    for step in config.finish:
        try:
            if step == "worth":
                console.say("")
                found = weigh(folder, console)
                console.say(f"\n{worth_text(found)}\n")
            else:
                page, _ = write_report([folder])
                console.say(f"{page} says what each expert does and how the run went; open it in a browser.")
        except UserError as error:
            console.warn(f"the run is finished, but not its {step}: {error}")


def _free_folder(parent: Path, name: str) -> Path:
    """runs/NAME, or runs/NAME-2 and so on when that is taken."""
    path, number = parent / name, 1
    while path.exists():
        number += 1
        path = parent / f"{name}-{number}"
    return path


def _resume(arguments: argparse.Namespace, console: Console) -> None:
    from fedweave.runs.run import resume

    if resume(arguments.folder, arguments.overrides, console, checkpoint=arguments.checkpoint) is not None:
        from fedweave.runs.folder import RunFolder

        _finish(arguments.folder, RunFolder.open(arguments.folder)[1], console)


def _compare(arguments: argparse.Namespace, console: Console) -> None:
    from fedweave.compare import compare

    more = [item for item in arguments.overrides if "=" not in item]
    settings = with_environment([item for item in arguments.overrides if "=" in item])
    names = [arguments.name, *more]
    parent = arguments.output or Path("compare")
    outputs = [arguments.output] if arguments.output and not more else [parent / Path(name).stem for name in names]
    show(compare(names, settings, outputs, arguments.best_of, console, arguments.minutes, arguments.record))
