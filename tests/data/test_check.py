"""A check finds everything at once, and its verdict is the run's."""

import json

import pytest

from fedweave.backbone.lengths import Tokens
from fedweave.backbone.prompts import PromptFormat
from fedweave.config import BackboneConfig, from_tree
from fedweave.data import load_data
from fedweave.data.check import Characters, check_own
from fedweave.data.examples import Example
from fedweave.errors import UserError


def row(n: int, **more) -> dict:
    return {"prompt": f"question {n}", "response": f"answer {n}", **more}


@pytest.fixture
def folder(tmp_path):
    """Call with {file: rows or raw lines} to write a data folder."""

    def write(**files):
        for name, rows in files.items():
            lines = [r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in rows]
            (tmp_path / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return tmp_path

    return write


def config(path, **data):
    return from_tree({"data": {"source": "jsonl", "path": str(path), **data}, "backbone": {"max_length": 48}})


def check(path, reader=None, **data):
    return check_own(config(path, **data), reader or Characters())


def said(found, text: str) -> str:
    (remark,) = [r for r in found.remarks if text in r]
    return remark


# -------------------------------------------------------------------------------------- faults


def test_a_file_of_which_nothing_can_be_used_is_told_of_once(folder):
    path = folder(a=list(map(row, range(30))), lost=[], bad=["{oops"], validation=["{oops"])
    (path / "lost.jsonl").write_bytes(b"PK\x03\x04 and so on")
    first, second, third = (fault["where"] + fault["what"] for fault in check(path).faults)
    assert first.startswith("validation.jsonl:1not valid JSON") and second.startswith("bad.jsonl:1not valid JSON")
    assert "lost.jsonl is a workbook or an archive" in third
    (only,) = check(path / "lost.jsonl").faults
    assert "is a workbook or an archive" in only["what"]


def test_everything_wrong_with_all_rows_of_all_files_is_found_at_once(folder):
    path = folder(
        a=[row(1), "{oops", row(2) | {"task": "macro"}, "[1]", {"prompt": "x"}, *map(row, range(20))],
        b=[{"question": 1}, row(3) | {"response": 7}, *map(row, range(30, 50))],
        empty=[],
        Test=[row(4)],
    )
    found = check(path)
    assert [fault["where"] for fault in found.faults if fault["where"]] == [
        "a.jsonl:2", "a.jsonl:3", "a.jsonl:4", "a.jsonl:5", "b.jsonl:1", "b.jsonl:2",
    ]  # fmt: skip
    whole = " ".join(fault["what"] for fault in found.faults if not fault["where"])
    assert "client 'empty' is empty" in whole and "Test.jsonl is taken for a client" in whole
    assert len(found.faults) == 8 and not found.passes
    assert found.clients["a"].rows == 21 and found.clients["b"].rows == 20  # the good rows are counted all the same
    with pytest.raises(UserError):
        load_data(config(path))


@pytest.mark.parametrize(
    ("files", "settings", "what"),
    [
        ({}, {}, "holds no client file"),
        ({"test": [row(1)], "validation": [row(2)]}, {}, "holds no client file"),
        ({"a": [row(n) for n in range(9)]}, {}, "no validation example is left"),
        ({"a": [row(n) for n in range(20)]}, {"fields": "prompt=ask"}, "no 'ask'"),
        ({"a": [row(n) for n in range(20)]}, {"fields": "promt=ask"}, "did you mean 'prompt'"),
    ],
)
def test_what_a_run_refuses_a_check_refuses(folder, files, settings, what):
    path = folder(**files)
    found = check(path, **settings)
    assert any(what in fault["what"] for fault in found.faults)
    with pytest.raises(UserError, match=what):
        load_data(config(path, **settings))


def test_metrics_are_part_of_the_verdict(folder):
    path = folder(a=map(row, range(20)))
    (path / "tasks.yaml").write_text("all: bleu")
    assert "there is no metric 'bleu'" in check(path).faults[0]["what"]
    (path / "tasks.yaml").write_text("all: f1")
    assert check(path).metrics == {"all": "f1"}


def test_a_path_that_is_not_there_is_a_fault(tmp_path):
    found = check(tmp_path / "nowhere")
    assert "there is no such file or folder" in found.faults[0]["what"] and not found.clients


# -------------------------------------------------------------------------------------- what one wants to know


def test_rows_sets_tasks_scripts_and_lengths(folder):
    path = folder(
        a=[row(n, task="ask" if n % 4 else "tell") for n in range(20)],
        b=[{"prompt": "哪里", "response": "北京" * n} for n in range(1, 11)],
        test=[row(100)],
    )
    found = check(path)
    assert found.passes and found.unit == "characters"
    assert found.sets == {"train": 27, "validation": 3, "test": 1}
    a, b, test = found.clients["a"], found.clients["b"], found.held["test"]
    assert (a.rows, a.train, a.tasks, a.scripts) == (20, 18, {"ask": 15, "tell": 5}, {"Latin": 1.0})
    assert (b.rows, b.train, b.prompt, b.answer) == (10, 9, {"median": 2, "max": 2}, {"median": 11, "max": 20})
    assert list(b.scripts) == ["Han"] and test.rows == 1
    assert found.example == {"origin": "a.jsonl:1", "text": "[user] question 0\n[assistant] answer 0"}
    assert json.loads(json.dumps(found.as_dict()))["passes"] is True


def test_duplicates_overlap_and_several_answers(folder):
    path = folder(
        a=[*map(row, range(12)), row(3)],
        b=[*map(row, range(20, 32)), row(5), row(6) | {"response": "another"}],
        test=[row(20), row(99)],
        validation=[row(50)],
    )
    found = check(path)
    assert found.duplicates == 2
    assert "2 of 27 rows repeat another one (a.jsonl:13 is a.jsonl:4)" in said(found, "repeat")
    assert found.overlap == {"validation": [], "test": [("test.jsonl:1", "b.jsonl:1")]}
    assert said(found, "also stand in train").startswith("1 of 2 test rows")
    assert said(found, "several different answers") == "1 prompts have several different answers."
    assert found.passes


def test_small_clients_and_long_chats(folder):
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    chat = {"messages": [{"role": role, "content": content} for role, content in turns]}
    found = check(folder(big=map(row, range(20)), small=map(row, range(30, 35)), tiny=[chat]))
    assert said(found, "keep one back") == (
        "small, tiny have too few rows to keep one back for validation or test at data.holdout=0.1."
    )
    assert said(found, "one bucket") == "tiny has fewer than three rows, which make one bucket."
    assert said(found, "several answers").startswith("1 chats")


def test_files_that_are_left_aside_are_remarked(folder):
    path = folder(a=map(row, range(20)), val=map(row, range(20, 40)))
    (path / "c.json").write_text("[]")
    found = check(path)
    assert said(found, "c.json looks like data")
    assert said(found, "val.jsonl is the client 'val'; rename it to validation.jsonl")


# -------------------------------------------------------------------------------------- with a model


@pytest.fixture(params=["plain", "chat"])
def tokens(request, tokenizer, chat_tokenizer) -> Tokens:
    tokens = tokenizer if request.param == "plain" else chat_tokenizer
    return Tokens(PromptFormat(tokens, BackboneConfig(prompt=request.param, max_length=48)))


def test_tokens_are_those_that_the_run_encodes(tokens):
    rows = [Example("How many apples in all? " * n, "3 + 4 = 7 " * n, "all", f"a.jsonl:{n}") for n in range(1, 8)]
    whole = PromptFormat(tokens.prompts.tokenizer, BackboneConfig(prompt=tokens.prompts.kind, max_length=4096))
    for length, encoded in zip(tokens.lengths(rows), whole.encode(rows), strict=True):
        assert (length.prompt, length.answer) == (encoded.answer_start, len(encoded.ids) - encoded.answer_start)
        assert max(0, len(encoded.ids) - 48) in (length.cut, length.prompt + length.answer - 48)
        assert length.too_long == (length.fault != "") and not (length.cut and length.fault)


def test_what_is_cut_and_what_has_no_room(folder, tokens):
    long = {"prompt": "Dan has 3 coins and finds 4 more. " * 8, "response": "7"}
    path = folder(a=[*map(row, range(30)), long, {"prompt": "x", "response": "seven times eight " * 20}])
    found = check(path, tokens)
    (fault,) = found.faults
    assert fault["where"] == "a.jsonl:32" and "leaves no room for its prompt" in fault["what"]
    assert (found.clients["a"].cut, found.unit) == (1, "tokens")
    assert said(found, "lose their beginning").startswith("1 of 32 prompts are longer than backbone.max_length=48")
    dropped = check(path, tokens, long_answers="skip")
    assert dropped.passes and said(dropped, "are dropped").startswith("1 of 32 rows")
    assert said(dropped, "raise evaluation.max_new_tokens").startswith("1 of 32 answers")


def test_rows_that_the_template_refuses_are_all_named(folder, chat_tokenizer):
    template = chat_tokenizer.chat_template
    refusing = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + template
    )
    prompts = PromptFormat(chat_tokenizer, BackboneConfig())
    chat = {"prompt": "a", "response": "b", "system": "Be kind."}
    path = folder(a=[*map(row, range(30)), chat, row(50), chat])
    try:
        chat_tokenizer.chat_template = refusing
        found = check(path, Tokens(prompts))
    finally:
        chat_tokenizer.chat_template = template
    assert [fault["where"] for fault in found.faults] == ["a.jsonl:31", "a.jsonl:33"]
    assert "the chat template refuses them (no system role)" in found.faults[0]["what"]


def test_the_example_is_written_as_the_model_reads_it(folder, chat_tokenizer):
    found = check(folder(a=map(row, range(20))), Tokens(PromptFormat(chat_tokenizer, BackboneConfig())))
    assert found.example["text"] == ("<|start|>user\nquestion 0<|end|>\n<|start|>assistant\nanswer 0<|end|>")
