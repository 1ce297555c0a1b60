"""What a run's or a bundle's experts are: written at the end of a run, or made later of rows that somebody has."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fedweave.backbone.features import compute_features
from fedweave.bundle.load import is_bundle, verify_bundle
from fedweave.config import Config, from_tree
from fedweave.console import Console
from fedweave.data import load_data
from fedweave.data.examples import Example
from fedweave.data.own import gather
from fedweave.description.describe import Asked, describe
from fedweave.description.record import FILE, Experts, read_experts, rename, write_experts
from fedweave.errors import UserError
from fedweave.inference.model import FedWeaveModel
from fedweave.runs.folder import RunFolder
from fedweave.runs.use import load
from fedweave.runs.workspace import TestSet, Workspace
from fedweave.schema import Prediction

Owned = list[tuple[str, Example]]  # whose row it is, and the row


def describe_at_the_end(
    folder: Path, workspace: Workspace, model: FedWeaveModel, predictions: Sequence[Prediction], round: int
) -> None:
    """experts.json of a run that ends here: its clients' prompts, and examples out of its test. Names stay."""
    members = workspace.engine.members
    rows = [(client.name, e) for client in members for e in workspace.client_rows[client.index]]
    features = torch.cat([client.data.features for client in members])
    found = describe(
        model, _asked(rows, features), _held(workspace.test, predictions), _source(rows, "training "), round
    )
    write_experts(folder, _with_old_names(folder, found))


def describe_folder(
    folder: Path,
    data: Path | None,
    last: bool,
    names: dict[int, str],
    console: Console,
    backbone: str | None = None,
) -> Experts:
    """What is known of a run's or a bundle's experts, or what ``data``, else a run's own data, shows of them; a run
    keeps it, with the names that a person gives. A bundle stays as it was exported."""
    closed = is_bundle(folder)
    if closed and names:
        raise UserError(f"{folder} is a bundle, which stays as it was exported; name the experts of its run.")
    known = read_experts(folder) if data is None and not last else None
    found = known or _describe(folder, data, last, console, backbone)
    if closed:
        return found
    found = rename(_with_old_names(folder, found), names)
    if found != _old(folder):
        write_experts(folder, found)
        console.say(f"{folder / FILE} written.")
    return found


def _describe(folder: Path, data: Path | None, last: bool, console: Console, backbone: str | None) -> Experts:
    if is_bundle(folder):
        if data is None:
            raise UserError(
                f"the bundle {folder} says nothing of its experts; --data FILE describes them by rows of yours."
            )
        description = verify_bundle(folder)
        config, round = from_tree({"method": description["method"]}), description["round"]
    else:
        run, config = RunFolder.open(folder)
        snapshot = run.newest()
        round = snapshot.meta["completed" if last else "best_round"] if snapshot else 0
        if data is None and config.data.source == "sites":
            raise UserError(
                f"the data of {folder} is at its sites; --data FILE describes its experts by rows that you have."
            )
    rows, held, source = _given(config, data) if data else _own(config)
    model = load(folder, last=last, model=backbone)
    features = _features(model, rows, console)
    shown = _asked(held, _features(model, held, console)) if held else _asked(rows, features)
    return describe(model, _asked(rows, features), shown, source, round)


def _given(config: Config, data: Path) -> tuple[Owned, Owned, str]:
    """Rows of a file or a folder of the user's; examples are taken from the same rows."""
    gathered = gather(replace(config.data, source="jsonl", path=str(data)))
    rows = [(name, e) for name, own in gathered.clients.items() for e in own]
    rows += [("", e) for own in (gathered.pool, *gathered.held.values()) for e in own]
    if not rows:
        raise UserError(f"--data {data} holds no row.")
    return rows, [], _source(rows, "", f" in {data.name}")


def _own(config: Config) -> tuple[Owned, Owned, str]:
    """The run's own rows, with the labels that they have now."""
    loaded = load_data(config)
    rows = [(name, e) for name, own in loaded.clients.items() for e in own]
    return rows, [("", e) for e in loaded.test], _source(rows, "training ")


def _source(rows: Owned, kind: str, where: str = "") -> str:
    clients = len({name for name, _ in rows if name})
    of = f" of {clients} client{'s' * (clients > 1)}" if clients else ""
    return f"{len(rows)} {kind}prompts{of}{where}"


def _features(model: FedWeaveModel, rows: Owned, console: Console) -> torch.Tensor:
    encoded = model.backbone.prompts.encode_prompts([e.prompt for _, e in rows])
    return compute_features(model.backbone, encoded, console)


def _asked(rows: Owned, features: torch.Tensor) -> Asked:
    return Asked(
        [e.prompt for _, e in rows],
        features,
        [name or "unknown" for name, _ in rows] if any(name for name, _ in rows) else [],
        [e.task for _, e in rows],
        [e.response for _, e in rows],
    )


def _held(test: TestSet, predictions: Sequence[Prediction]) -> Asked:
    """The test set with the answers that the test made; nothing where it made none."""
    answers = [p["prediction"] for p in predictions if "prediction" in p]
    if not answers:
        return Asked([], test.features[:0])
    return replace(_asked([("", e) for e in test.examples], test.features), answers=answers)


def _with_old_names(folder: Path, found: Experts) -> Experts:
    """Names that a person has given are kept when the description is made anew."""
    old = _old(folder)
    if old is None or len(old["experts"]) != len(found["experts"]):
        return found
    return rename(found, {m: e["name"] for m, e in enumerate(old["experts"])})


def _old(folder: Path) -> Experts | None:
    try:
        return read_experts(folder)
    except UserError:  # damaged: there is nothing to keep
        return None
