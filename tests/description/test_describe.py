"""`fedweave describe`: what a run wrote of its experts, what rows show of them, what may be told to others."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedweave.description.describe import Asked, describe, text_of, typical
from fedweave.description.record import limited, read_experts
from fedweave.description.text import shares, short, words_of
from fedweave.runs.text import summary_text
from tests.helpers import read_json, read_jsonl, write_jsonl


def test_a_run_says_what_its_experts_are(trained):
    found, discovery = read_experts(trained), read_json(trained / "discovery.json")
    experts = found["experts"]
    assert len(experts) == discovery["experts"] and found["round"] == read_json(trained / "summary.json")[
        "validation"]["best_round"]  # fmt: skip
    manifest = read_json(trained / "manifest.json")
    counted = {name: sum(e["clients"].get(name, 0) for e in experts) for name in manifest["clients"]}
    assert counted == {name: len(rows) for name, rows in manifest["clients"].items()}
    assert sum(e["share"] for e in experts) == pytest.approx(1)
    predictions = {row["prompt"]: row for row in read_jsonl(trained / "predictions.jsonl")}
    for m, expert in enumerate(experts):
        assert len(set(expert["typical"])) == len(expert["typical"]) <= 3
        for example in expert["examples"]:
            row = predictions[example["prompt"]]
            assert row["expert"] == m and row["prediction"] == example["answer"], "the test's own answer"
            assert example["reference"] == row["reference"] and isinstance(example["bare"], str)


def test_strange_prompts_are_no_experts():
    """The router gives them to nobody, not to the first one."""
    weights = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.2, 0.8]])
    model = SimpleNamespace(weights=lambda _: weights, mixture=SimpleNamespace(layout=SimpleNamespace(experts=2)))
    asked = Asked(["How far is it?", "Fix this!", "Pick one."], torch.eye(3))
    found = describe(model, asked, Asked([], torch.empty(0, 3)), "three prompts", 1)
    assert [expert["typical"] for expert in found["experts"]] == [["Fix this!"], ["Pick one."]]


def test_the_text_names_words_clients_and_answers(tiny_copy, says):
    run = tiny_copy("training.lr=1e-2", "backbone.end_of_answer=false")
    before = (run / "experts.json").read_bytes()
    text = says("describe", run, "--quiet")
    assert (run / "experts.json").read_bytes() == before, "looking changes nothing"
    for expert in read_experts(run)["experts"]:
        assert ", ".join(expert["words"]) in text and all(short(p) in text for p in expert["typical"])
    assert "    bare     " in text and "client_0" in text


def test_names_are_given_once_and_stay(tiny_copy, says, complains):
    run = tiny_copy("training.lr=1e-2", "backbone.end_of_answer=false")
    assert "expert 1, Sums:" in says("describe", run, "--name", "1=Sums", "--quiet")
    assert read_experts(run)["experts"][1]["name"] == "Sums"
    (run / "mine.jsonl").write_text(
        '{"prompt": "How many?", "response": "7", "task": "count", "client": "north"}\n'
    )
    made = json.loads(says("describe", run, "--data", run / "mine.jsonl", "--json", "--quiet"))
    assert made["experts"][1]["name"] == "Sums" and made["source"] == "1 prompts of 1 client in mine.jsonl"
    assert "no expert 99" in complains("describe", run, "--name", "99=Far")
    assert "write --name 0=Grammar" in complains("describe", run, "--name", "Sums")


def test_without_labels_and_without_a_record_it_is_made_of_the_data(tiny_run, model_folder, tmp_path, says):
    """Rows without labels; and the record, if it is lost, comes back the same."""
    folder = tmp_path / "data"
    folder.mkdir()
    kinds = ["Fix the grammar: she go to {} now.", "Mia has {} hats. How many?", "请问今天天气怎么样{}？"]
    for k, name in enumerate(("north", "south")):
        write_jsonl(
            folder / f"{name}.jsonl",
            ({"prompt": kinds[i % 3].format(i + k), "response": f"answer {i}"} for i in range(30)),
        )
    from tests.helpers import SMALL

    small = [x for x in SMALL if not x.startswith(("data.", "evaluation.max"))]
    model = f"backbone.model={model_folder('llama')}"
    run = tmp_path / "run"
    says("run", "own", f"data.path={folder}", model, "backbone.prompt=plain", *small, f"output={run}", "--quiet")
    found = read_experts(run)
    assert all("tasks" not in e for e in found["experts"]) and set(found["experts"][0]["clients"]) <= {
        "north",
        "south",
    }
    (run / "experts.json").unlink()
    again = json.loads(says("describe", run, "--json", "--quiet"))
    assert [e["words"] for e in again["experts"]] == [e["words"] for e in found["experts"]]
    assert [e["clients"] for e in again["experts"]] == [e["clients"] for e in found["experts"]]


def test_a_bundle_is_described_by_rows_of_yours(exported, tmp_path, says, complains):
    assert "--data FILE" in complains("describe", exported)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Fix it"}]
    rows = [{"messages": [*chat, {"role": "assistant", "content": "Fixed."}], "task": "edit"}] * 3
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    found = json.loads(says("describe", exported, "--data", data, "--json", "--quiet"))
    owner = next(e for e in found["experts"] if e["share"] == 1.0)
    assert owner["tasks"] == {"edit": 3} and owner["typical"] == ["Fix it"] and "clients" not in owner
    assert not (exported / "experts.json").exists()
    assert "stays as it was exported" in complains("describe", exported, "--data", data, "--name", "0=A")


def test_a_damaged_record_is_one_sentence(tiny_copy, complains):
    run = tiny_copy("training.lr=1e-2", "backbone.end_of_answer=false")
    for text in ("", "[]", "{}", '{"schema": 2}', '{"schema": 1, "experts": [{}]}', '{"schema": 1, "experts": 3}'):
        (run / "experts.json").write_text(text)
        assert "experts.json is damaged" in complains("describe", run)


def test_words_alone_tell_no_prompt_and_no_client(trained):
    found = read_experts(trained)
    told = limited(found, "words")
    assert all(set(e) == {"name", "share", "words"} for e in told["experts"])
    assert limited(found, "examples") == found


def test_typical_rows_are_near_the_middle_and_apart():
    angles = np.array([0.0, 0.02, 0.04, 0.5, -0.5, 2.0])
    points = np.stack([np.cos(angles), np.sin(angles)], 1)
    first, *rest = typical(points, list("abcdef"), 3)
    assert first in (0, 1, 2, 3) and not set(rest) <= {0, 1, 2}
    assert typical(points[:3], ["a", "a", "b"]) in ([0, 2], [1, 2], [2, 0], [2, 1]), "no text twice"
    assert typical(points[:0], []) == []


def test_texts_are_cut_wherever_they_have_no_blanks():
    assert short("天" * 500).startswith("天" * 100) and len(short("天" * 500)) <= 160 and short(" ") == "(nothing)"
    assert text_of(({"role": "system", "content": "S"}, {"role": "user", "content": " a "})) == "a"
    idle = {"name": "", "share": 0.0, "words": []}
    said = {"schema": 1, "source": "", "round": 1, "experts": [idle, {**idle, "share": 1.0}]}
    assert [words_of(said, e)[0] for e in said["experts"]] == ["it gets none of these prompts", "none stand out"]
    assert shares({"a": 6, "b": 2, "c": 1, "d": 1}, most=2) == "a 60%, b 20%, 2 others 20%"


def test_a_run_ends_with_a_line_for_every_expert(trained):
    found, summary = read_experts(trained), read_json(trained / "summary.json")
    said = summary_text(
        summary, {**found, "experts": [{**found["experts"][0], "name": "天气"}, *found["experts"][1:]]}
    )
    assert "expert 0, 天气" in said
    for expert in found["experts"]:
        assert f"{expert['share']:4.0%}  {', '.join(words_of(found, expert))}" in said
    assert "words that set apart" not in summary_text(summary)
    assert "strange to the router" not in summary_text(summary)
    first = next(iter(summary["test"]["best"]["routing"]))
    summary["test"]["best"]["routing"][first] = [0.0] * summary["experts"]
    assert f"strange to the router and get no expert: {summary['tasks'][first]}\n" in summary_text(summary)
