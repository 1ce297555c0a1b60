"""A benchmark of one's own: tasks, categories, unseen tasks, wordings, and who gets what."""

import gzip
import json
from collections import Counter

import pytest

from fedweave.config import from_tree
from fedweave.data import load_data
from fedweave.data.examples import Example
from fedweave.data.partition import pure_partition
from fedweave.data.tasks import SOURCES, WORDINGS, Request, choose, render
from fedweave.errors import UserError

TASKS = [
    {"task": "count", "category": "sums", "definition": "Count the words. Reply with a number.", "title": "Count"},
    {"task": "add", "category": "sums", "definition": "Add the numbers.", "metric": "number", "max_new_tokens": 5},
    {"task": "echo", "category": "copies", "definition": "Say it again.", "wordings": ["Again: {text}", "{text}!"]},
    {"task": "shout", "category": "copies", "definition": "Say it aloud.", "role": "unseen"},
]


@pytest.fixture
def folder(tmp_path):
    rows = [
        {"task": task["task"], "input": f"{{{task['task']}}} {n}", "output": "even" if n % 2 else "odd"}
        for task in TASKS
        for n in range(30)
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(t) + "\n" for t in TASKS))
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)
    return tmp_path


def loaded(path, seed=1, **settings):
    tree = {"source": "tasks", "path": str(path), "clients": 4, "train": 20, "validation": 4, "test": 5}
    return load_data(from_tree({"seed": seed, "data": tree | settings}))


def change(folder, index, **changes):
    tasks = [task | (changes if i == index else {}) for i, task in enumerate(TASKS)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))


def test_tasks_rows_and_metrics(folder):
    data = loaded(folder)
    assert {
        name: (t.title, t.metric, t.max_new_tokens) for name, t in (data.tasks | data.unseen_tasks).items()
    } == {
        "count": ("Count", "exact", 64),  # two different answers
        "add": ("add", "number", 5),
        "echo": ("echo", "exact", 64),
        "shout": ("shout", "exact", 64),
    }
    everything = [e for rows in data.clients.values() for e in rows]
    assert Counter(e.task for e in everything) == {"count": 20, "add": 20, "echo": 20}
    assert {(e.task, e.kind) for e in everything} == {("count", "sums"), ("add", "sums"), ("echo", "copies")}
    first = next(e for e in everything if e.task == "count")
    assert first.prompt == f"Count the words. Reply with a number.\n\n{first.content}"
    assert first.content.startswith("{count} ")  # braces of a row stay
    assert {e.prompt for e in everything if e.task == "echo"} <= {f"Again: {{echo}} {n}" for n in range(30)}


def test_long_answers_of_many_kinds_are_compared_by_words(folder):
    with open(folder / "more.jsonl", "w") as out:
        out.writelines(
            json.dumps({"task": "count", "input": f"x {n}", "output": f"word {n}"}) + "\n" for n in range(30)
        )
    assert loaded(folder).tasks["count"].metric == "rouge"


def test_unseen_tasks_are_a_second_test_set_and_nothing_else(folder):
    data = loaded(folder)
    rest = [*data.validation, *data.test, *(e for rows in data.clients.values() for e in rows)]
    assert [e.task for e in data.unseen] == ["shout"] * 5
    assert "shout" not in {e.task for e in rest} | set(data.tasks) and list(data.unseen_tasks) == ["shout"]
    assert data.manifest["unseen"] == [e.origin for e in data.unseen]


def test_kinds_are_what_clients_differ_in(folder):
    one = loaded(folder, clients=2, alpha=1e-3, seed=3)
    mixed = [Counter(e.kind for e in rows) for rows in one.clients.values()]
    assert sorted(max(kinds.values()) for kinds in mixed) == [20, 40]  # a category stays together
    pure = loaded(folder, clients=4, partition="pure")
    assert [Counter(e.kind for e in rows) for rows in pure.clients.values()] == [
        {"sums": 20}, {"copies": 10}, {"sums": 20}, {"copies": 10}
    ]  # fmt: skip


def test_pure_clients_need_as_many_clients_as_kinds(folder):
    with pytest.raises(UserError, match=r"data\.clients=1 are too few for 2"):
        loaded(folder, clients=1, partition="pure")


def test_pure_clients_share_a_kind_evenly_and_by_seed():
    train = {k: [Example(f"{k}{n}", "r", k, f"{k}:{n}") for n in range(7)] for k in "ab"}
    shares = pure_partition(train, 5, seed=1)
    assert [len(s) for s in shares] == [3, 4, 2, 3, 2]
    assert sorted(e.origin for s in shares for e in s) == sorted(e.origin for rows in train.values() for e in rows)
    assert shares == pure_partition(train, 5, seed=1) != pure_partition(train, 5, seed=2)


def test_only_some_tasks(folder):
    data = loaded(folder, tasks=["add"])
    assert list(data.tasks) == ["add"] and {e.task for e in data.test} == {"add"} and data.unseen == []
    with pytest.raises(UserError, match="there is no task 'ad': did you mean 'add'"):
        loaded(folder, tasks=["ad"])


def test_varied_wordings_follow_row_and_seed_and_change_nothing_else(folder):
    usual, varied, again, other = (
        loaded(folder, **s) for s in ({}, *[{"wording": "varied"}] * 2, {"wording": "varied", "seed": 2})
    )
    pick = lambda data: {e.origin: e.prompt for rows in data.clients.values() for e in rows}  # noqa: E731
    assert list(pick(usual)) == list(pick(varied)) and pick(varied) == pick(again)
    both = pick(varied).keys() & pick(other).keys()
    assert any(pick(varied)[o] != pick(other)[o] for o in both)
    echoes = {e.prompt[-1] == "!" for rows in varied.clients.values() for e in rows if e.task == "echo"}
    assert echoes == {True, False}


def test_a_row_that_repeats_another_is_left_out(folder):
    with open(folder / "more.jsonl", "w") as out:
        out.writelines(json.dumps({"task": "add", "input": "  {ADD}   3 ", "output": "x"}) + "\n" for _ in range(9))
    settings = {"train": 20, "validation": 5, "test": 5}
    texts = [e.sameness for rows in loaded(folder, **settings).clients.values() for e in rows if e.task == "add"]
    assert len(set(texts)) == 20
    with pytest.raises(UserError, match=r"'add' has 30 different rows but .* asks for 31"):
        loaded(folder, **settings | {"test": 6, "tasks": ["add"]})
    loaded(folder, **settings | {"test": 6, "distinct": False, "tasks": ["add"]})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"definition": " "}, r"tasks\.jsonl:2: 'definition' must be a non-empty text"),
        ({"role": "hidden"}, r"tasks\.jsonl:2: 'role' must be seen or unseen, not 'hidden'"),
        ({"metric": "numbr"}, r"tasks\.jsonl:2: 'metric' 'numbr' is unknown: did you mean 'number'"),
        ({"wordings": ["Go on."]}, r"tasks\.jsonl:2: a wording must be a text with \{text\}"),
        ({"wordings": []}, r"tasks\.jsonl:2: 'wordings' must be a list"),
        ({"max_new_tokens": 0}, r"tasks\.jsonl:2: 'max_new_tokens' must be a whole number"),
        ({"task": "count"}, r"tasks\.jsonl:2: task 'count' is listed twice"),
        ({"task": "macro"}, r"tasks\.jsonl:2: no task can be called 'macro'"),
        ({"task": "ad"}, r"task 'add' is not in tasks\.jsonl: did you mean 'ad'"),
        ({"title": 3}, r"tasks\.jsonl:2: 'title' must be a text"),
    ],
)
def test_a_wrong_task_is_one_sentence(folder, changes, said):
    change(folder, 1, **changes)
    with pytest.raises(UserError, match=said):
        loaded(folder)


def test_a_wrong_row_or_folder_is_one_sentence(folder, tmp_path_factory):
    (folder / "more.jsonl").write_text('{"task": "add", "input": "x"}\n')
    with pytest.raises(UserError, match=r"more\.jsonl:1: 'output' must be a non-empty text"):
        loaded(folder)
    with pytest.raises(UserError, match=r"needs one tasks\.jsonl"):
        loaded(tmp_path_factory.mktemp("empty"))
    with pytest.raises(UserError, match="there is no such file or folder"):
        loaded(folder, folder="nowhere")
    with pytest.raises(UserError, match=r"data\.source=tasks needs data\.path"):
        from_tree({"data": {"source": "tasks"}})


# -------------------------------------------------------------------------------------- wordings


@pytest.mark.parametrize("wordings", [WORDINGS, *(source.wordings for source in SOURCES)])
def test_every_task_has_at_least_eight_wordings_and_the_row_is_in_each(wordings):
    made = {render(w, Request("Do this. Then that.", "{text} {short}", "Do")) for w in wordings}
    assert len(made) == len(wordings) >= 8
    assert all("{text} {short}" in prompt for prompt in made)
    assert "{text} {short}" in made  # the instruction is missing


def test_wordings_are_drawn_evenly_and_usual_is_the_first():
    drawn = Counter(choose(WORDINGS, True, 42, f"rows:{n}") for n in range(4000))
    assert len(drawn) == len(WORDINGS) and max(drawn.values()) < 1.2 * min(drawn.values())
    assert {choose(WORDINGS, False, 42, f"rows:{n}") for n in range(9)} == {WORDINGS[0]}


def test_short_is_the_first_sentence_unless_given():
    assert render("{short}|{text}", Request("Do this. Then that.", "x")) == "Do this.|x"
    assert render("{short}|{text}", Request("Do this. Then that.", "x", "Do")) == "Do|x"
