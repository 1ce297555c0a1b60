"""The runs that a run is held against: every client alone, and one adapter for all. They stand in RUN/worth."""

from pathlib import Path

from fedweave.analysis.worth import FILE, REFERENCES, Worth, worth
from fedweave.compare.grid import Cell
from fedweave.compare.runner import Runner, faults
from fedweave.config import from_tree
from fedweave.console import Console, duration
from fedweave.errors import UserError
from fedweave.json_files import write_json
from fedweave.runs.reading import RunRecord, read_run
from fedweave.schema import Tested
from fedweave.settings import to_tree


def weigh(folder: Path, console: Console, model: str | None = None) -> Worth:
    """Train what is missing, put the clients side by side, and keep the answer in the run; ``model`` is where the
    backbone lies, if elsewhere than trained."""
    run = read_run(folder)
    ours = _tested(run)
    grid = [_cell(run, method, model) for method in REFERENCES if method != run.method]
    taken = run.summary["timing"]["total_s"] if run.summary and "timing" in run.summary else 0.0
    if not all(cell.finished for cell in grid):
        console.say(f"{len(grid)} references, each trained like {folder}, which took {duration(taken)}")
    outcome = Runner({"worth": grid}, console).run()["worth"]
    if why := faults([outcome]):
        raise UserError(why[0])
    references: dict[str, Tested] = {
        str(cell.values["method"]): summary["test"]["best"] for cell, summary in outcome.finished
    }
    found = worth(run.method, run.experts, ours, references)
    write_json(folder / FILE, found)
    return found


def _tested(run: RunRecord) -> Tested:
    """The run's test with its clients' figures, or why there is none."""
    if run.config.data.source == "sites":
        raise UserError(
            f"the data of {run.path} is at its sites, so no reference can be trained here; simulate it to compare."
        )
    if run.method in REFERENCES and run.method != "fedit":
        raise UserError(f"{run.path} is itself what others are held against: method={run.method}.")
    if run.best is None:
        raise UserError(f"{run.path} has not been tested yet; finish it with `{run.resume}`.")
    if not run.best.get("clients"):
        raise UserError(f"{run.path} has no figures of single clients; `{run.resume}` tests it again.")
    return run.best


def _cell(run: RunRecord, method: str, model: str | None) -> Cell:
    """The run's own config with another method; what only costs time is left out."""
    folder = run.path / "worth" / method
    tree = to_tree(run.config) | {
        "method": method,
        "output": str(folder),
        "init": None,
        "loggers": [],
        "finish": [],
    }
    tree["evaluation"] |= {"compare_routings": False, "score_rounds": False, "untouched": False, "last": False}
    # references open no experts, a client alone has no sums, and a simulation has the same ones without masks
    tree["living"] |= {"notice": "off"}
    tree["federation"] |= {"secure_aggregation": False}
    tree["backbone"] |= {} if model is None else {"model": model}
    return Cell({"method": method}, from_tree(tree), folder)
