"""Using a run's model afterwards: load it, answer prompts, test it on other data."""

from __future__ import annotations

from pathlib import Path

from fedweave.backbone.features import compute_features
from fedweave.config import Config
from fedweave.console import Console, table
from fedweave.data.examples import Example, Task
from fedweave.data.jsonl import read_examples
from fedweave.errors import UserError
from fedweave.inference.model import RoutedModel
from fedweave.methods import method_class
from fedweave.runs.folder import Progress, RunFolder
from fedweave.runs.summary import evaluate_state, routed_models
from fedweave.runs.workspace import Prepared, Workspace, encode, held_out, prepare


def _reopen(folder: Path, overrides: list[str], console: Console) -> tuple[Workspace, Progress, Config]:
    """A run's workspace with its newest checkpoint; nothing is written."""
    run, config = RunFolder.open(folder, overrides)
    prepared: Prepared = prepare(config, console)
    workspace = prepared.build(console)
    if method_class(config.method).uses_labels:
        workspace.reveal_labels()
    progress = run.load(workspace, console)
    if progress is None:
        raise UserError(f"{folder} has no checkpoint yet; finish it with `fedweave resume {folder}`.")
    return workspace, progress, config


def load_model(folder: Path, last: bool = False) -> RoutedModel:
    """The best round's model (or the last's), ready to answer."""
    _, config = RunFolder.open(folder)
    if method_class(config.method).uses_labels:
        raise UserError(f"{config.method} routes by task label and cannot answer a prompt that has none.")
    workspace, progress, _ = _reopen(folder, [], Console(quiet=True))
    return routed_models(workspace, progress.state if last else progress.best)[0]


def evaluate_run(folder: Path, overrides: list[str], data: Path | None, last: bool, console: Console) -> str:
    """Losses and scores as a table, on the run's test set or on a file."""
    examples: list[Example] | None = None
    if data is not None:
        if not data.is_file():
            raise UserError(f"--data {data}: there is no such file.")
        examples = read_examples(data)
        if not examples:
            raise UserError(f"--data {data}: the file is empty.")
    workspace, progress, config = _reopen(folder, overrides, console)
    held = workspace.test
    if examples is not None:
        rows, encoded = encode(workspace.backbone, examples, config.data.long_answers, console)
        features = compute_features(workspace.backbone, [e.prompt for e in encoded], console)
        held = held_out(rows, encoded, features)
        for label in held.labels:
            workspace.tasks.setdefault(label, Task(label, label, "rouge", config.evaluation.max_new_tokens))
    result = evaluate_state(workspace, progress.state if last else progress.best, held, console)
    rows_out = []
    for task in next(iter(result["loss"].values())):
        title = workspace.tasks[task].title if task in workspace.tasks else "macro average"
        cells = [f"{result['score'][task]:.3f}"] if "score" in result else []
        rows_out.append([title, *cells, *(f"{result['loss'][r][task]:.3f}" for r in result["loss"])])
    header = [
        "test",
        *([f"score {result['used']} ↑"] if "score" in result else []),
        *(f"loss {r} ↓" for r in result["loss"]),
    ]
    return table(header, rows_out)
