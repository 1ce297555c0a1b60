"""A run's data and model may move; other rows, or another model, are refused, and labels may come later."""

import shutil
from pathlib import Path

import pytest

import fedweave
from fedweave.cli import main
from fedweave.config import load_config
from fedweave.data.sample import make_sample
from tests.helpers import SMALL, read_json, read_jsonl, write_jsonl


def write_data(folder: Path, labels: bool = False) -> Path:
    pools, _ = make_sample(12, seed=0)
    folder.mkdir()
    for name, task in (("north", "edit"), ("south", "sum")):
        rows = [{"prompt": e.prompt, "response": e.response} for e in [*pools[task], *pools["mood"][:4]]]
        write_jsonl(folder / f"{name}.jsonl", [{**row, "task": task} for row in rows] if labels else rows)
    return folder


@pytest.fixture
def moved(tmp_path, model_folder):
    """A run of own data, stopped after two rounds, whose data and model are no longer where they were."""
    data, model, run = write_data(tmp_path / "data"), tmp_path / "model", tmp_path / "run"
    shutil.copytree(model_folder("llama"), model)
    own = [item for item in SMALL if not item.startswith("data.")]
    settings = [f"data.path={data}", f"backbone.model={model}", "training.rounds=2", f"output={run}"]
    run.mkdir()  # an empty folder is a fine place for a run
    assert main(["run", "own", *own, *settings, "--quiet"]) == 0
    shutil.move(data, tmp_path / "archive")
    shutil.move(model, tmp_path / "models")
    return run, [f"data.path={tmp_path / 'archive'}", f"backbone.model={tmp_path / 'models'}"]


def test_a_run_goes_on_where_its_data_and_model_lie_now(moved, complains, says, tmp_path):
    run, places = moved
    assert "backbone.model=" in complains("generate", run, "Hi")
    assert "data.path=" in complains("resume", run)
    assert fedweave.load(run, model=str(tmp_path / "models")).generate(["Hi"], max_new_tokens=2)
    assert "test" in says("evaluate", run, *places, "--quiet")
    assert main(["resume", str(run), *places, "training.rounds=3", "backbone.device=auto", "--quiet"]) == 0
    assert read_json(run / "summary.json")["rounds"] == 3
    says("generate", run, "Hi", "--max-new-tokens", 2)  # the places are remembered


def test_a_run_is_weighed_and_diagnosed_with_a_backbone_that_lies_elsewhere(tiny_copy, complains, says, tmp_path):
    run, gone = tiny_copy(), tmp_path / "gone"
    model = load_config(run / "config.yaml").backbone.model
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace(model, str(gone)))
    for verb in (["diagnose", run, "--clients", 1], ["worth", run]):
        assert str(gone) in complains(*verb, "--quiet"), verb
        says(*verb, "--quiet", "--backbone", model)


def test_another_model_is_refused_and_not_remembered(moved, complains, tmp_path):
    run, places = moved
    before = (run / "config.yaml").read_text()
    weights = tmp_path / "models" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8] + b"\x00" * 8)
    assert "another backbone" in complains("resume", run, *places, "--quiet")
    assert (run / "config.yaml").read_text() == before


def test_rewritten_rows_are_refused(moved, complains, tmp_path, capsys):
    run, places = moved
    file = tmp_path / "archive" / "north.jsonl"
    rows = read_jsonl(file)
    write_jsonl(file, [{**row, "response": "42"} for row in rows])
    said = complains("resume", run, *places, "--quiet")
    assert "has changed since the run began (training and validation and test)" in said
    assert f"fedweave export {run} BUNDLE" in said and "init=BUNDLE" in said
    assert main(["evaluate", str(run), *places]) == 0
    assert "the test rows are not those" in capsys.readouterr().err
    write_jsonl(file, rows)
    assert main(["resume", str(run), *places, "--quiet"]) == 0


def test_labels_may_come_later(moved, tmp_path):
    """They audit: the rows are the same."""
    run, places = moved
    assert list(read_json(run / "discovery.json")["bucket_tasks"]["north"][0]) == ["all"]
    write_data(tmp_path / "labelled", labels=True)
    places[0] = f"data.path={tmp_path / 'labelled'}"
    assert main(["resume", str(run), *places, "training.rounds=3", "--quiet"]) == 0
    assert set(read_json(run / "manifest.json")["tasks"]) == {"edit", "sum"}
    assert list(read_json(run / "discovery.json")["bucket_tasks"]["north"][0]) == ["edit"]
    assert {"edit", "sum"} < set(read_json(run / "summary.json")["test"]["best"]["loss"]["sparse"])
    assert main(["report", str(run)]) == 0 and main(["diagnose", str(run), "--quiet"]) == 0


def test_labels_may_lie_in_a_column_that_is_named_later(moved, complains, tmp_path):
    run, places = moved
    for file in (tmp_path / "archive").glob("*.jsonl"):
        write_jsonl(
            file, [{**row, "kind": "sum" if "How many" in row["prompt"] else "text"} for row in read_jsonl(file)]
        )
    assert main(["resume", str(run), *places, "data.fields=task=kind", "training.rounds=3", "--quiet"]) == 0
    assert set(read_json(run / "manifest.json")["tasks"]) == {"sum", "text"}
    said = complains("resume", run, "data.fields=prompt=response,response=prompt", "training.rounds=4", "--quiet")
    assert "has changed since the run began" in said
