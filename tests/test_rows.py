"""Rows in and out of the verbs that use a model: `evaluate --output`, `generate --data … --output`."""

import json

import pytest

from fedweave.config import from_tree
from fedweave.data.own import read_prompts, read_test
from tests.helpers import read_json, read_jsonl, write_jsonl


def test_evaluate_writes_every_row(trained, tmp_path, says):
    target = tmp_path / "rows.jsonl"
    table = says("evaluate", trained, "--output", target, "--quiet")
    rows, manifest = read_jsonl(target), read_json(trained / "manifest.json")
    assert [row["origin"] for row in rows] == manifest["test"], "in the order of the test set"
    for row in rows:
        assert isinstance(row["prompt"], str) and row["reference"] and isinstance(row["prediction"], str)
        assert row["expert"] == max(range(len(row["weights"])), key=row["weights"].__getitem__)
    for task in {row["task"] for row in rows}:
        own = [row for row in rows if row["task"] == task]
        title = manifest["tasks"][task]
        line = next(line for line in table.splitlines() if line.split()[:1] == [title])
        assert f"{sum(row['score'] for row in own) / len(own):.3f}" in line
        assert f"{sum(row['loss'] for row in own) / len(own):.3f}" in line


def test_a_test_on_a_file_without_scores_still_has_rows(trained, tmp_path, says):
    chat = [{"role": "user", "content": "Wie geht es?"}, {"role": "assistant", "content": "Gut."}]
    data = write_jsonl(tmp_path / "mine.jsonl", [{"prompt": "How many?", "response": "7"}, {"messages": chat}])
    target = tmp_path / "rows.json"
    says("evaluate", trained, "--data", data, "--output", target, "evaluation.scores=false", "--quiet")
    first, second = json.loads(target.read_text())
    assert first["prompt"] == "How many?" and second["prompt"] == chat[:1] and second["reference"] == "Gut."
    assert "prediction" not in first and first["loss"] > 0


def test_generate_answers_a_file_and_keeps_its_columns(trained, tmp_path, says):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "你好吗？"}]
    asked = [
        {"id": 7, "prompt": "How many?"},
        {"id": 8, "messages": chat},
        {"id": 9, "prompt": "And", "system": "X"},
    ]
    data, target = write_jsonl(tmp_path / "asked.jsonl", asked), tmp_path / "answers.jsonl"
    assert says("generate", trained, "--data", data, "--output", target, "--max-new-tokens", 4) == ""
    rows = read_jsonl(target)
    assert [{k: row[k] for k in before} for row, before in zip(rows, asked, strict=True)] == asked
    assert all({"answer", "expert", "weights", "ended"} <= row.keys() for row in rows)
    assert says("generate", trained, "How many?", "--max-new-tokens", 4) == rows[0]["answer"] + "\n"


def test_a_system_prompt_changes_what_is_read(trained, tmp_path, says):
    plain = says("generate", trained, "How many?", "--max-new-tokens", 8)
    led = says("generate", trained, "How many?", "--max-new-tokens", 8, "--system", "Fix the grammar of all.")
    row = write_jsonl(tmp_path / "row.jsonl", [{"prompt": "How many?", "system": "Fix the grammar of all."}])
    assert led == says("generate", trained, "--data", row, "--max-new-tokens", 8) != plain


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ({"question": "x"}, "'prompt' or 'messages'"),
        ({"prompt": " "}, "non-empty"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "no user message"),
    ],
)
def test_a_row_without_a_question_is_named(trained, tmp_path, complains, row, word):
    data = write_jsonl(tmp_path / "asked.jsonl", [{"prompt": "How many?"}, row])
    said = complains("generate", trained, "--data", data)
    assert word in said and "asked.jsonl:2" in said


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--output", "rows.csv"], "must end in .jsonl"),
        (["--output", "taken.json"], "exists"),
        (["--output", "nowhere/rows.json"], "no folder"),
        (["--top-p", "0.9"], "add --temperature"),
        (["--system", " "], "--system is empty"),
        (["--data", "taken.json"], "not in both"),
    ],
)
def test_mistakes_show_before_the_model_loads(trained, tmp_path, monkeypatch, complains, arguments, word):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.json").write_text("[]")
    assert word in complains("generate", trained, "How many?", *arguments)


def test_rows_to_ask_may_have_the_columns_of_the_training_data_or_the_usual_ones(tmp_path):
    fields = {"prompt": "question", "response": "answer", "client": "site"}
    own = write_jsonl(tmp_path / "own.jsonl", [{"question": "How many?", "answer": "2"}])
    usual = write_jsonl(tmp_path / "usual.jsonl", [{"prompt": "How many?", "response": "2"}])
    for file in (own, usual):
        assert [prompt for _, prompt in read_prompts(file, fields)] == ["How many?"]
        config = from_tree({"data": {"fields": [f"{what}={column}" for what, column in fields.items()]}})
        assert [row.response for row in read_test(config, str(file), "")[0]] == ["2"]
