"""The command line: ``fedweave VERB …``. Every mistake a user can make ends in one sentence and exit code 2."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import fedweave
from fedweave.config import Config, dump_config, find_recipe, load_config, recipe_names
from fedweave.console import Console
from fedweave.errors import UserError
from fedweave.settings import describe


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    arguments, extra = parser.parse_known_args(argv)
    # argparse takes no positionals after an option; overrides may stand anywhere
    if extra and hasattr(arguments, "overrides") and all("=" in e and not e.startswith("-") for e in extra):
        arguments.overrides += extra
    elif extra:
        parser.error(f"unrecognized arguments: {' '.join(extra)}")
    console = Console(quiet=getattr(arguments, "quiet", False))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        arguments.run(arguments, console)
    except UserError as error:
        print(f"fedweave: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fedweave: interrupted; `fedweave resume RUN` goes on from the last checkpoint.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `fedweave … | head`
        sys.stderr.close()
        return 0
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fedweave", description="Federated mixture-of-LoRA-experts fine-tuning.")
    parser.add_argument("--version", action="version", version=f"fedweave {fedweave.__version__}")
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")

    def verb(name: str, function, help: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=help, description=help)
        sub.set_defaults(run=function)
        return sub

    overrides = {"nargs": "*", "metavar": "key=value", "help": "config overrides, as in training.rounds=5"}
    run = verb("run", _run, "Train a federation: fedweave run quickstart training.rounds=5")
    run.add_argument("recipe", help="a recipe's name or a YAML file")
    run.add_argument("overrides", **overrides)  # type: ignore[arg-type]
    run.add_argument("--quiet", action="store_true", help="no progress, no table")
    resume = verb("resume", _resume, "Continue an interrupted run from its last checkpoint.")
    resume.add_argument("folder", type=Path, help="the run folder")
    resume.add_argument("overrides", **overrides)  # type: ignore[arg-type]
    resume.add_argument("--quiet", action="store_true")
    evaluate = verb("evaluate", _evaluate, "Test a run's model, on its own test set or on a JSONL file.")
    evaluate.add_argument("folder", type=Path, help="the run folder")
    evaluate.add_argument("overrides", **overrides)  # type: ignore[arg-type]
    evaluate.add_argument("--data", type=Path, help="a JSONL file of prompt/response or messages rows")
    evaluate.add_argument("--last", action="store_true", help="the last round instead of the best")
    evaluate.add_argument("--quiet", action="store_true")
    generate = verb("generate", _generate, "Answer prompts with a run's model (from standard input when none).")
    generate.add_argument("folder", type=Path, help="a run folder or a bundle")
    generate.add_argument("prompts", nargs="*", help="prompts; standard input gives one per line")
    generate.add_argument("--routing", choices=["sparse", "soft", "top2", "top3", "top4"], default="sparse")
    generate.add_argument("--max-new-tokens", type=int, default=64)
    generate.add_argument("--last", action="store_true", help="the last round instead of the best")
    export = verb("export", _export, "Write a run's model as a bundle of PEFT adapters and a router.")
    export.add_argument("folder", type=Path, help="the run folder")
    export.add_argument("target", type=Path, help="a new folder")
    export.add_argument("--last", action="store_true", help="the last round instead of the best")
    compare = verb(
        "compare", _compare, "Run a grid: fedweave compare benchmark method=fedit,fedweave seed=42,43,44"
    )
    compare.add_argument("name", help="a comparison, a recipe, or a YAML file of either")
    compare.add_argument("overrides", **overrides)  # type: ignore[arg-type]
    compare.add_argument("--output", type=Path, help="folder of cells and tables; compare/NAME when empty")
    compare.add_argument("--best-of", metavar="KEY", help="an axis of which every method gets its best value")
    compare.add_argument("--quiet", action="store_true")
    listing = verb("list", _list, "List recipes, comparisons, methods, models or clusterers.")
    listing.add_argument("what", choices=["recipes", "comparisons", "methods", "models", "clusterers"])
    show = verb("config", _config, "Print a recipe's resolved config, or every key with its meaning.")
    show.add_argument("recipe", nargs="?", help="a recipe's name or a YAML file; empty: the reference")
    show.add_argument("overrides", **overrides)  # type: ignore[arg-type]
    copy = verb("copy", _copy, "Copy a recipe to a file of your own, comments and all.")
    copy.add_argument("recipe")
    copy.add_argument("target", type=Path)
    return parser


def _run(arguments: argparse.Namespace, console: Console) -> None:
    config = load_config(arguments.recipe, arguments.overrides)
    output = Path(config.output) if config.output else _free_folder(Path("runs"), Path(arguments.recipe).stem)
    from fedweave.runs.run import start

    start(config, output, console)


def _free_folder(parent: Path, name: str) -> Path:
    """runs/NAME, or runs/NAME-2 and so on when that is taken."""
    path, number = parent / name, 1
    while path.exists():
        number += 1
        path = parent / f"{name}-{number}"
    return path


def _resume(arguments: argparse.Namespace, console: Console) -> None:
    from fedweave.runs.run import resume

    resume(arguments.folder, arguments.overrides, console)


def _evaluate(arguments: argparse.Namespace, console: Console) -> None:
    from fedweave.runs.use import evaluate_run

    print(evaluate_run(arguments.folder, arguments.overrides, arguments.data, arguments.last, console))


def _generate(arguments: argparse.Namespace, console: Console) -> None:
    prompts = arguments.prompts or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not prompts or not all(p.strip() for p in prompts):
        raise UserError("there is no prompt; give one in quotes, or one per line on standard input.")
    if arguments.max_new_tokens < 1:
        raise UserError("--max-new-tokens must be at least 1.")
    model = fedweave.load_model(arguments.folder, arguments.last)
    for prompt, answer in zip(
        prompts, model.answer(prompts, arguments.routing, arguments.max_new_tokens), strict=True
    ):
        bars = "  ".join(f"{m}:{w:.2f}" for m, w in enumerate(answer.weights))
        console.say(f"[{prompt}]  expert {answer.expert}  ({bars})")
        print(answer.text)


def _export(arguments: argparse.Namespace, console: Console) -> None:
    from fedweave.bundle import export_run

    written = export_run(arguments.folder, arguments.target, arguments.last)
    console.say(f"{arguments.target}: {written['experts']} experts of round {written['round']}, and their router.")


def _compare(arguments: argparse.Namespace, console: Console) -> None:
    from fedweave.compare import compare

    output = arguments.output or Path("compare") / Path(arguments.name).stem
    print(compare(arguments.name, arguments.overrides, output, arguments.best_of, console))


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
        print(dump_config(load_config(arguments.recipe, arguments.overrides)), end="")
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


if __name__ == "__main__":
    sys.exit(main())
