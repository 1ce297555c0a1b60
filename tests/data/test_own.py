"""A user's own folder: what rows may look like, which line is wrong, and how rows are held out."""

import gzip
import json
import re

import pytest

from fedweave.config import Config, DataConfig
from fedweave.data.own import load_own, read_examples
from fedweave.errors import UserError


def row(n: int, **more) -> dict:
    return {"prompt": f"question {n}", "response": f"answer {n}", **more}


def chat(*turns: tuple[str, str]) -> dict:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


@pytest.fixture
def write(tmp_path):
    """Call with a file name and rows (dictionaries or raw lines) to write it into the data folder."""

    def make(name: str, *rows):
        lines = [r if isinstance(r, bytes) else json.dumps(r, ensure_ascii=False).encode() for r in rows]
        data = b"".join(line + b"\n" for line in lines)
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return tmp_path / name

    return make


def load(folder, seed=0, **settings):
    return load_own(Config(seed=seed, data=DataConfig(source="jsonl", path=str(folder), **settings)))


# -------------------------------------------------------------------------------------- rows


def test_prompt_and_response_row(write):
    (example,) = read_examples(write("a.jsonl", row(1)))
    assert (example.prompt, example.response, example.origin) == ("question 1", "answer 1", "a.jsonl:1")


def test_messages_row_keeps_all_turns_but_the_last_as_prompt(write):
    turns = [
        ("system", "be kind"),
        ("user", "hi"),
        ("assistant", "yes?"),
        ("user", "why"),
        ("assistant", "because"),
    ]
    (example,) = read_examples(write("a.jsonl", chat(*turns)))
    assert example.prompt == tuple({"role": r, "content": c} for r, c in turns[:-1])
    assert example.response == "because"


def test_task_label_is_optional(write):
    labelled, unlabelled = read_examples(write("a.jsonl", row(1, task="sums"), row(2)))
    assert (labelled.task, unlabelled.task) == ("sums", "all")


def test_gzipped_file_reads_like_a_plain_one(write):
    rows = [row(n) for n in range(3)]
    plain, zipped = read_examples(write("a.jsonl", *rows)), read_examples(write("b.jsonl.gz", *rows))
    assert [(e.prompt, e.response) for e in plain] == [(e.prompt, e.response) for e in zipped]
    assert zipped[2].origin == "b.jsonl.gz:3"


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c"])
def test_only_a_newline_ends_a_row(write, mark):
    raw = f'{{"prompt": "one{mark}two", "response": "x"}}'.encode()
    if mark < " ":  # JSON has no raw control characters, but says so about one whole line
        with pytest.raises(UserError, match=r"a\.jsonl:1: not valid JSON .*char 15"):
            read_examples(write("a.jsonl", raw))
    else:
        (example,) = read_examples(write("a.jsonl", raw))
        assert example.prompt == f"one{mark}two"


def test_blank_lines_and_windows_line_ends_do_not_matter_but_count(write):
    raw = json.dumps(row(1)).encode() + b"\r"
    examples = read_examples(write("a.jsonl", b"", raw, b"  \t", b"", row(2), b""))
    assert [e.origin for e in examples] == ["a.jsonl:2", "a.jsonl:5"]


# -------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b'{"prompt": "x", ', "not valid JSON"),
        (b"[1, 2]", "must be a JSON object, not a list"),
        (b'"text"', "must be a JSON object, not a str"),
        (b'{"prompt": "caf\xe9", "response": "x"}', "not UTF-8"),
        (row(1) | {"task": 3}, "'task' must be a non-empty text, not 3"),
        (row(1) | {"task": ""}, "'task' must be a non-empty text"),
        ({"prompt": "x"}, "no 'response'"),
        ({"response": "x"}, "no 'prompt'"),
        ({"question": "x"}, "it has 'question'"),
        ({}, "it has no keys"),
        ({"prompt": "", "response": "x"}, "'prompt' must be a non-empty text"),
        ({"prompt": " \n", "response": "x"}, "'prompt' must be a non-empty text"),
        ({"prompt": "x", "response": None}, "'response' must be a non-empty text, not None"),
        ({"messages": "hi"}, "'messages' must list at least"),
        (chat(("assistant", "x")), "'messages' must list at least"),
        ({"messages": ["hi", "ho"]}, "a message needs 'role'"),
        (chat(("narrator", "hi"), ("assistant", "x")), "one of system, user, assistant, tool"),
        ({"messages": [{"role": "user"}, {"role": "assistant", "content": "x"}]}, "a message needs 'role'"),
        (chat(("user", "hi"), ("user", "ho")), "the last message must be the assistant's"),
        (chat(("user", "hi"), ("assistant", " ")), "the last message must be the assistant's"),
        (chat(("system", "hi"), ("assistant", "x")), "no user message"),
        (chat(("user", ""), ("assistant", "x")), "user"),
        (b'{"prompt": "\\ud800", "response": "x"}', "UTF-8"),
    ],
)  # fmt: skip
def test_bad_row_is_a_user_error_with_file_and_line(write, bad, message):
    with pytest.raises(UserError) as caught:
        read_examples(write("site.jsonl", row(1), b"", bad, row(2)))
    assert re.search(r"site\.jsonl:3: ", str(caught.value))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_truncated_gzip_is_a_user_error(write):
    path = write("a.jsonl.gz", *[row(n) for n in range(50)])
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UserError, match=r"a\.jsonl\.gz cannot be read"):
        read_examples(path)


def test_damaged_gzip_is_a_user_error(write):
    path = write("a.jsonl.gz", *[row(n) for n in range(50)])
    data = bytearray(path.read_bytes())
    data[10] = 0xFF  # a block type that does not exist
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"a\.jsonl\.gz cannot be read"):
        read_examples(path)


def test_missing_folder_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match=r"data\.path=.*nowhere: there is no such file or folder"):
        load(tmp_path / "nowhere")


def test_folder_without_clients_is_a_user_error(tmp_path, write):
    write("validation.jsonl", row(1))
    write("test.jsonl", row(2))
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(UserError, match="holds no client file"):
        load(tmp_path)


def test_empty_client_is_a_user_error_that_names_it(tmp_path, write):
    write("full.jsonl", *[row(n) for n in range(20)])
    write("hollow.jsonl", b"", b" ")
    with pytest.raises(UserError, match=r"hollow\.jsonl: client 'hollow' is empty"):
        load(tmp_path)


def test_two_files_of_one_client_are_a_user_error(tmp_path, write):
    write("site.jsonl", *[row(n) for n in range(20)])
    write("site.jsonl.gz", *[row(n) for n in range(20)])
    with pytest.raises(UserError, match="site"):
        load(tmp_path)


@pytest.mark.parametrize("holdout", [0.0, 0.1])
def test_nothing_left_to_hold_out_is_a_user_error(tmp_path, write, holdout):
    write("site.jsonl", *[row(n) for n in range(9)])
    with pytest.raises(UserError, match=r"no validation example is left; add validation\.jsonl"):
        load(tmp_path, holdout=holdout)


# -------------------------------------------------------------------------------------- holding out


def origins(examples):
    return [e.origin for e in examples]


def test_validation_and_test_files_are_used_and_clients_keep_every_row(tmp_path, write):
    write("site_a.jsonl", *[row(n) for n in range(20)])
    write("site_b.jsonl.gz", *[row(n) for n in range(30)])
    write("validation.jsonl", row(1), row(2))
    write("test.jsonl.gz", row(3, task="sums"))
    data = load(tmp_path)
    assert data.sizes() == {"site_a": 20, "site_b": 30}
    assert origins(data.validation) == ["validation.jsonl:1", "validation.jsonl:2"]
    assert origins(data.test) == ["test.jsonl.gz:1"]
    assert set(data.tasks) == {"all", "sums"}


def test_only_the_missing_set_is_held_out(tmp_path, write):
    write("site.jsonl", *[row(n) for n in range(20)])
    write("test.jsonl", row(1))
    data = load(tmp_path)
    assert (len(data.clients["site"]), len(data.validation), len(data.test)) == (18, 2, 1)


@pytest.mark.parametrize("holdout", [0.1, 0.25, 0.4])
def test_holdout_is_disjoint_complete_and_of_the_asked_size(tmp_path, write, holdout):
    sizes = {"a": 1, "b": 2, "c": 7, "d": 40}
    for name, count in sizes.items():
        write(f"{name}.jsonl", *[row(n) for n in range(count)])
    data = load(tmp_path, holdout=holdout)
    parts = [*map(origins, data.clients.values()), origins(data.validation), origins(data.test)]
    everything = [o for part in parts for o in part]
    assert sorted(everything) == sorted(f"{c}.jsonl:{n + 1}" for c, count in sizes.items() for n in range(count))
    assert len(data.validation) == len(data.test) == sum(int(holdout * n) for n in sizes.values())
    assert all(data.sizes()[name] >= 1 for name in sizes)
    assert origins(data.clients["a"]) == ["a.jsonl:1"]  # a single row is for training


def test_holdout_depends_on_the_seed_alone(tmp_path, write):
    for name in "ab":
        write(f"{name}.jsonl", *[row(n) for n in range(40)])
    first, again, other = load(tmp_path, seed=1), load(tmp_path, seed=1), load(tmp_path, seed=2)
    assert first == again
    assert origins(first.test) != origins(other.test)
    lines = [{o.split(":")[1] for o in origins(first.test) if o.startswith(c)} for c in "ab"]
    assert lines[0] != lines[1]  # clients draw independently
