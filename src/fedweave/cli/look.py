"""Verbs that show what there is: list, config, copy."""

import argparse
from pathlib import Path

from fedweave.cli.verbs import Verbs, shared, with_environment
from fedweave.config import Config, dump_config, find_recipe, load_config, recipe_names
from fedweave.console import Console
from fedweave.errors import UserError
from fedweave.settings import describe


def register(verbs: Verbs) -> None:
    listing = verbs.add("list", _list, "List recipes, comparisons, methods, models or clusterers.")
    listing.add_argument("what", choices=["recipes", "comparisons", "methods", "models", "clusterers"])
    show = verbs.add("config", _config, "Print a recipe's resolved config, or every key with its meaning.")
    show.add_argument("recipe", nargs="?", help="a recipe's name or a YAML file; empty: the reference")
    shared(show, "overrides")
    copy = verbs.add("copy", _copy, "Copy a recipe to a file of your own, comments and all.")
    copy.add_argument("recipe")
    copy.add_argument("target", type=Path)


def _list(arguments: argparse.Namespace, console: Console) -> None:
    if arguments.what == "recipes":
        rows = [[name, _headline(find_recipe(name))] for name in recipe_names()]
    elif arguments.what == "comparisons":
        from fedweave.compare.grid import COMPARISONS, comparison_names

        rows = [[name, _headline(COMPARISONS / f"{name}.yaml")] for name in comparison_names()]
    elif arguments.what == "methods":
        from fedweave.methods import METHODS, method_class

        rows = [[name, method_class(name).summary] for name in METHODS]
    elif arguments.what == "models":
        from fedweave.backbone.catalog import KNOWN

        rows = [list(row) for row in KNOWN]
    else:
        from fedweave.discovery.clusterers import CLUSTERERS

        rows = [[name] for name in CLUSTERERS]
    width = max(len(row[0]) for row in rows)
    for row in rows:
        print("  ".join([row[0].ljust(width), *row[1:]]).rstrip())


def _headline(path: Path) -> str:
    """A recipe says what it is on its second comment line; the first is the command."""
    lines = [line[1:].strip() for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    return lines[1] if len(lines) > 1 else ""


def _config(arguments: argparse.Namespace, console: Console) -> None:
    if arguments.recipe:
        print(dump_config(load_config(arguments.recipe, with_environment(arguments.overrides))), end="")
        return
    for key, default, doc in describe(Config):
        print(f"{key} = {default}\n    {doc}")


def _copy(arguments: argparse.Namespace, console: Console) -> None:
    source = find_recipe(arguments.recipe)
    if arguments.target.suffix not in (".yaml", ".yml"):
        raise UserError(f"{arguments.target} must end in .yaml, so that `fedweave run` takes it for a file.")
    if arguments.target.exists():
        raise UserError(f"{arguments.target} exists; choose another name.")
    try:
        arguments.target.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{arguments.target} cannot be written: {error.strerror}.") from None
    console.say(f"{arguments.target} written; run it with `fedweave run {arguments.target}`.")
