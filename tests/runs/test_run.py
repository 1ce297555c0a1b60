"""The command line from a recipe to a model that answers."""

from pathlib import Path

import pytest
import yaml

import fedweave
from fedweave.cli import main
from tests.helpers import contents, events, read_json, read_jsonl, write_jsonl


def test_a_run_leaves_everything_it_promises(tiny_run):
    finished = tiny_run()
    names = {p.name for p in finished.iterdir()}
    assert names == {"config.yaml", "manifest.json", "discovery.json", "embedding.json", "metrics.jsonl",
                     "predictions.jsonl", "experts.json", "progress.json", "summary.json",
                     "checkpoints"}  # fmt: skip
    summary = read_json(finished / "summary.json")
    test = summary["test"]
    assert set(test) == {"untouched", "best", "last"} and test["last"]["round"] == 3
    tasks = {"edit", "sum", "mood", "choice", "macro"}
    assert set(test["untouched"]["loss"]) == tasks
    assert set(test["best"]["score"]) == tasks
    assert {"sparse", "soft"} <= set(test["best"]["loss"]) or summary["experts"] == 1
    for row in test["best"]["routing"].values():
        assert sum(row) == pytest.approx(1.0, abs=1e-4) and len(row) == summary["experts"]
    assert test["best"]["loss"]["sparse"]["macro"] < test["untouched"]["loss"]["macro"]
    assert [e["round"] for e in events(finished, "validation")] == [0, 1, 2, 3]
    assert [e["round"] for e in events(finished, "round")] == [1, 2, 3]
    manifest = read_json(finished / "manifest.json")
    dealt = [origin for rows in manifest["clients"].values() for origin in rows]
    assert len(dealt) == len(set(dealt)) == 48 and not set(dealt) & set(manifest["test"])
    assert yaml.safe_load((finished / "config.yaml").read_text())["training"]["rounds"] == 3
    rows = read_jsonl(finished / "predictions.jsonl")
    for task in tasks - {"macro"}:
        each = [row["score"] for row in rows if row["task"] == task]
        assert sum(each) / len(each) == pytest.approx(test["best"]["score"][task])
    audit = read_json(finished / "discovery.json")["audit"]
    assert 0 < audit["global"]["purity"] <= 1


def test_the_last_round_is_tested_where_it_is_not_the_best_and_asked_for(tmp_path, small):
    """Rounds that change nothing: on every machine the start is as good as any, and of equals the first is best."""
    still = ["training.lr=0", "router.lr=0", "discovery.warmup_lr=1e-3"]
    for asked in (True, False):
        folder = tmp_path / str(asked)
        settings = [*small, *still, f"evaluation.last={asked}".lower()]
        assert main(["run", "quickstart", *settings, f"output={folder}", "--quiet"]) == 0
        test = read_json(folder / "summary.json")["test"]
        assert test["best"]["round"] == 0 and ("last" in test) == asked
        if asked:
            assert test["last"]["round"] == 3 and test["last"]["loss"] == test["best"]["loss"]
        assert main(["report", str(folder)]) == 0


def test_generate_and_evaluate_use_the_finished_model(tiny_run, tmp_path, says, capsys):
    finished = tiny_run()
    assert main(["generate", str(finished), "How many?", "Fix the grammar: Ada go.", "--max-new-tokens", "3"]) == 0
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) >= 2 and "expert" in shown.err
    loss = read_json(finished / "summary.json")["test"]["best"]["loss"]["sparse"]["macro"]
    assert f"{loss:.3f}" in says("evaluate", finished, "--quiet")
    mine = write_jsonl(tmp_path / "mine.jsonl", [{"prompt": "How many?", "response": "Two"}])
    assert "score soft" in says("evaluate", finished, "--data", mine, "evaluation.routing=soft", "--quiet")


def test_a_model_answers_without_the_runs_data_and_reading_changes_nothing(tiny_copy):
    finished = tiny_copy()
    (finished / "manifest.json").unlink()
    before = contents(finished)
    model = fedweave.load(finished)
    answer = model.generate(["Fix the grammar: Kira go to the station."], routing="soft", max_new_tokens=3)[0]
    assert sum(answer.weights) == pytest.approx(1.0, abs=1e-4)
    assert contents(finished) == before


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
    for name, own in {"north": rows + chats, "south": chats[:12], "lonely": rows[:1]}.items():
        write_jsonl(folder / f"{name}.jsonl", own)
    output = tmp_path / "run"
    own = [o for o in small if not o.startswith("data.")]
    assert main(["run", "quickstart", *own, "data.source=jsonl", f"data.path={folder}", f"output={output}"]) == 0
    discovery = read_json(output / "discovery.json")
    assert discovery["clients"]["lonely"]["buckets"] == [1] and "audit" not in discovery
    summary = read_json(output / "summary.json")
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
    assert read_json(tmp_path / "r" / "summary.json")["rounds"] == 1
    if "participation" in change:
        assert len(events(tmp_path / "r", "round")[0]["participants"]) == 2


def test_resume_of_a_finished_run_changes_nothing_and_more_rounds_go_on(tiny_run, tiny_copy):
    finished = tiny_copy()
    assert main(["resume", str(finished), "--quiet"]) == 0
    assert _results(finished) == _results(tiny_run())
    assert main(["resume", str(finished), "training.rounds=5", "--quiet"]) == 0
    assert read_json(finished / "summary.json")["rounds"] == 5
    assert yaml.safe_load((finished / "config.yaml").read_text())["training"]["rounds"] == 5
    assert _results(finished) == _results(tiny_run("training.rounds=5"))


def _results(run: Path) -> dict:
    """All of a summary but what a clock or a folder name decides."""
    summary = read_json(run / "summary.json")
    config = {k: v for k, v in summary["config"].items() if k != "output"}
    return {**{k: v for k, v in summary.items() if k != "timing"}, "config": config}


def test_a_run_goes_on_without_a_client_that_was_refused_at_once(tmp_path, small):
    """Its rows stay out of the records, a resumed run, the report and the diagnosis."""
    folder = tmp_path / "run"
    most = ["discovery.max_buckets=1", "federation.max_samples=16", "training.rounds=1"]
    assert main(["run", "quickstart", *small, *most, f"output={folder}", "--quiet"]) == 0
    discovery = read_json(folder / "discovery.json")
    assert list(discovery["clients"]) == list(discovery["bucket_tasks"]) == ["client_1", "client_2"]
    for name, buckets in discovery["bucket_tasks"].items():
        assert sum(sum(tasks.values()) for tasks in buckets) == discovery["clients"][name]["examples"]
    assert main(["resume", str(folder), "training.rounds=2", "--quiet"]) == 0
    assert read_json(folder / "summary.json")["clients"] == 2
    assert main(["report", str(folder)]) == 0 and main(["diagnose", str(folder), "--quiet"]) == 0
