"""Which runs a page is about: runs that differ only by seed are one group, named by what sets it apart."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedweave.errors import UserError
from fedweave.events import ValidationEvent
from fedweave.json_files import read_json
from fedweave.runs.reading import RunRecord, read_run
from fedweave.schema import ComparedCell, RoutingCost
from fedweave.settings import flatten, to_tree

# Keys that never make two runs different experiments.
_SAME = (
    "output",
    "seed",
    "loggers",
    "finish",
    "evaluation.batch_size",
    "training.clients_per_step",
    "training.checkpointing",
    "backbone.device",
)

Curve = dict[int, list[float]]  # round -> one value per seed


@dataclass
class Group:
    """Runs of one experiment that differ only by seed."""

    label: str
    runs: list[RunRecord]

    @property
    def first(self) -> RunRecord:
        return self.runs[0]

    def finished(self) -> list[RunRecord]:
        """Runs with test results."""
        return [run for run in self.runs if run.best]

    def curve(self, figure: Callable[[ValidationEvent], float | None]) -> Curve:
        """A figure of the validations by round."""
        out: Curve = {}
        for run in self.runs:
            for event in run.validations:
                if (value := figure(event)) is not None:
                    out.setdefault(event["round"], []).append(value)
        return dict(sorted(out.items()))

    def task_losses(self, task: str) -> Curve:
        return self.curve(lambda event: event.get("tasks", {}).get(task))

    def task_scores(self, task: str) -> Curve:
        return self.curve(lambda event: event.get("scores", {}).get(task))

    def losses(self) -> Curve:
        """The mean over tasks, or over all examples of the sites."""
        return self.curve(lambda event: event["tasks"]["macro"] if "tasks" in event else event["loss"])

    def test(self, kind: str, task: str, unseen: bool = False) -> list[float]:
        """Per seed the test score, or the loss of the routing that the method uses; also of unseen tasks."""
        values = []
        for run in self.runs:
            if tested := run.unseen if unseen else run.best:
                table = tested.get("score", {}) if kind == "score" else tested["loss"][tested["used"]]
                values += [table[task]] if task in table else []
        return values

    def routings(self) -> list[dict[str, RoutingCost]]:
        """Per seed what each routing scores and costs, where that was compared."""
        return [run.best["routings"] for run in self.runs if run.best and "routings" in run.best]


def on_common_seeds(groups: Sequence[Group]) -> list[Group]:
    """Groups without the seeds that others have not finished: means over unlike seeds make a trend of their own."""
    seeds = set.intersection(*({run.seed for run in group.finished()} for group in groups)) if groups else set()
    if not seeds:
        return list(groups)
    return [replace(group, runs=[run for run in group.runs if run.seed in seeds]) for group in groups]


def seeds_note(groups: Sequence[Group]) -> str:
    """What a caption adds when curves are means."""
    return " Line: mean over seeds; shade: one standard deviation." if any(len(g.runs) > 1 for g in groups) else ""


def find_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """Run folders as they are; a comparison's folder stands for all of its cells."""
    folders: list[Path] = []
    for path in paths:
        if (path / "config.yaml").is_file():
            folders.append(path)
        elif path.is_dir() and (cells := _cells(path)):
            folders += cells
        elif (path / "results.json").is_file():
            raise UserError(f"{path}: all that is left of its cells is a record; a report needs their run folders.")
        else:
            raise UserError(f"{path} is neither a run folder (no config.yaml) nor a comparison's (no cells/).")
    return [read_run(folder) for folder in dict.fromkeys(folders)]


def _cells(path: Path) -> list[Path]:
    """A comparison's cells: its own, and those that another comparison had run before."""
    own = {p.parent for p in (path / "cells").glob("*/config.yaml")}
    compared = read_json(path / "results.json", list[ComparedCell]) or []
    listed = {(path / cell["folder"]).resolve() for cell in compared if cell["folder"] is not None}
    own |= {folder for folder in listed - {p.resolve() for p in own} if (folder / "config.yaml").is_file()}
    return sorted(own)


def group_runs(runs: Sequence[RunRecord]) -> list[Group]:
    """Groups in order of first appearance, named by what distinguishes them."""
    flat = [flatten(to_tree(run.config)) for run in runs]
    keys = [key for key in flat[0] if key not in _SAME and len({str(values[key]) for values in flat}) > 1]
    members: dict[tuple[str, ...], list[RunRecord]] = {}
    for run, values in zip(runs, flat, strict=True):
        members.setdefault(tuple(str(values[key]) for key in keys), []).append(run)
    return [
        Group(_label(keys, values) or found[0].method, sorted(found, key=lambda r: r.seed))
        for values, found in members.items()
    ]


def _label(keys: Sequence[str], values: Sequence[str]) -> str:
    short = {"method": "{}", "data.alpha": "α = {}"}
    return ", ".join(
        short.get(k, f"{k.split('.')[-1]} = {{}}").format(v) for k, v in zip(keys, values, strict=True)
    )
