"""Tasks of own data: which metric a user gets, how another is chosen, and what the output says about it."""

import json

import pytest

from fedweave.config import from_tree
from fedweave.data import load_data
from fedweave.data.examples import Example
from fedweave.data.own_tasks import choose_metric, own_tasks
from fedweave.errors import UserError


def rows(task: str, *answers: str) -> list[Example]:
    return [Example("q", answer, task, f"{task}.jsonl:{n}") for n, answer in enumerate(answers, start=1)]


def config(path=None, metrics=()):
    data = {"source": "jsonl", "path": str(path)} if path else {}
    return from_tree({"data": data, "evaluation": {"metrics": metrics}})


LONG = "The patient was sent home after two days without any fever."


@pytest.mark.parametrize(
    ("answers", "metric"),
    [
        (["yes", "no"], "exact"),
        (["neither of the two options"], "exact"),
        ([LONG], "rouge"),
        (["yes"] * 18 + [LONG] * 2, "exact"),  # a few long ones
        (["yes"] * 17 + [LONG] * 3, "rouge"),
        (["1 + 1 = 2\n#### 2", "#### 3"], "number"),
        (["#### 3", "three"], "exact"),
        (["北京", "上海市浦东新区"], "exact"),
        (["患者在两天后出院，没有发烧，也没有其他症状。"], "rouge"),
        (["👍"], "exact"),
    ],
)
def test_the_answers_decide_where_the_user_does_not(answers, metric):
    assert choose_metric(answers)[0] == metric


def test_the_output_says_which_metric_and_why():
    tasks, notes = own_tasks(config(), [*rows("mood", "good"), *rows("note", LONG)])
    assert {name: task.metric for name, task in tasks.items()} == {"note": "rouge-unicode", "mood": "exact"}
    assert notes == [
        "scores: mood by exact (short answers); note by rouge (longer answers); evaluation.metrics chooses others."
    ]


@pytest.mark.parametrize("written", ["f1", ["f1"], "a=f1,b=f1", {"a": "f1", "b": "f1"}, "auto,a=f1,b=f1"])
def test_one_metric_for_all_or_one_for_each(written):
    tasks, _ = own_tasks(config(metrics=written), [*rows("a", "x"), *rows("b", "y")])
    assert [task.metric for task in tasks.values()] == ["f1", "f1"]


def test_a_dotted_override_chooses_for_one_task():
    from fedweave.config import load_config

    chosen = load_config("quickstart", ["evaluation.metrics.a=f1", "evaluation.metrics.b=exact"])
    assert chosen.evaluation.metrics == ("a=f1", "b=exact")


def test_the_data_folder_chooses_and_the_config_overrules(tmp_path):
    (tmp_path / "tasks.yaml").write_text(
        "sum: number\nmood: {metric: label, title: Mood of it, max_new_tokens: 3}\nletter: f1\n"
    )
    examples = [*rows("sum", "2"), *rows("mood", "bad", "good", "bad"), *rows("letter", LONG)]
    tasks, notes = own_tasks(config(tmp_path, "letter=exact"), examples)
    assert {name: task.metric for name, task in tasks.items()} == {
        "letter": "exact", "mood": "labels", "sum": "number",
    }  # fmt: skip
    assert (tasks["mood"].title, tasks["mood"].max_new_tokens) == ("Mood of it", 3)
    assert tasks["mood"].labels == ("bad", "good")
    assert notes[0].startswith("scores: letter by exact; Mood of it by label; sum by number;")


def test_data_does_not_run_code(tmp_path):
    (tmp_path / "spy.py").write_text("raise SystemExit('executed')")
    (tmp_path / "tasks.yaml").write_text("all: spy:score\n")
    with pytest.raises(UserError, match=r"tasks\.yaml: all: spy:score is a Python function, and data does not run"):
        own_tasks(config(tmp_path), rows("all", "x"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("all: bleu", "there is no metric 'bleu'; there are auto, exact"),
        ("all: 3", "metric must be text"),
        ("all: [exact]", "metric must be text"),
        ("all: {metrics: exact}", "did you mean"),
        ("all: {max_new_tokens: 0}", "at least 1"),
        ("- exact", "must hold keys and values"),
        ("all: {", "not valid YAML"),
        ("[" * 3000, "not valid YAML"),
    ],
)
def test_a_wrong_tasks_file_is_one_sentence(tmp_path, text, complaint):
    (tmp_path / "tasks.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        own_tasks(config(tmp_path), rows("all", "x"))
    assert complaint in str(caught.value) and "tasks.yaml" in str(caught.value) and "\n" not in str(caught.value)


def test_a_tasks_file_that_is_no_text_is_one_sentence(tmp_path):
    (tmp_path / "tasks.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"tasks\.yaml cannot be read as UTF-8"):
        own_tasks(config(tmp_path), rows("all", "x"))


def test_unknown_metric_of_the_config_is_named():
    with pytest.raises(UserError, match=r"evaluation\.metrics=a=bleu: there is no metric 'bleu'.*module:function"):
        own_tasks(config(metrics="a=bleu"), rows("a", "x"))


def test_a_metric_for_a_task_that_no_row_has_is_remarked():
    _, notes = own_tasks(config(metrics="sums=number"), rows("sum", "2"))
    assert notes[1] == "a metric is named for 'sums', but no row has that task: did you mean 'sum'?"


def test_answers_that_a_metric_cannot_read_are_counted():
    _, notes = own_tasks(config(metrics="number"), rows("sum", "2", "three", "#### 4", "none"))
    assert "2 of 4 answers score below 1 even when they are perfect by the metric number" in notes[1]
    assert "sum.jsonl:2" in notes[1]


def test_too_many_answers_are_no_labels():
    with pytest.raises(UserError, match="101 different answers, too many for the metric label; use exact"):
        own_tasks(config(metrics="label"), rows("a", *map(str, range(101))))


def test_a_run_of_own_data_says_its_metrics_and_its_manifest_does_not_hold_them(tmp_path):
    text = "".join(json.dumps({"prompt": f"q {n}", "response": "yes"}) + "\n" for n in range(20))
    (tmp_path / "a.jsonl").write_text(text)
    data = load_data(config(tmp_path))
    assert data.tasks["all"].metric == "exact"
    assert data.notes[0] == "scores: all by exact (short answers); evaluation.metrics chooses others."
    assert data.manifest == load_data(config(tmp_path, "f1")).manifest  # a resumed run may be scored otherwise
