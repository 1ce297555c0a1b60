"""A grid of runs: what a crash or a broken cell costs, and what cells and processes share."""

import csv
import shutil
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from fedweave.cli import main
from fedweave.compare import compare, runner
from fedweave.compare.grid import cells, load_comparison
from fedweave.compare.runner import Runner
from fedweave.config import load_config
from fedweave.console import Console
from fedweave.errors import UserError
from fedweave.federation.compute import Compute
from fedweave.federation.message import Message
from fedweave.json_files import write_json
from fedweave.report.groups import find_runs
from fedweave.runs import workspace
from fedweave.runs.lock import locked
from fedweave.settings import to_tree
from tests.compare.test_tables import summary
from tests.helpers import read_json, write_jsonl


@pytest.mark.parametrize(
    ("name", "overrides", "best_of", "word"),
    [
        ("main-result", [], None, "main-results"),
        ("benchmark", ["method=fedit,fedwave"], None, "fedweave"),
        ("benchmark", ["training.round=1,2"], None, "training.rounds"),
        ("main-results", [], "training.lr", "no axis"),
        ("benchmark", ["training.lr=0.01,1e-2"], None, "training.lr=0.01 and training.lr=1e-2 are the same run"),
    ],
)
def test_mistakes_are_found_before_anything_runs(tmp_path, name, overrides, best_of, word):
    with pytest.raises(UserError, match=word):
        cells(load_comparison(name, overrides, best_of), tmp_path)


def test_a_grid_runs_survives_a_broken_cell_and_is_not_run_twice(tmp_path, quick):
    output = tmp_path / "grid"
    axes = ["method=fedit,ffa-lora", "seed=1,2"]
    grid = ["compare", "quickstart", *axes, *quick, "--output", str(output), "--quiet"]
    broken = output / "cells" / "seed-2_method-fedit"
    broken.mkdir(parents=True)
    (broken / "something").write_text("a folder that is in the way")
    assert main(grid) == 0
    first = read_json(output / "results.json")
    assert len(first) == 3 and "ffa-lora" in (output / "table.md").read_text()
    (broken / "something").unlink()
    broken.rmdir()
    times = {p: p.stat().st_mtime_ns for p in output.rglob("summary.json")}
    assert main(grid) == 0
    assert len(read_json(output / "results.json")) == 4
    assert all(p.stat().st_mtime_ns == t for p, t in times.items()), "finished cells must not run again"
    rows = list(csv.reader((output / "results.csv").open()))
    assert rows[0] == ["method", "quantity", "mean", "standard deviation", "seeds"] and rows[1][-1] == "2"
    assert r"\toprule" in (output / "table.tex").read_text()


def test_a_key_that_came_into_being_since_does_not_run_a_cell_again(tmp_path, quick):
    """A study of days outlives versions: what it did not know of has its default."""
    grid = cells(load_comparison("quickstart", [*quick, "method=fedit"], None), tmp_path)
    Runner({"one": grid}, Console(quiet=True)).run()
    (one,) = grid
    written, tree = read_json(one.folder / "summary.json"), to_tree(one.config)
    older = {**tree, "living": {key: value for key, value in tree["living"].items() if key != "alarms"}}
    for config, found in ((tree, True), (older, True), ({**older, "seed": 7}, False), ({**tree, "gone": 1}, False)):
        write_json(one.folder / "summary.json", {**written, "config": config})
        assert (one.finished is not None) == found


def test_a_reason_that_many_cells_have_is_said_once(tmp_path, capsys, monkeypatch):
    def run(self, cell):
        if cell.config.method != "fedit":
            raise UserError("data.path=gone: there is no such file." if cell.config.seed < 4 else "another.")
        return summary("fedit", cell.config.seed, 1.0, 0.5)

    monkeypatch.setattr(Runner, "_run", run)
    monkeypatch.setattr(runner, "with_life", lambda found, cell: found)
    compare(["quickstart"], ["method=fedit,fedweave", "seed=1,2,3,4"], [tmp_path], None, Console())
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert told == [
        "warning: 3 cells (seed=1, method=fedweave; …): data.path=gone: there is no such file.",
        "warning: seed=4, method=fedweave: another.",
        "warning: 4 cells failed; run the same command again to retry them.",
    ]


@pytest.mark.parametrize("minutes", ["-3", "nan"])
def test_a_time_that_is_none_is_refused(minutes, tmp_path, complains):
    line = complains("compare", "quickstart", "--output", tmp_path, "--minutes", minutes)
    assert f"--minutes must be at least 0, not {minutes}." in line


def test_processes_share_a_grid_and_what_one_gives_up_another_takes(tmp_path, quick, capsys):
    asked = ["quickstart"], [*quick, "method=fedit,local-only"], [tmp_path]
    with locked(_claim(tmp_path, "method-fedit")):
        first = compare(*asked, None, Console())
    said = capsys.readouterr()
    assert "another process has it" in said.err + said.out and "other processes have 1 cells" in said.err + said.out
    assert "local-only" in first and "fedit" not in first
    second = compare(*asked, None, Console(quiet=True))
    assert "local-only" in second and "fedit" in second


def _claim(output, name):
    folder = output / "cells" / f"{name}.claim"
    folder.mkdir(parents=True)
    return folder


def test_several_comparisons_share_cells_and_stop_in_time(tmp_path, quick, capsys):
    rates = tmp_path / "rates.yaml"
    rates.write_text("recipe: quickstart\naxes: {training.lr: [1.0e-3, 2.0e-3]}\nset: {method: fedit}\n")
    both = tmp_path / "methods.yaml"
    both.write_text("recipe: quickstart\naxes: {method: [ffa-lora, fedit]}\nset: {training.lr: 1.0e-3}\n")
    settings = [*quick, "seed=1", "evaluation.scores=false"]
    command = ["compare", str(rates), str(both), *settings, "--output", str(tmp_path / "out")]
    assert main([*command, "--minutes", "0"]) == 2
    assert "4 cells to go" in capsys.readouterr().err and not list(tmp_path.rglob("summary.json"))
    assert main(command) == 0
    assert "fedit" in capsys.readouterr().out
    assert len(list(tmp_path.rglob("summary.json"))) == 3  # fedit at 1e-3 stands in both tables and ran once
    table = read_json(tmp_path / "out" / "methods" / "results.json")
    assert [row["values"]["method"] for row in table] == ["ffa-lora", "fedit"]
    assert (tmp_path / "out" / "rates" / "table.md").is_file()
    methods = [run.method for run in find_runs([tmp_path / "out" / "methods"])]
    assert sorted(methods) == ["fedit", "ffa-lora"]


def test_cells_that_begin_alike_discover_once_and_give_the_same_to_the_last_bit(tmp_path, quick, monkeypatch):
    """Data, clustering and warmups of a process's earlier cells stand for those of the next, unless rows differ."""
    asked = ["attack.kind=none,flip,labels,inflate", "attack.clients=0.4", "federation.rule=clip", "seed=1"]
    settings = [*quick, *asked, "training.rounds=2", "evaluation.scores=false", "federation.norm_factor=0"]
    trained: list[str] = []
    train, load = Compute.train, workspace.load_data

    def counted(self, layout, router, lanes, label, *given, **more):
        trained.append(label)
        return train(self, layout, router, lanes, label, *given, **more)

    monkeypatch.setattr(Compute, "train", counted)
    monkeypatch.setattr(workspace, "load_data", lambda config: trained.append("data") or load(config))
    made = {}
    for place, together in (("together", True), ("alone", False)):
        grid, trained[:] = cells(load_comparison("quickstart", settings, None), tmp_path / place), []
        for group in [grid] if together else [[cell] for cell in grid]:
            outcome = Runner({"one": group}, Console(quiet=True)).run()["one"]
            assert not outcome.failures
        made[place] = [_everything(cell.folder) for cell in grid]
        assert trained.count("warmup") == trained.count("data") == (2 if together else 4)
    for ours, theirs in zip(made["together"], made["alone"], strict=True):
        assert ours == theirs


def test_cells_that_score_otherwise_do_not_share_their_data(tmp_path, small):
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": f"Add {i} and 1.", "response": str(i + 1)} for i in range(40)])
    settings = [*small, "data.source=jsonl", f"data.path={tmp_path / 'rows.jsonl'}"]
    kept, found = workspace.Kept(), []
    for metric in ("number", "exact", "number"):
        config = load_config("quickstart", [*settings, f"evaluation.metrics={metric}"])
        prepared = workspace.prepare(config, Console(quiet=True), kept)
        found.append({task.metric for task in prepared.data.tasks.values()})
    assert found == [{"number"}, {"exact"}, {"number"}]


def _everything(folder) -> dict[str, object]:
    """What a run has written, but for times and places."""
    newest = max((folder / "checkpoints").iterdir())
    tensors = {p.name: load_file(p) for p in newest.glob("*.safetensors")}
    found: dict[str, object] = {
        f"{file} {name}": (x.dtype, x.numpy().tobytes()) for file, xs in tensors.items() for name, x in xs.items()
    }
    assert found
    summary = read_json(folder / "summary.json")
    found |= {key: summary[key] for key in ("test", "validation", "communication", "audit", "buckets", "experts")}
    return found | {"discovery": read_json(folder / "discovery.json")}


def test_every_comparison_gets_its_first_seed_before_any_its_second(tmp_path, monkeypatch):
    grids = {
        name: cells(load_comparison("benchmark", [axis, "seed=7,8"], None), tmp_path / name)
        for name, axis in {"a": "method=fedit,fedweave", "b": "data.alpha=0.1,0.5"}.items()
    }
    order = []
    monkeypatch.setattr(Runner, "_run", lambda self, cell: order.append(cell) or {})
    outcomes = Runner(grids, Console(quiet=True)).run()
    assert [c.config.seed for c in order] == [7, 7, 7, 7, 8, 8, 8, 8]
    assert [c for name in grids for c, _ in outcomes[name].finished] == grids["a"] + grids["b"]


@pytest.mark.parametrize("late", [True, False])
def test_processes_of_one_run_stop_before_the_same_cell(tmp_path, monkeypatch, late):
    """The first one's clock decides, whatever another's says."""
    other = SimpleNamespace(rank=1, size=2, pass_on=lambda owner, own: Message(facts={"late": late}))
    monkeypatch.setattr(runner, "world", lambda: other)
    monkeypatch.setattr(Runner, "_run", lambda self, cell: {})
    grid = cells(load_comparison("benchmark", ["method=fedit,fedweave"], None), tmp_path)
    outcome = Runner({"a": grid}, Console(quiet=True), minutes=0.0 if not late else 99.0).run()["a"]
    assert (len(outcome.left), len(outcome.finished)) == ((2, 0) if late else (0, 2))


def test_a_setting_that_no_name_tells_gets_a_run_of_its_own(tmp_path, quick):
    """Names of folders tell the axes alone; what lies there is resumed only if it is the same run."""
    asked = [*quick, "method=fedit,local-only", "evaluation.scores=false"]

    def found(*more: str):
        grid = cells(load_comparison("quickstart", [*asked, *more], None), tmp_path)
        outcome = Runner({"one": grid}, Console(quiet=True)).run()["one"]
        assert not outcome.failures
        return [(cell.folder.name, summary["config"]["training"]["lr"]) for cell, summary in outcome.finished]

    assert found("training.lr=0.001") == [("method-fedit", 0.001), ("method-local-only", 0.001)]
    assert found("training.lr=0.002") == [("method-fedit (2)", 0.002), ("method-local-only (2)", 0.002)]
    shutil.rmtree(tmp_path / "cells" / "method-local-only")
    (tmp_path / "cells" / "method-fedit" / "summary.json").unlink()  # interrupted: resumed where it lies
    assert found("training.lr=0.001") == [("method-fedit", 0.001), ("method-local-only", 0.001)]
    assert len(list((tmp_path / "cells").glob("method-fedit*/config.yaml"))) == 2


def test_a_grid_of_which_nothing_can_run_says_why_in_its_one_sentence(tmp_path, complains):
    grid = ["quickstart", "method=fedit,fedweave", "data.source=jsonl", f"data.path={tmp_path / 'gone'}", "--quiet"]
    said = complains("compare", *grid, "--output", tmp_path / "grid")
    assert "no cell of the comparison finished: 2 cells (method=fedit; …): data.path=" in said
    assert said.count("no such file") == 1
    (tmp_path / "file").write_text("")
    assert f"--output {tmp_path / 'file'} is a file" in complains("compare", *grid, "--output", tmp_path / "file")
