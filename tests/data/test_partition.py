"""From pools to clients: splits, the Dirichlet deal, the built-in sample and the paper's tasks in a folder."""

import gzip
import json
import re
from collections import Counter

import pytest

from fedweave.config import DataConfig, from_tree
from fedweave.data import load_data
from fedweave.data.examples import Example
from fedweave.data.partition import dirichlet_partition, split_pools
from fedweave.data.sample import make_sample
from fedweave.data.tasks import STAND_IN, load_paper_tasks
from fedweave.errors import UserError
from tests.properties import given, settings, st


def pools(tasks: int, rows: int) -> dict[str, list[Example]]:
    return {f"t{t}": [Example(f"p{n}", "r", f"t{t}", f"t{t}:{n}") for n in range(rows)] for t in range(tasks)}


def origins(examples) -> list[str]:
    return [e.origin for e in examples]


# -------------------------------------------------------------------------------------- splits


def test_splits_are_disjoint_of_the_asked_size_and_follow_the_seed():
    config = DataConfig(train=20, validation=5, test=7)
    made = split_pools(pools(2, 40), config, seed=1)
    for task, parts in made.items():
        assert {split: len(rows) for split, rows in parts.items()} == {"train": 20, "validation": 5, "test": 7}
        drawn = [o for rows in parts.values() for o in origins(rows)]
        assert len(set(drawn)) == 32
        assert all(o.startswith(f"{task}:") for o in drawn)
    assert made == split_pools(pools(2, 40), config, seed=1)
    assert made != split_pools(pools(2, 40), config, seed=2)


def test_too_few_rows_are_a_user_error_that_counts_them():
    with pytest.raises(UserError, match=r"task 't0' has 10 different rows but data\.train .* asks for 11"):
        split_pools(pools(1, 10), DataConfig(train=5, validation=3, test=3), seed=0)


# -------------------------------------------------------------------------------------- Dirichlet deal


def test_the_papers_partition_is_reproduced():
    shares = dirichlet_partition(pools(4, 2000), clients=20, alpha=0.3, seed=42)
    assert [len(s) for s in shares] == [
        334, 490, 376, 482, 390, 382, 371, 433, 348, 498, 395, 360, 420, 363, 332, 330, 390, 574, 360, 372
    ]  # fmt: skip
    counts = [[Counter(e.task for e in share)[f"t{t}"] for t in range(4)] for share in shares[:2]]
    assert counts == [[110, 149, 0, 75], [0, 27, 408, 55]]


@settings(max_examples=60)
@given(
    tasks=st.integers(1, 4),
    rows=st.integers(1, 25),
    clients=st.integers(1, 12),
    alpha=st.floats(0.2, 10.0),
    seed=st.integers(0, 10_000),
)
def test_every_example_goes_to_exactly_one_client_and_none_stays_empty(tasks, rows, clients, alpha, seed):
    train = pools(tasks, rows)
    everything = sorted(o for pool in train.values() for o in origins(pool))
    if clients > len(everything):
        with pytest.raises(UserError, match=rf"data\.clients={clients}, but .* only {len(everything)}"):
            dirichlet_partition(train, clients, alpha, seed)
        return
    shares = dirichlet_partition(train, clients, alpha, seed)
    assert len(shares) == clients and all(shares)
    assert sorted(o for share in shares for o in origins(share)) == everything
    assert shares == dirichlet_partition(train, clients, alpha, seed)


@pytest.mark.parametrize("alpha", [0.001, 0.01])
def test_a_task_that_no_client_asks_for_is_dealt_all_the_same(alpha):
    for seed in range(30):
        shares = dirichlet_partition(pools(4, 10), 2, alpha, seed)
        assert sum(map(len, shares)) == 40


def test_small_alpha_makes_one_sided_clients():
    def largest_share(alpha):
        shares = dirichlet_partition(pools(4, 200), clients=10, alpha=alpha, seed=0)
        return sum(max(Counter(e.task for e in s).values()) / len(s) for s in shares) / 10

    assert largest_share(0.1) > 0.75 > 0.4 > largest_share(100.0)


# -------------------------------------------------------------------------------------- built-in sample


def test_sample_is_a_function_of_its_seed_and_has_distinct_prompts():
    made, tasks = make_sample(200, seed=3)
    assert made == make_sample(200, seed=3)[0]
    assert made != make_sample(200, seed=4)[0]
    assert list(made) == list(tasks) == ["edit", "sum", "mood", "choice"]
    for task, pool in made.items():
        assert len({e.prompt for e in pool}) == len(pool) == 200
        assert origins(pool) == [f"sample/{task}:{n}" for n in range(200)]


def test_sample_answers_are_right():
    made, _ = make_sample(150, seed=0)
    for e in made["sum"]:
        a, b = map(int, re.findall(r"\d+", e.prompt))
        assert e.response == f"{a} + {b} = {a + b}\n#### {a + b}"
    for e in made["edit"]:
        asked, answer = e.prompt.removeprefix("Fix the grammar: ").split(), e.response.split()
        assert [i for i, (x, y) in enumerate(zip(asked, answer, strict=True)) if x != y] == [1]  # the verb alone
    kinds = {"dog": "animal", "pear": "fruit", "saw": "tool", "blue": "colour", "bus": "vehicle"}
    known = 0
    for e in made["choice"]:
        kind = re.search(r"Pick the (\w+) from", e.prompt)[1]
        assert e.response in re.findall(r"\w+", e.prompt.split(":")[1])
        known += e.response in kinds
        assert kinds.get(e.response, kind) == kind
    assert known > 10
    moods = {("wonderful" in e.prompt, e.response) for e in made["mood"] if re.search("wonderful|awful", e.prompt)}
    assert moods == {(True, "positive"), (False, "negative")}


def test_more_than_the_sample_has_is_a_user_error():
    with pytest.raises(UserError, match=r"fewer than 4705 distinct 'edit' examples; lower data\.train"):
        make_sample(4705, seed=0)


def test_manifest_lists_every_origin_of_every_part():
    config = from_tree({"data": {"train": 12, "validation": 2, "test": 3, "clients": 11, "alpha": 1.0}})
    data = load_data(config)
    assert list(data.clients) == [f"client_{i:02d}" for i in range(11)]
    assert data.manifest["clients"] == {name: origins(rows) for name, rows in data.clients.items()}
    assert data.manifest["validation"] == origins(data.validation)
    assert data.manifest["test"] == origins(data.test)
    parts = [data.manifest["validation"], data.manifest["test"], *data.manifest["clients"].values()]
    listed = [origin for part in parts for origin in part]
    assert sorted(listed) == sorted(f"sample/{t}:{n}" for t in ("edit", "sum", "mood", "choice") for n in range(17))
    assert data.manifest["tasks"] == {"edit": "Edit", "sum": "Sum", "mood": "Mood", "choice": "Choice"}
    assert load_data(config) == data


# -------------------------------------------------------------------------------------- the paper's tasks

ROWS = {
    "coedit": {"src": "Fix the grammar: He go.", "tgt": "He goes."},
    "gsm8k": {"question": "What is 1 + 2?", "answer": "1 + 2 = 3\n#### 3"},
    "tweet_eval_sentiment": {"text": "Great day", "label": 2},
    "ai2_arc_challenge": {
        "question": "Which is hot?", "choices": {"label": ["A", "B"], "text": ["ice", "fire"]}, "answerKey": "B"
    },
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """The four tasks, two training rows and a test row each, one of the files gzipped."""
    for name, row in ROWS.items():
        (tmp_path / name).mkdir()
        text = json.dumps(row) + "\n"
        (tmp_path / name / "train.jsonl").write_text(text * 2)
        (tmp_path / name / "test.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    return tmp_path


def test_rows_of_the_four_schemas_become_prompts_and_answers(folder):
    made, tasks, notes = load_paper_tasks(str(folder))
    firsts = {task: pool[0] for task, pool in made.items()}
    assert [t.title for t in tasks.values()] == ["CoEdIT", "GSM8K", "TweetEval", "ARC-C"]
    assert notes == []
    assert firsts["coedit"].prompt == "Fix the grammar: He go."
    assert firsts["gsm8k"].prompt.endswith("\n\nWhat is 1 + 2?")
    assert firsts["tweet"].prompt.endswith("\n\nTweet: Great day")
    assert firsts["arc"].prompt.endswith("\n\nWhich is hot?\n(A) ice\n(B) fire")
    assert [e.response for e in firsts.values()] == ["He goes.", "1 + 2 = 3\n#### 3", "positive", "B"]
    assert origins(made["gsm8k"]) == ["gsm8k/train:0", "gsm8k/train:1", "gsm8k/test:0"]


def test_stand_in_for_coedit_is_named_wherever_results_are(folder):
    (folder / "coedit").rename(folder / "coedit_style")
    settings = {
        "source": "paper",
        "path": str(folder),
        "train": 1,
        "validation": 1,
        "test": 1,
        "clients": 2,
        "distinct": False,
    }
    data = load_data(from_tree({"data": settings}))
    assert data.tasks["coedit_style"].title == data.manifest["tasks"]["coedit_style"] == "CoEdIT-style"
    assert "coedit" not in data.tasks and {e.task for e in data.test} == set(data.tasks)
    assert data.notes == data.manifest["notes"] == [STAND_IN]


def test_stand_in_rows_do_not_claim_to_come_from_coedit(folder):
    (folder / "coedit").rename(folder / "coedit_style")
    assert load_paper_tasks(str(folder))[0]["coedit_style"][0].origin == "coedit_style/train:0"


@pytest.mark.parametrize(
    ("task", "row"),
    [
        ("coedit", {"src": "x"}),
        ("coedit", {"src": "x", "tgt": " "}),
        ("coedit", {"src": 3, "tgt": "x"}),
        ("gsm8k", {"question": "x", "answer": None}),
        ("tweet_eval_sentiment", {"text": "x", "label": 3}),
        ("tweet_eval_sentiment", {"text": "x", "label": "positive"}),
        ("ai2_arc_challenge", ROWS["ai2_arc_challenge"] | {"choices": {"label": ["A"], "text": ["x", "y"]}}),
        ("ai2_arc_challenge", ROWS["ai2_arc_challenge"] | {"choices": ["x", "y"]}),
        ("gsm8k", {"question": None, "answer": "x"}),
        ("tweet_eval_sentiment", {"text": "x", "label": -1}),  # hidden labels become 'positive'
        ("ai2_arc_challenge", ROWS["ai2_arc_challenge"] | {"answerKey": "Z"}),
    ],
)
def test_malformed_row_is_a_user_error_with_file_and_line(folder, task, row):
    with open(folder / task / "train.jsonl", "a") as out:
        out.write(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=rf"{task}/train\.jsonl:3 is no "):
        load_paper_tasks(str(folder))


def test_missing_task_folder_is_a_user_error_that_names_it(folder):
    (folder / "gsm8k").rename(folder / "gsm")
    with pytest.raises(UserError, match="GSM8K is missing; it needs a folder gsm8k"):
        load_paper_tasks(str(folder))


def test_missing_root_is_a_user_error_that_names_it(tmp_path):
    with pytest.raises(UserError, match=r"data\.path=.*nowhere: there is no such file or folder"):
        load_paper_tasks(str(tmp_path / "nowhere"))


def test_task_folder_without_any_split_is_a_user_error_that_names_it(folder):
    for path in (folder / "gsm8k").iterdir():
        path.unlink()
    with pytest.raises(UserError, match=r"gsm8k.*train\.jsonl"):
        load_paper_tasks(str(folder))
