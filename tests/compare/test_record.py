"""Every cell of a comparison in one file, for documents."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks import private_picture
from benchmarks.suite_picture import draw, leads
from fedweave.cli import main
from fedweave.compare import runner
from fedweave.compare.grid import cells, load_comparison
from fedweave.compare.record import Record
from fedweave.console import Console
from tests.helpers import ROOT, read_json


def test_a_record_has_every_cell_in_short_and_keeps_those_of_others(tmp_path, quick):
    record = tmp_path / "results" / "all.json"
    grid = ["compare", "quickstart", "method=fedit,ffa-lora", *quick, "seed=1", "--record", str(record), "--quiet"]
    assert main([*grid, "data.name=mine", "--output", str(tmp_path / "a")]) == 0
    assert main([*grid, "data.name=yours", "method=fedit", "--output", str(tmp_path / "b")]) == 0
    found = read_json(record)
    assert list(found["cells"]) == ["a/method-fedit", "a/method-ffa-lora", "b/run"]
    one, run = found["cells"]["a/method-fedit"], read_json(tmp_path / "a/cells/method-fedit/summary.json")
    assert (one["set"], one["method"], one["seed"]) == ("mine", "fedit", 1)
    assert one["model"] == Path(run["config"]["backbone"]["model"]).name
    assert one["test"]["best"]["loss"]["sparse"]["macro"] == pytest.approx(
        run["test"]["best"]["loss"]["sparse"]["macro"], abs=1e-5
    )
    assert one["settings"]["training.local_steps"] == 1 and one["validation"]["best_round"] in (0, 1)
    assert str(tmp_path) not in record.read_text() and found["environment"] == run["environment"]
    known = read_json(ROOT / "docs/results/h200-comparison.json")["cells"]
    assert set(next(iter(known.values()))) <= set(one)


@pytest.mark.parametrize("content", ["[1, 2]", '{"a": 1}', "spoilt"])
def test_a_record_that_is_something_else_is_not_overwritten(tmp_path, quick, complains, content):
    other = tmp_path / "other.json"
    other.write_text(content)
    grid = ["compare", "quickstart", "method=fedit", *quick, "--record", other, "--output", tmp_path / "x"]
    assert "name another file in --record" in complains(*grid, "--quiet")
    assert other.read_text() == content and not (tmp_path / "x").exists(), "it is said before anything runs"


def tables(folder: Path) -> dict[str, str]:
    return {p.name: p.read_text() for p in folder.iterdir() if p.is_file() and p.name != "results.json"}


@pytest.mark.parametrize(
    "axes",
    [
        ["method=fedit,fedweave", "seed=1,2"],
        ["living.notice=open,off", "training.rounds=2", "data.changes=['2: all gain sum']", "data.train=12"],
        ["attack.kind=none,flip", "attack.clients=0.4"],
    ],
    ids=["plain", "drift", "attack"],
)
def test_tables_come_from_a_record_alone(tmp_path, quick, capsys, complains, axes):
    """On a fresh machine: no run folders, and no model."""
    record, grid = tmp_path / "kept" / "record.json", tmp_path / "grid"
    command = ["compare", "quickstart", *quick, *axes, "--output", str(grid), "--record", str(record)]
    assert main(command) == 0 and "(in the record)" not in capsys.readouterr().err
    made, kept = tables(grid), record.read_text()
    assert ("course.json" in made) == ("living.notice=open,off" in axes)
    shutil.rmtree(grid)
    model = next(item for item in quick if item.startswith("backbone.model="))
    elsewhere = f"backbone.model=/gone/{Path(model.partition('=')[2]).name.upper()}"
    assert main([*command, elsewhere, "--minutes", "0"]) == 0
    said = capsys.readouterr()
    assert said.err.count("(in the record)") == len(read_json(record)["cells"])
    assert tables(grid) == made and said.out.strip() == made["table.md"].strip() and record.read_text() == kept
    assert "a report needs their run folders" in complains("report", grid)


def one_cell(quick, *overrides, folder=Path("x")):
    (cell,) = cells(load_comparison("quickstart", [*quick, *overrides], None), folder)
    return cell


@pytest.fixture
def written(tmp_path, quick):
    """(record of one cell, the cell, its summary)"""
    cell, path = one_cell(quick, "method=fedit", folder=tmp_path / "study"), tmp_path / "record.json"
    runner.Runner({"study": [cell]}, Console(quiet=True), record=Record(path)).run()
    return path, cell, cell.finished


@pytest.mark.parametrize(
    "other",
    [
        "seed=9",
        "training.lr=0.0123",
        "init=there",
        "backbone.model=a/other",
        "data.name=x",
        "evaluation.last=false",
    ],
)
def test_another_cell_is_not_taken_for_it(written, quick, other):
    record = Record(written[0])
    assert record.find(one_cell(quick, "method=fedit")) is not None
    assert record.find(one_cell(quick, "method=fedit", other)) is None


def test_places_count_where_a_grid_varies_them(written, quick, tmp_path):
    _, cell, summary = written
    asked = [*quick, "method=fedit", "data.source=paper", "data.path=a/one,a/two"]
    grid = cells(load_comparison("quickstart", asked, None), tmp_path)
    record = Record(tmp_path / "places.json")
    record.add(grid[0], summary)
    found = [Record(record.path).find(one) is not None for one in (*grid, cell)]
    assert found == [True, False, False]


def test_a_default_that_changes_later_changes_no_cell(written):
    path, cell, _ = written
    content = json.loads(path.read_text())
    defaults = content["defaults"]
    for changed, found in (
        ({**defaults, "living.alarms": 77}, False),  # it ran with what was the default then
        ({key: value for key, value in defaults.items() if key != "living.alarms"}, True),  # a key that is newer
        ({**defaults, "gone": 1}, True),
        (None, True),  # files of earlier versions
    ):
        path.write_text(json.dumps({**content, "defaults": changed} if changed else {"cells": content["cells"]}))
        assert (Record(path).find(cell) is not None) == found


@pytest.mark.parametrize(("rule", "found"), [("mean", True), ("clip", True), ("agreement", False)])
def test_contested_prompts_make_another_run_where_the_rule_reads_it(written, quick, rule, found):
    """Records made before there was a vote say that theirs kept both."""
    path, _, summary = written
    kept = one_cell(quick, f"federation.rule={rule}", "federation.contested=keep")
    record = Record(path)
    record.add(kept, summary)
    assert record.find(kept) is not None
    assert (record.find(one_cell(quick, f"federation.rule={rule}")) is not None) == found


def test_the_study_of_attacks_tells_cells_that_kept_contested_prompts(tmp_path):
    record = Record(ROOT / "docs/results/h200-attacks-before-standing.json")
    model = ["data.path=x", "backbone.model=SmolLM2-135M-Instruct", "federation.rule=agreement", "seed=42,50"]

    def known(*more):
        found = (
            one for one in cells(load_comparison("attacks", [*model, *more], None), tmp_path) if record.find(one)
        )
        return {(one.config.seed, one.config.attack.kind) for one in found}

    fresh, first = {(50, "none"), (50, "labels")}, {(42, kind) for kind in ("none", "absent", "flip", "labels")}
    assert known() >= fresh and not known() & first, "with a vote, the default"
    assert known("federation.contested=keep") >= fresh | first


def test_another_cell_of_the_same_name_stands_beside_it(written, quick, tmp_path):
    path, cell, summary = written
    other = one_cell(quick, "method=fedit", "seed=9", folder=tmp_path / "study")
    for _ in range(2):
        Record(path).add(other, summary)
    assert list(read_json(path)["cells"]) == ["study/run", "study/run (2)"]
    assert Record(path).find(cell) is not None and Record(path).find(other) is not None


@pytest.mark.parametrize("old", ["settings", "model", "test", "commit", None])
def test_cells_that_do_not_say_enough_stay_and_are_nobodys(written, old):
    """Records of earlier versions lack this or that: docs/results/h200-seeds-42-44.json does not name its model."""
    path, cell, summary = written
    content = json.loads(path.read_text())
    ((name, entry),) = content["cells"].items()
    short = {key: value for key, value in entry.items() if key != old} if old else ["a", "list"]
    path.write_text(json.dumps({**content, "cells": {name: short}}))
    record = Record(path)
    assert record.find(cell) is None
    record.add(cell, summary)
    assert read_json(path)["cells"] == {name: short, f"{name} (2)": entry}


@pytest.mark.parametrize(("named", "known"), [([], [True, False]), (["data.name=mine"], [True, True])])
def test_rows_of_ones_own_are_known_by_the_name_of_their_folder(written, quick, tmp_path, named, known):
    """Whatever the machine calls the folders above; a name for the data says that they are the same."""
    asked = [
        [*quick, *named, "data.source=jsonl", f"data.path={place}"] for place in ("/here/mine", "/there/yours")
    ]
    first, other = (one_cell(own, "method=fedit") for own in asked)
    record = Record(tmp_path / "own.json")
    record.add(first, written[2])
    moved = one_cell([item.replace("/here/", "/elsewhere/") for item in asked[0]], "method=fedit")
    assert [record.find(one) is not None for one in (moved, other)] == known


def test_processes_that_share_a_grid_lose_no_cell_of_the_record(written, quick, tmp_path):
    path, _, summary = written
    grid = cells(load_comparison("quickstart", [*quick, f"seed={','.join(map(str, range(24)))}"], None), tmp_path)

    def add(own) -> None:
        record = Record(path)
        for cell in own:
            record.add(cell, summary)

    with ThreadPoolExecutor(4) as pool:  # whoever opens the lock has it, thread or process
        list(pool.map(add, [grid[i::4] for i in range(4)]))
    assert len(read_json(path)["cells"]) == 25 and not list(path.parent.glob(".*"))


def test_a_grid_that_is_cut_off_has_recorded_what_was_finished(tmp_path, quick, monkeypatch):
    started, start = [], runner.start

    def cut(config, *given):
        started.append(config.method)
        if len(started) == 2:
            raise KeyboardInterrupt
        return start(config, *given)

    monkeypatch.setattr(runner, "start", cut)
    grid = ["compare", "quickstart", *quick, "method=fedit,ffa-lora", "--output", str(tmp_path / "a")]
    assert main([*grid, "--record", str(tmp_path / "r.json"), "--quiet"]) != 0
    assert list(read_json(tmp_path / "r.json")["cells"]) == ["a/method-fedit"]


def test_weights_that_are_not_those_of_the_record_are_told(written, quick, tmp_path, capsys):
    path, _, summary = written
    other = one_cell(quick, "method=ffa-lora", folder=tmp_path / "study")
    Record(path).add(other, {**summary, "backbone": {"model": "m", "fingerprint": "another"}})
    grid = ["compare", "quickstart", *quick, "method=fedit,ffa-lora", "--output", str(tmp_path / "new")]
    assert main([*grid, "--record", str(path)]) == 0
    assert "different weights under the name" in capsys.readouterr().err


def test_the_suites_first_cells_count_as_finished(tmp_path):
    record = Record(ROOT / "docs/results/suite.json")
    for model in ("HuggingFaceTB/SmolLM2-135M-Instruct", "somewhere/smollm2-135m-instruct"):
        suite = cells(load_comparison("suite", ["data.path=x", f"backbone.model={model}"], None), tmp_path)
        found = [cell for cell in suite if record.find(cell)]
        assert len(found) >= 19 and sum(cell.config.seed == 45 for cell in found) >= 11


def test_the_suites_picture_has_every_seed_that_both_methods_have(tmp_path):
    def entry(method, seed, loss, unseen=None, model="tiny"):
        tested = {"used": "soft", "loss": {"soft": {"macro": loss}, "sparse": {"macro": 9.0}}}
        more = {"unseen": {"used": "soft", "loss": {"soft": {"macro": unseen}}}} if unseen else {}
        return {"set": "natural", "method": method, "seed": seed, "model": model, "test": {"best": tested, **more}}

    pairs = [entry("fedit", 1, 2.0, 4.0), entry("fedweave", 1, 1.8, 4.2), entry("fedweave", 2, 1.0)]
    cells = dict(enumerate([*pairs, entry("fedit", 2, 5.0, model="other")]))
    assert leads(cells, "Tiny") == {"natural": {1: pytest.approx(-0.1)}, "unseen": {1: pytest.approx(0.05)}}
    (tmp_path / "suite.json").write_text(json.dumps({"cells": cells}))
    draw(tmp_path / "suite.json", tmp_path / "suite.svg", "tiny")
    picture = (tmp_path / "suite.svg").read_text()
    assert "−10.0 %" in picture and "+5.0 %" in picture and "freely worded" not in picture


def test_the_picture_of_privacy_has_what_the_record_has_and_says_what_it_has_not(tmp_path):
    def entry(clients, loss, buckets=1, **settings):
        tested = {"best": {"used": "sparse", "loss": {"sparse": {"macro": loss}, "soft": {"macro": 9.0}}}}
        return {"clients": clients, "test": tested, "settings": {"discovery.max_buckets": buckets, **settings}}

    found = private_picture.losses({
        "private/a": entry(20, 1.0), "private/b": entry(20, 2.0), "private/c": entry(20, 5.0, buckets=8),
        "private/d": entry(200, 3.0, **{"privacy.level": "client", "privacy.epsilon": 2.0}),
        "private-search/e": entry(200, 7.0),
    })  # fmt: skip
    assert found == {(20, "none", 8.0): 1.5, (200, "client", 2.0): 3.0}
    private_picture.draw(tmp_path / "privacy.svg")
    drawn = (tmp_path / "privacy.svg").read_text()
    known = private_picture.losses(read_json(private_picture.STUDY)["cells"])
    asked = len(private_picture.BARS) * 2
    assert all(f"{loss:.3f}" in drawn for loss in known.values())
    assert drawn.count("not run") == asked - len(known)
