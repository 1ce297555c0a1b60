"""Tasks that nobody trains on, and kinds of several tasks: what a run measures of them, and what it says."""

import json
import shutil

import pytest

from fedweave.cli import main
from tests.helpers import events, read_json, read_jsonl, write_jsonl

TASKS = [
    {"task": "count", "category": "sums", "definition": "How many words?", "title": "Count"},
    {"task": "add", "category": "sums", "definition": "Add the numbers."},
    {"task": "echo", "category": "copies", "definition": "Say it again."},
    {"task": "spell", "category": "copies", "definition": "Spell it out."},
    {"task": "shout", "category": "copies", "definition": "Say it aloud.", "role": "unseen", "title": "Shout"},
    {"task": "judge", "category": "opinions", "definition": "Is it good?", "role": "unseen", "title": "Judge"},
]


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmark")
    write_jsonl(folder / "tasks.jsonl", TASKS)
    names = [task["task"] for task in TASKS]
    rows = ({"task": name, "input": f"{name} {n}", "output": "ab"[n % 2]} for name in names for n in range(20))
    write_jsonl(folder / "rows.jsonl", rows)
    return ["data.source=tasks", f"data.path={folder}", "data.train=12", "training.rounds=2"]


@pytest.fixture(scope="module")
def finished(tiny_run, benchmark):
    return tiny_run(*benchmark)


def test_the_best_round_is_measured_on_unseen_tasks(finished):
    summary = read_json(finished / "summary.json")
    tested, unseen = summary["test"]["best"], summary["test"]["unseen"]
    assert set(unseen["loss"]["sparse"]) == set(unseen["score"]) == {"shout", "judge", "macro"}
    assert unseen["loss"].keys() == tested["loss"].keys() and unseen["round"] == tested["round"]
    assert set(unseen["routing"]) == {"shout", "judge"}
    assert set(tested["score"]) == {"count", "add", "echo", "spell", "macro"}
    assert set(summary["test"]["untouched"]["unseen"]) == {"shout", "judge", "macro"}
    assert list(summary["tasks"]) == ["count", "add", "echo", "spell"]
    assert summary["unseen_tasks"] == {"shout": "Shout", "judge": "Judge"}
    answered = [row["task"] for row in read_jsonl(finished / "predictions.jsonl")]
    assert answered.count("shout") == answered.count("echo") == 2
    assert all("shout" not in event["tasks"] for event in events(finished, "validation"))


def test_buckets_experts_and_routing_are_audited_by_kind_too(finished):
    summary, discovery = read_json(finished / "summary.json"), read_json(finished / "discovery.json")
    by_task, by_kind = summary["audit"], summary["kind_audit"]
    assert discovery["kind_audit"] == by_kind and by_kind["global"]["purity"] >= by_task["global"]["purity"]
    assert by_kind != by_task
    assert summary["experts"] > 1 and set(summary["test"]["best"]["decided"]) == {"sums", "copies"}
    top1 = summary["test"]["best"]["top1"]
    both = [(a + b) / 2 for a, b in zip(top1["count"], top1["add"], strict=True)]
    assert summary["test"]["best"]["decided"]["sums"] == pytest.approx(max(both))
    assert set(summary["test"]["unseen"]["decided"]) == {"copies", "opinions"}


def test_kinds_are_audited_of_those_who_take_part(tiny_run, benchmark):
    absent = tiny_run(*benchmark, "attack.kind=absent", "attack.clients=0.4")
    discovery = read_json(absent / "discovery.json")
    assert len(discovery["clients"]) == 2 and 0 < discovery["kind_audit"]["global"]["purity"] <= 1


def test_the_run_and_its_report_say_it(finished, tmp_path, small, benchmark, capsys):
    assert main(["run", "quickstart", *small, *benchmark, f"output={tmp_path / 'again'}"]) == 0
    said = capsys.readouterr().err
    assert (
        "unseen tasks" in said and "Judge" in said and "global, by kind" in said and "of 2 kinds have 95%" in said
    )
    copy = shutil.copytree(finished, tmp_path / "copy")
    assert main(["report", str(copy)]) == 0
    page = (copy / "report.html").read_text()
    assert "unseen tasks" in page and "Judge" in page and "global, by kind" in page
    assert "of its prompts to its most frequent expert" in page


def test_the_oracle_is_told_kinds_and_cannot_be_asked_about_unseen_tasks(tiny_run, benchmark):
    summary = read_json(tiny_run(*benchmark, "method=oracle") / "summary.json")
    assert summary["experts"] == 2 and summary["kind_audit"]["global"]["purity"] == 1.0
    assert summary["audit"]["global"]["purity"] == pytest.approx(0.5)
    assert "unseen" not in summary["test"] and "unseen_tasks" not in summary
    assert set(summary["test"]["best"]["decided"].values()) == {1.0}


def test_a_run_without_unseen_tasks_and_categories_has_nothing_of_it(tiny_run):
    summary = read_json(tiny_run() / "summary.json")
    assert not {"unseen_tasks", "kind_audit"} & set(summary) and "unseen" not in summary["test"]
    assert "unseen" not in summary["test"]["untouched"]


def test_tables_of_a_comparison_have_unseen_tasks(tmp_path, small, benchmark):
    output = tmp_path / "grid"
    grid = ["compare", "quickstart", "method=fedit,fedweave,oracle", *small, *benchmark, "experts.single_rank=8"]
    assert main([*grid, "--output", str(output), "--quiet"]) == 0
    table = (output / "table.md").read_text()
    for column in ("unseen-score macro", "unseen-loss macro", "kind-purity global", "decided least"):
        assert f"| {column} |" in table or f"| {column}" in table, column
    results = {
        cell["values"]["method"]: cell["summary"] for cell in json.loads((output / "results.json").read_text())
    }
    fedit = results["fedit"]["test"]["unseen"]["loss"]["sparse"]["macro"]
    assert f"{fedit:.4f}" in table and "decided" not in results["fedit"]["test"]["best"]
    assert main(["report", str(output)]) == 0
    assert "unseen tasks, loss" in (output / "report.html").read_text()
