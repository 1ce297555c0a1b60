"""Using a run's model afterwards, without its data: load it, answer prompts, test it on other examples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from fedweave.backbone.encode import encode
from fedweave.backbone.features import compute_features
from fedweave.backbone.load import load_backbone
from fedweave.config import Config, from_tree, split_overrides
from fedweave.console import Console, table
from fedweave.data import load_data
from fedweave.data.examples import Example, Task
from fedweave.data.files import find_path
from fedweave.data.own import read_examples
from fedweave.data.own_tasks import own_tasks
from fedweave.data.rows import read_fields
from fedweave.errors import UserError
from fedweave.experts.mixture import Mixture
from fedweave.inference.model import FedWeaveModel
from fedweave.methods import build_method
from fedweave.runs.folder import RunFolder
from fedweave.runs.testing import evaluate_models, routed_models
from fedweave.runs.workspace import held_out
from fedweave.settings import insert


def load_models(
    folder: Path, last: bool = False, device: str = "auto"
) -> tuple[Config, list[FedWeaveModel], dict[str, Any]]:
    """(config, served models, facts) of a run's best round (or last); needs the backbone but none of its data.
    ``device`` other than auto takes the place of the config's."""
    _, config = RunFolder.open(folder)
    return config, *_load(folder, config, last, Console(quiet=True), device)


def _load(
    folder: Path, config: Config, last: bool, console: Console, device: str = "auto"
) -> tuple[list[FedWeaveModel], dict[str, Any]]:
    method = build_method(config)
    if method.uses_labels:
        raise UserError(f"{config.method} routes by task label and cannot answer a prompt that has none.")
    snapshot = RunFolder(folder).newest(console)
    if snapshot is None:
        raise UserError(f"{folder} has no checkpoint yet; finish it with `fedweave resume {folder}`.")
    where = config.backbone if device == "auto" else replace(config.backbone, device=device, dtype="auto")
    backbone = load_backbone(where)
    snapshot.check(config, backbone)
    layers = backbone.linear_layers(config.experts.target_modules)
    state = (snapshot.state if last else snapshot.best)(layers, backbone.device)
    mixture = Mixture(layers, state.layout, config.experts.alpha)
    meta = snapshot.meta
    facts = {"round": meta["completed" if last else "best_round"], "clients": len(meta["clients"])}
    return routed_models(backbone, mixture, method, state), facts


def evaluate(folder: Path, overrides: list[str], data: Path | None, last: bool, console: Console) -> str:
    """Losses and scores of a run or a bundle as a table, on the run's test set or on a file."""
    from fedweave.bundle import is_bundle

    if is_bundle(folder):
        config, examples, tasks, models = _bundle(folder, overrides, data, console)
    else:
        _, config = RunFolder.open(folder, overrides)
        examples, tasks = _examples(config, data, console)
        models, _ = _load(folder, config, last, console)
    rows, encoded = encode(models[0].backbone, examples, config.data.long_answers, console)
    features = compute_features(models[0].backbone, [e.prompt for e in encoded], console)
    result = evaluate_models(config, tasks, models, held_out(rows, encoded, features), console)
    lines = []
    for task in next(iter(result["loss"].values())):
        title = tasks[task].title if task in tasks else "macro average"
        cells = [f"{result['score'][task]:.3f}"] if "score" in result else []
        lines.append([title, *cells, *(f"{result['loss'][r][task]:.3f}" for r in result["loss"])])
    scored = [f"score {result['used']} ↑"] if "score" in result else []
    return table(["test", *scored, *(f"loss {r} ↓" for r in result["loss"])], lines)


def _bundle(
    folder: Path, overrides: list[str], data: Path | None, console: Console
) -> tuple[Config, list[Example], dict[str, Task], list[FedWeaveModel]]:
    """What `evaluate` needs of a bundle, which brings a model but no data."""
    from fedweave.bundle.load import load_bundle, verify_bundle

    if data is None:
        raise UserError(f"{folder} is a bundle and holds no data; name a JSONL file with --data.")
    description = verify_bundle(folder)
    tree: dict[str, Any] = {"method": description["method"], "backbone": description["backbone"]}
    for key, value in split_overrides(overrides):
        if not key.startswith("evaluation."):
            raise UserError(f"{key} is fixed for a bundle; only keys of evaluation may be set.")
        insert(tree, key, value)
    config = from_tree(tree)
    examples, tasks = _examples(config, data, console)
    return config, examples, tasks, [load_bundle(folder)]


def _examples(config: Config, data: Path | None, console: Console) -> tuple[list[Example], dict[str, Task]]:
    """The run's own test set, or a file of the user's."""
    if data is None:
        loaded = load_data(config)
        for note in loaded.notes:
            console.say(f"note: {note}")
        return loaded.test, loaded.tasks
    examples = read_examples(find_path(str(data), "--data "), read_fields(config.data.fields))
    if not examples:
        raise UserError(f"--data {data}: the file is empty.")
    tasks, notes = own_tasks(config, examples)
    for note in notes:
        console.say(f"note: {note}")
    return examples, tasks
