"""The command line from a recipe to a model that answers."""

import json
import shutil

import pytest
import yaml

import fedweave
from fedweave.cli import main


@pytest.fixture
def finished(tmp_path, small):
    folder = tmp_path / "run"
    assert main(["run", "quickstart", *small, f"output={folder}", "--quiet"]) == 0
    return folder


def test_a_run_leaves_everything_it_promises(finished):
    names = {p.name for p in finished.iterdir()}
    assert names == {"config.yaml", "manifest.json", "discovery.json", "embedding.json", "metrics.jsonl",
                     "predictions.jsonl", "progress.json", "summary.json", "checkpoints"}  # fmt: skip
    summary = json.loads((finished / "summary.json").read_text())
    test = summary["test"]
    assert set(test) == {"untouched", "best", "last"} and test["last"]["round"] == 3
    tasks = {"edit", "sum", "mood", "choice", "macro"}
    assert set(test["untouched"]["loss"]) == tasks
    assert set(test["best"]["score"]) == tasks
    assert {"sparse", "soft"} <= set(test["best"]["loss"]) or summary["experts"] == 1
    for row in test["best"]["routing"].values():
        assert sum(row) == pytest.approx(1.0, abs=1e-4) and len(row) == summary["experts"]
    assert test["best"]["loss"]["sparse"]["macro"] < test["untouched"]["loss"]["macro"]
    events = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [e["round"] for e in events if e["event"] == "validation"] == [0, 1, 2, 3]
    assert [e["round"] for e in events if e["event"] == "round"] == [1, 2, 3]
    manifest = json.loads((finished / "manifest.json").read_text())
    dealt = [origin for rows in manifest["clients"].values() for origin in rows]
    assert len(dealt) == len(set(dealt)) == 48 and not set(dealt) & set(manifest["test"])
    assert yaml.safe_load((finished / "config.yaml").read_text())["training"]["rounds"] == 3
    rows = [json.loads(line) for line in (finished / "predictions.jsonl").read_text().splitlines()]
    for task in tasks - {"macro"}:
        each = [row["score"] for row in rows if row["task"] == task]
        assert sum(each) / len(each) == pytest.approx(test["best"]["score"][task])
    audit = json.loads((finished / "discovery.json").read_text())["audit"]
    assert 0 < audit["global"]["purity"] <= 1


def test_the_last_round_is_tested_where_it_is_not_the_best_and_asked_for(tmp_path, small):
    """At a rate of zero all rounds are alike, and of equals the first is the best."""
    for asked in (True, False):
        folder = tmp_path / str(asked)
        still = ["training.lr=0", "router.lr=0", f"evaluation.last={asked}".lower()]
        assert main(["run", "quickstart", *small, *still, f"output={folder}", "--quiet"]) == 0
        test = json.loads((folder / "summary.json").read_text())["test"]
        assert test["best"]["round"] < 3 and ("last" in test) == asked
        assert main(["report", str(folder)]) == 0


def test_generate_and_evaluate_use_the_finished_model(finished, tmp_path, capsys):
    assert main(["generate", str(finished), "How many?", "Fix the grammar: Ada go.", "--max-new-tokens", "3"]) == 0
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) >= 2 and "expert" in shown.err
    assert main(["evaluate", str(finished), "--quiet"]) == 0
    summary = json.loads((finished / "summary.json").read_text())
    assert f"{summary['test']['best']['loss']['sparse']['macro']:.3f}" in capsys.readouterr().out
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"prompt": "How many?", "response": "Two"}\n')
    assert main(["evaluate", str(finished), "--data", str(mine), "evaluation.routing=soft", "--quiet"]) == 0
    assert "score soft" in capsys.readouterr().out


def test_a_model_answers_without_the_runs_data_and_reading_changes_nothing(finished):
    before = {p: p.read_bytes() for p in finished.rglob("*") if p.is_file() and p.name != "manifest.json"}
    (finished / "manifest.json").unlink()
    model = fedweave.load(finished)
    answer = model.generate(["How many?"], routing="soft", max_new_tokens=3)[0]
    assert sum(answer.weights) == pytest.approx(1.0, abs=1e-4)
    assert {p: p.read_bytes() for p in finished.rglob("*") if p.is_file()} == before


def test_own_data_runs_from_a_folder_of_clients(tmp_path, small):
    folder = tmp_path / "data"
    folder.mkdir()
    rows = [{"prompt": f"Add {i} and {i}", "response": str(2 * i)} for i in range(20)]
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"Name letter {i}"},
                {"role": "assistant", "content": "abc"[i % 3]},
            ]
        }
        for i in range(20)
    ]
    (folder / "north.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows + chats))
    (folder / "south.jsonl").write_text("".join(json.dumps(r) + "\n" for r in chats[:12]))
    (folder / "lonely.jsonl").write_text(json.dumps(rows[0]) + "\n")
    output = tmp_path / "run"
    own = [o for o in small if not o.startswith("data.")]
    assert main(["run", "quickstart", *own, "data.source=jsonl", f"data.path={folder}", f"output={output}"]) == 0
    discovery = json.loads((output / "discovery.json").read_text())
    assert discovery["clients"]["lonely"]["buckets"] == [1] and "audit" not in discovery
    summary = json.loads((output / "summary.json").read_text())
    assert set(summary["test"]["best"]["score"]) == {"all", "macro"}


@pytest.mark.parametrize(
    "change",
    ["discovery.clusterer=agglomerative", "discovery.clusterer=spectral", "training.participation=0.5",
     "training.participation=2", "router.features=unit", "router.warm_start.enabled=false",
     "alignment.max_experts=1", "evaluation.routing=top2"],
)  # fmt: skip
def test_every_switch_finishes(tmp_path, small, change):
    short = [*small, "training.rounds=1", change, f"output={tmp_path / 'r'}"]
    assert main(["run", "quickstart", *short, "--quiet"]) == 0
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert summary["rounds"] == 1
    if "participation" in change:
        event = json.loads((tmp_path / "r" / "metrics.jsonl").read_text().splitlines()[1])
        assert len(event["participants"]) == 2


def test_resume_of_a_finished_run_changes_nothing_and_more_rounds_go_on(finished, tmp_path, small):
    before = (finished / "summary.json").read_text()
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    assert main(["resume", str(finished), "--quiet"]) == 0
    assert _results(json.loads(before)) == _results(json.loads((finished / "summary.json").read_text()))
    assert main(["resume", str(copy), "training.rounds=5", "--quiet"]) == 0
    longer = json.loads((copy / "summary.json").read_text())
    assert longer["rounds"] == 5
    assert yaml.safe_load((copy / "config.yaml").read_text())["training"]["rounds"] == 5
    straight = tmp_path / "straight"
    assert main(["run", "quickstart", *small, "training.rounds=5", f"output={straight}", "--quiet"]) == 0
    assert _results(longer) == _results(json.loads((straight / "summary.json").read_text()))


def _results(summary: dict) -> dict:
    """All but what a clock or a folder name decides."""
    config = {k: v for k, v in summary["config"].items() if k != "output"}
    return {**{k: v for k, v in summary.items() if k != "timing"}, "config": config}
