"""Verbs that explain: diagnose, budget."""

import argparse
from pathlib import Path
from typing import TypedDict

from fedweave.cli.verbs import Verbs, shared
from fedweave.config import Config, from_tree, load_config, recipe_names
from fedweave.console import Console, show, table
from fedweave.errors import UserError, nearest
from fedweave.settings import describe, read_yaml_value, to_tree

# Short names of `fedweave budget` for keys that decide costs.
_SHORT = {
    "rank": "experts.rank",
    "single_rank": "experts.single_rank",
    "hidden": "router.hidden",
    "rounds": "training.rounds",
    "local_steps": "training.local_steps",
    "target_modules": "experts.target_modules",
    "clients": "data.clients",
    "batch_size": "training.batch_size",
    "dtype": "backbone.dtype",
    "weights": "backbone.weights",
    "checkpointing": "training.checkpointing",
}


def register(verbs: Verbs) -> None:
    diagnose = verbs.add(
        "diagnose", _diagnose, "Measure parts of the paper's theory on a run: conflict, contamination, risk."
    )
    diagnose.add_argument("folder", type=Path, help="the run folder")
    diagnose.add_argument(
        "--clients", type=int, help="clients whose gradients are taken (default: up to 4, as a minute allows)"
    )
    diagnose.add_argument("--batches", type=int, default=1, help="batches that stand for a bucket (default 1)")
    diagnose.add_argument(
        "--router-rate", type=float, help="step size of the router's two paths (default: the run's router.lr)"
    )
    state = diagnose.add_mutually_exclusive_group()
    shared(state, "--last")
    state.add_argument("--start", action="store_true", help="the state before round 1 instead of the best")
    shared(diagnose, "--backbone", "--quiet")
    budget = verbs.add(
        "budget", _budget, "Parameters, bytes, steps and memory: fedweave budget MODEL experts=4 rank=8 clients=20"
    )
    budget.add_argument("--json", action="store_true", help="print JSON instead of tables")
    budget.add_argument(
        "overrides",
        nargs="*",
        metavar="WHAT",
        help="models, recipes or one run (empty: the paper's setting), and settings: experts=4 buckets=4 served=2 "
        f"tokens=115 precision=bfloat16, {', '.join(_SHORT)} or any config key",
    )


def _diagnose(arguments: argparse.Namespace, console: Console) -> None:
    from fedweave.analysis.diagnose import diagnose
    from fedweave.analysis.verdicts import render

    which = "last" if arguments.last else "start" if arguments.start else "best"
    sample = (arguments.clients, arguments.batches)
    found = diagnose(arguments.folder, console, *sample, which, arguments.router_rate, arguments.backbone)
    show(render(found))
    console.say(f"\n{arguments.folder / 'diagnostics.json'} holds every figure.")


def _budget(arguments: argparse.Namespace, console: Console) -> None:
    import json

    from fedweave.analysis import ledger

    subjects = [item for item in arguments.overrides if "=" not in item or Path(item).exists()]
    settings = [item for item in arguments.overrides if item not in subjects]
    runs = [item for item in subjects if (Path(item) / "config.yaml").is_file()]
    if runs:
        if len(subjects) > 1 or any(not item.startswith("precision=") for item in settings):
            raise UserError("the budget of a run stands alone; only precision=… may be set beside it.")
        from fedweave.analysis.spent import run_costs
        from fedweave.runs.reading import read_run

        costs = run_costs(read_run(Path(runs[0])), *(item.partition("=")[2] for item in settings[-1:]))
        budgets, discovers, spent = [costs.budget], costs.discovers, costs.spent
    else:
        from fedweave.analysis.budget import predict
        from fedweave.analysis.shapes import model_shape

        found, keys = _split(settings)
        budgets, discovers, spent = [], True, []
        for config in [_config(subject, keys) for subject in subjects or ["paper"]]:
            shape = model_shape(config.backbone.model, config.backbone.revision)
            budgets.append(predict(shape, config, **found))
    if arguments.json:
        print(json.dumps([budget.as_dict() for budget in budgets] + [vars(row) for row in spent], indent=1))
        return
    parts = [ledger.parameter_table(budgets)]
    for budget in budgets:
        parts += [f"{budget.model}, {budget.parameters / 1e9:.2f}B frozen parameters", ledger.traffic_table(budget)]
        parts += [ledger.discovery_lines(budget.discovery)] if discovers else []
        parts += [] if spent else [ledger.memory_tables(budget.memory)]
    parts += [table(*ledger.spent_table(spent))] if spent else []
    show("\n\n".join(parts))


class _Found(TypedDict, total=False):
    """What discovery is taken to find, and data to be like."""

    experts: int
    buckets: float
    precision: str
    served: int
    tokens: float


def _split(settings: list[str]) -> tuple[_Found, list[str]]:
    """(what discovery is taken to find, config overrides) from short and dotted keys."""
    found: _Found = {}
    keys = []
    parts = {part for key, *_ in describe(Config) for part in key.split(".")}
    for item in settings:
        key, _, text = item.partition("=")
        if key == "precision":
            found["precision"] = text
        elif key == "buckets":
            found["buckets"] = _count(key, text)
        elif key == "tokens":
            found["tokens"] = _count(key, text)
        elif key in ("experts", "served"):
            count = _count(key, text)
            if count != int(count):
                raise UserError(f"{key} must be a whole number, not {text!r}.")
            found["experts" if key == "experts" else "served"] = int(count)
        elif "." not in key and key not in parts:  # its own names are nearer than any section of a config
            raise UserError(f"unknown config key {key!r}: {nearest(key, [*_Found.__annotations__, *_SHORT])}")
        else:
            keys.append(f"{_SHORT.get(key, key)}={text}")
    if found.get("served", 1) > found.get("experts", 4):
        raise UserError("served cannot exceed experts: it is how many of them a client has buckets for.")
    return found, keys


def _count(key: str, text: str) -> float:
    value = read_yaml_value(text, key)
    if not isinstance(value, int | float) or isinstance(value, bool) or value < 1:
        raise UserError(f"{key} must be a number of at least 1, not {text!r}.")
    return value


def _config(subject: str, keys: list[str]) -> Config:
    """A recipe with its own backbone, or any model in the paper's setting."""
    if subject in recipe_names() or subject.endswith((".yaml", ".yml")):
        return load_config(subject, keys)
    config = to_tree(load_config("paper", keys))
    config["backbone"]["model"] = subject
    return from_tree(config)
