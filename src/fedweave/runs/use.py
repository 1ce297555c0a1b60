"""Using a trained model, of a run or a bundle, without the run's data: load it, test it, write it for others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fedweave.backbone.encode import encode
from fedweave.backbone.features import compute_features
from fedweave.backbone.load import load_backbone
from fedweave.bundle.card import Origin
from fedweave.bundle.export import describe, require_new, write_bundle, write_merged, write_soft
from fedweave.bundle.hub import fetch_bundle, hub_repository
from fedweave.bundle.load import is_bundle, load_bundle, verify_bundle
from fedweave.config import Config, from_tree, split_overrides
from fedweave.console import Console
from fedweave.data import load_data
from fedweave.data.examples import Example, Task
from fedweave.data.own import read_test
from fedweave.errors import UserError
from fedweave.experts.mixture import Mixture
from fedweave.inference.model import FedWeaveModel
from fedweave.methods import build_method
from fedweave.runs.folder import RunFolder, Snapshot
from fedweave.runs.reading import read_run, resume_command
from fedweave.runs.testing import evaluate_models, routed_models
from fedweave.runs.text import results_table
from fedweave.runs.workspace import held_out
from fedweave.schema import Description
from fedweave.settings import insert


def load(
    folder: str | Path, *, last: bool = False, model: str | None = None, device: str = "auto"
) -> FedWeaveModel:
    """The model of a bundle, in a folder or at ``hf://owner/name``, or of a run's best round (with ``last`` its
    last). ``model`` names the backbone when it lies elsewhere than where a bundle was trained."""
    repository = hub_repository(folder)
    folder = Path(folder) if repository is None else fetch_bundle(repository)
    if is_bundle(folder):
        return load_bundle(folder, model, device)
    if model is not None:
        raise UserError(f"{folder} is a run, whose config names its backbone; another is for bundles only.")
    _, config = RunFolder.open(folder)
    return _run_models(folder, config, last, Console(quiet=True), device)[0][0]


def _run_models(
    folder: Path, config: Config, last: bool, console: Console, device: str = "auto"
) -> tuple[list[FedWeaveModel], Snapshot]:
    """(served models, the checkpoint they are from) of a run's best round, or last; needs the backbone but none of
    its data. ``device`` other than auto takes the place of the config's."""
    method = build_method(config)
    if method.uses_labels:
        raise UserError(f"{config.method} routes by labels and cannot answer a prompt that has none.")
    snapshot = RunFolder(folder).newest(console)
    if snapshot is None:
        raise UserError(f"{folder} has no checkpoint yet; finish it with `{resume_command(folder, config)}`.")
    where = config.backbone if device == "auto" else replace(config.backbone, device=device, dtype="auto")
    backbone = load_backbone(where)
    snapshot.check(config, backbone)
    layers = backbone.linear_layers(config.experts.target_modules)
    state = (snapshot.state if last else snapshot.best)(layers, backbone.device)
    mixture = Mixture(layers, state.layout, config.experts.alpha)
    return routed_models(backbone, mixture, method, state), snapshot


# -------------------------------------------------------------------------------------- for others


def export_run(folder: Path, target: Path, last: bool = False) -> Description:
    """Write a run's best (or last) model as a bundle; returns what fedweave.json holds."""
    require_new(target)
    return write_bundle(target, *_the_model(folder, last))


def export_soft(source: Path, target: Path, weights: Sequence[float], last: bool = False) -> None:
    """Write one adapter for a fixed mixture of the experts of a run or a bundle."""
    require_new(target)
    write_soft(target, *_described(source, last), weights)


def export_merged(source: Path, target: Path, expert: int, last: bool = False) -> None:
    """Write a dense model with one expert of a run or a bundle in its weights."""
    require_new(target)
    write_merged(target, *_described(source, last), expert)


def _the_model(folder: Path, last: bool) -> tuple[FedWeaveModel, Origin]:
    """The one model of a run; a method that serves every client its own has none to hand on."""
    _, config = RunFolder.open(folder)
    models, snapshot = _run_models(folder, config, last, Console(quiet=True))
    if len(models) != 1:
        raise UserError(f"{config.method} trains a model for every client and has none to export.")
    for name, tensor in (("experts", models[0].theta), ("router", models[0].experts.phi)):
        if tensor is not None and not torch.isfinite(tensor).all():
            raise UserError(f"the run's {name} hold NaN or infinity and cannot be exported.")
    run, completed = read_run(folder), snapshot.meta["completed" if last else "best_round"]
    measured = next((event for event in run.validations if event["round"] == completed), None)
    return models[0], Origin(config, completed, len(snapshot.meta["clients"]), run.summary, measured)


def _described(source: Path, last: bool) -> tuple[FedWeaveModel, Description]:
    """(model, description) of a run or a bundle."""
    if is_bundle(source):
        return load_bundle(source), verify_bundle(source)
    model, origin = _the_model(source, last)
    return model, describe(model, origin)


# -------------------------------------------------------------------------------------- testing


def evaluate(folder: Path, overrides: list[str], data: Path | None, last: bool, console: Console) -> str:
    """Losses and scores of a run or a bundle as a table, on the run's test set or on a file."""
    if is_bundle(folder):
        config, examples, tasks, models = _bundle(folder, overrides, data, console)
    else:
        _, config = RunFolder.open(folder, overrides)
        examples, tasks = _examples(config, data, console)
        models, _ = _run_models(folder, config, last, console)
    rows, encoded = encode(models[0].backbone, examples, config.data.long_answers, console)
    features = compute_features(models[0].backbone, [e.prompt for e in encoded], console)
    result = evaluate_models(config, tasks, models, held_out(rows, encoded, features), console)
    return results_table(result, {name: task.title for name, task in tasks.items()})


def _bundle(
    folder: Path, overrides: list[str], data: Path | None, console: Console
) -> tuple[Config, list[Example], dict[str, Task], list[FedWeaveModel]]:
    """What `evaluate` needs of a bundle, which brings a model but no data."""
    if data is None:
        raise UserError(f"{folder} is a bundle and holds no data; name a JSONL file with --data.")
    description = verify_bundle(folder)
    tree: dict[str, object] = {"method": description["method"], "backbone": description["backbone"]}
    for key, value in split_overrides(overrides):
        if not key.startswith("evaluation."):
            raise UserError(f"{key} is fixed for a bundle; only keys of evaluation may be set.")
        insert(tree, key, value)
    config = from_tree(tree)
    examples, tasks = _examples(config, data, console)
    return config, examples, tasks, [load_bundle(folder)]


def _examples(config: Config, data: Path | None, console: Console) -> tuple[list[Example], dict[str, Task]]:
    """The run's own test set, or a file of the user's."""
    path, named = (str(data), "--data ") if data else (config.federation.test, "federation.test=")
    if path is None or (data is None and config.data.source != "sites"):
        loaded = load_data(config)
        for note in loaded.notes:
            console.say(f"note: {note}")
        return loaded.test, loaded.tasks
    examples, tasks, notes = read_test(config, path, named)
    for note in notes:
        console.say(f"note: {note}")
    return examples, tasks
