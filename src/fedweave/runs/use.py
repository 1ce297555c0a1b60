"""Using a trained model, of a run or a bundle, without the run's data: load it, test it, write it for others."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from fedweave.alignment.kept import KeptSignatures, how_made
from fedweave.backbone.catalog import public_name
from fedweave.backbone.features import compute_features
from fedweave.backbone.load import load_backbone
from fedweave.bundle.card import Origin, base_model
from fedweave.bundle.export import describe, require_new, write_bundle
from fedweave.bundle.hub import fetch_bundle, hub_repository
from fedweave.bundle.load import is_bundle, load_bundle, verify_bundle
from fedweave.config import BackboneConfig, Config, from_tree, split_overrides
from fedweave.console import Console
from fedweave.data import load_data
from fedweave.data.examples import Example, Task
from fedweave.data.own import read_test
from fedweave.data.rows import Fields, read_fields
from fedweave.description.record import Experts, limited, read_experts
from fedweave.errors import UserError
from fedweave.experts.mixture import Mixture
from fedweave.inference.model import FedWeaveModel
from fedweave.methods import build_method
from fedweave.runs.folder import RunFolder, elsewhere
from fedweave.runs.reading import read_run, resume_command
from fedweave.runs.snapshot import FREE_KEYS, Snapshot, is_one_of
from fedweave.runs.testing import Exam, routed_models
from fedweave.runs.text import results_table
from fedweave.runs.workspace import TestSet
from fedweave.schema import Description, Prediction
from fedweave.settings import build, insert, to_tree

TESTED_ROWS = ("data.fields", "data.long_answers")  # how rows to test on are read


def load(
    folder: str | Path,
    *,
    last: bool = False,
    model: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    checkpoint: int | None = None,
    doubt: float | None = None,
) -> FedWeaveModel:
    """The model of a bundle, in a folder or at ``hf://owner/name``, or of a run's best round (with ``last`` its
    last). ``model`` names the backbone when it lies elsewhere than where it was trained, ``device`` and ``dtype``
    where and how it computes (auto: on a GPU in bfloat16 where there is one), ``checkpoint`` a round after which
    the run is taken as it stood then; ``doubt`` lets experts answer prompts up to so many times as strange as
    training found the limit to be."""
    loaded = _load(folder, last, model, (device, dtype), checkpoint)
    if doubt is not None:
        loaded.experts.allow(doubt)
    return loaded


def _load(
    folder: str | Path, last: bool, model: str | None, where: tuple[str, str], checkpoint: int | None
) -> FedWeaveModel:
    repository = hub_repository(folder)
    folder = Path(folder) if repository is None else fetch_bundle(repository)
    if is_bundle(folder):
        return load_bundle(folder, model, *where)
    _, config = RunFolder.open(folder, elsewhere(model))
    return _run_models(folder, config, last, checkpoint, *where)[0][0]


def row_fields(folder: Path) -> Fields:
    """How a run's rows call their columns; a bundle knows only the usual names."""
    is_run = (folder / "config.yaml").is_file()
    return read_fields(RunFolder.open(folder)[1].data.fields if is_run else ())


def _run_models(
    folder: Path, config: Config, last: bool, checkpoint: int | None, device: str = "auto", dtype: str = "auto"
) -> tuple[list[FedWeaveModel], Snapshot]:
    """(served models, the checkpoint they are from) of a run's best round, or last; needs the backbone but none of
    its data. ``device`` and ``dtype`` other than auto take the place of the config's."""
    method = build_method(config)
    if method.uses_labels:
        raise UserError(f"{config.method} routes by labels and cannot answer a prompt that has none.")
    snapshot = RunFolder(folder).newest(checkpoint)
    if snapshot is None:
        raise UserError(f"{folder} has no checkpoint yet; finish it with `{resume_command(folder, config)}`.")
    tree = to_tree(config.backbone)
    if device != "auto":
        tree |= {"device": device, "dtype": "auto"}
    if dtype != "auto":
        tree |= {"dtype": dtype}
    backbone = load_backbone(build(BackboneConfig, tree, "backbone."))
    snapshot.check(config, backbone)
    layers = backbone.linear_layers(config.experts.target_modules)
    state = (snapshot.state if last else snapshot.best)(layers, backbone.device)
    mixture = Mixture(layers, state.layout, config.experts.alpha, config.experts.span)
    return routed_models(backbone, mixture, method, state), snapshot


# -------------------------------------------------------------------------------------- for others


def export_run(
    folder: Path,
    target: Path,
    last: bool = False,
    checkpoint: int | None = None,
    tell: str | None = None,
    *,
    model: str | None = None,
    doubt: float | None = None,
    base: str | None = None,
) -> Description:
    """Write a run's best (or last) model as a bundle; returns what fedweave.json holds. ``tell`` is how much of the
    data's own words goes with it: none, words or examples; ``model`` and ``doubt`` are those of :func:`load`, and
    ``base`` is what others call the backbone."""
    require_new(target)
    told = told_experts(folder, tell)
    written, origin = _the_model(folder, last, checkpoint, model, base)
    if doubt is not None:
        written.experts.allow(doubt)
    if told is not None and told["round"] != origin.round:
        again = f"fedweave describe {folder}{' --last' if last else ''}"
        raise UserError(f"what {folder} tells of its experts is of round {told['round']}; `{again}` first.")
    return write_bundle(target, written, origin, told)


def told_experts(folder: str | Path, tell: str | None) -> Experts | None:
    """As much as others may read of the experts: of a run what ``tell`` allows, of a bundle all that it has."""
    repository = hub_repository(folder)
    folder = Path(folder) if repository is None else fetch_bundle(repository)
    if is_bundle(folder):
        return read_experts(folder)
    if tell is None:
        return None
    found = read_experts(folder)
    if found is None:
        raise UserError(f"{folder} says nothing of its experts yet; `fedweave describe {folder}` finds out.")
    return limited(found, tell)


Write = Callable[[Path, FedWeaveModel, Description], None]  # a form that a model can be written in


def export_as(
    write: Write,
    source: Path,
    target: Path,
    last: bool = False,
    checkpoint: int | None = None,
    *,
    model: str | None = None,
    base: str | None = None,
) -> None:
    """Write the model of a run or a bundle in a form without a router: :func:`write_soft`, :func:`write_merged`,
    :func:`write_gguf` or :func:`write_mlx` of :mod:`fedweave.bundle`."""
    require_new(target)
    found, description = _described(source, last, checkpoint, model, base)
    found.require_whole_span("such a file")
    write(target, found, description)


def _the_model(
    folder: Path, last: bool, checkpoint: int | None, model: str | None, base: str | None
) -> tuple[FedWeaveModel, Origin]:
    """The one model of a run; a method that serves every client its own has none to hand on."""
    if is_bundle(folder):
        raise UserError(f"{folder} is a bundle already; --merge, --soft and --format write it in other forms.")
    _, config = RunFolder.open(folder, elsewhere(model))
    models, snapshot = _run_models(folder, config, last, checkpoint)
    if len(models) != 1:
        raise UserError(f"{config.method} trains a model for every client and has none to export.")
    for name, tensor in (("experts", models[0].theta), ("router", models[0].experts.phi)):
        if tensor is not None and not torch.isfinite(tensor).all():
            raise UserError(f"the run's {name} hold NaN or infinity and cannot be exported.")
    run, completed = read_run(folder), snapshot.meta["completed" if last else "best_round"]
    measured = next((event for event in run.validations if event["round"] == completed), None)
    base = base or public_name(config.backbone.model)
    means, report = snapshot.tensors.get("signatures"), snapshot.meta["report"]
    kept = None
    if means is not None and "own_distances" in report:
        own, halfway, buckets = (report[name] for name in ("own_distances", "halfway", "signed_buckets"))
        kept = KeptSignatures(means, own, halfway, buckets, how_made(config))  # type: ignore[arg-type]
    clients = len(snapshot.meta["clients"])
    return models[0], Origin(config, completed, clients, run.summary, measured, base, kept)


def _described(
    source: Path, last: bool, checkpoint: int | None, model: str | None, base: str | None
) -> tuple[FedWeaveModel, Description]:
    """(model, description) of a run or a bundle."""
    if is_bundle(source):
        description = verify_bundle(source)
        return load_bundle(source, model), {**description, "base_model": base or base_model(description)}
    loaded, origin = _the_model(source, last, checkpoint, model, base)
    return loaded, describe(loaded, origin)


# -------------------------------------------------------------------------------------- testing


def evaluate(
    folder: Path,
    overrides: list[str],
    data: Path | None,
    last: bool,
    console: Console,
    checkpoint: int | None = None,
    predictions: list[Prediction] | None = None,
    model: str | None = None,
) -> str:
    """Losses and scores of a run or a bundle as a table, on the run's test set or on a file; ``predictions`` gets a
    record of every row, ``model`` says where the backbone lies."""
    if is_bundle(folder):
        config, examples, tasks, models = _bundle(folder, overrides, data, console, model)
    else:
        overrides = [*overrides, *elsewhere(model)]
        run, config = RunFolder.open(folder, overrides, (*FREE_KEYS, *TESTED_ROWS))
        examples, tasks = _examples(config, data, console, run)
        trained = replace(config, data=RunFolder.open(folder)[1].data)
        models, _ = _run_models(folder, trained, last, checkpoint)
    models[0].backbone.check_answer(config.evaluation.max_new_tokens, "evaluation.max_new_tokens")
    rows, encoded = models[0].backbone.prompts.encode_fitting(examples, config.data.long_answers, console.warn)
    features = compute_features(models[0].backbone, [e.prompt for e in encoded], console)
    result = Exam(config, tasks, TestSet(rows, encoded, features), console).of(models, predictions)
    return results_table(result, {name: task.title for name, task in tasks.items()})


def _bundle(
    folder: Path, overrides: list[str], data: Path | None, console: Console, model: str | None
) -> tuple[Config, list[Example], dict[str, Task], list[FedWeaveModel]]:
    """What `evaluate` needs of a bundle, which brings a model but no data."""
    if data is None:
        raise UserError(f"{folder} is a bundle and holds no data; name a JSONL file with --data.")
    description = verify_bundle(folder)
    tree: dict[str, object] = {"method": description["method"], "backbone": description["backbone"]}
    for key, value in split_overrides(overrides):
        if not is_one_of(key, ("evaluation", *TESTED_ROWS)):
            raise UserError(f"{key} is fixed for a bundle; only evaluation, {', '.join(TESTED_ROWS)} may be set.")
        insert(tree, key, value)
    config = from_tree(tree)
    examples, tasks = _examples(config, data, console)
    return config, examples, tasks, [load_bundle(folder, model)]


def _examples(
    config: Config, data: Path | None, console: Console, run: RunFolder | None = None
) -> tuple[list[Example], dict[str, Task]]:
    """The run's own test set, or a file of the user's."""
    path, named = (str(data), "--data ") if data else (config.federation.test, "federation.test=")
    if path is None or (data is None and config.data.source != "sites"):
        loaded = load_data(config)
        for note in loaded.notes:
            console.say(f"note: {note}")
        if run is not None and "test" in run.changed_data(loaded.manifest):
            console.warn(f"the test rows are not those that {run.path} had when it began.")
        return loaded.test, loaded.tasks
    examples, tasks, notes = read_test(config, path, named)
    for note in notes:
        console.say(f"note: {note}")
    return examples, tasks
