"""Formats that people have: every one becomes the same examples, and every mistake names its row."""

import gzip
import json

import pytest

from fedweave.config import from_tree
from fedweave.data.files import read_rows, split_name
from fedweave.data.own import load_own, read_examples
from fedweave.data.rows import Fields, read_fields, to_example
from fedweave.errors import UserError


def example(row: dict, **fields):
    return to_example(row, "a.jsonl:1", Fields(fields))


def turns(*pairs: tuple[str, str]):
    return tuple({"role": role, "content": content} for role, content in pairs)


def load(path, **settings):
    return load_own(from_tree({"seed": 1, "data": {"source": "jsonl", "path": str(path), **settings}}))


# -------------------------------------------------------------------------------------- rows

ASKED = [
    {"prompt": "why", "response": "so"},
    {"prompt": "why", "completion": "so"},
    {"instruction": "why", "output": "so"},
    {"instruction": "why", "input": "", "output": "so", "text": "Below is an instruction …"},
    {"instruction": "why", "input": None, "response": "so"},
    {"prompt": "why", "response": "so", "system": "", "messages": None, "id": 3},
]
CHATS = [
    {"messages": [{"role": "user", "content": "why"}, {"role": "assistant", "content": "so", "weight": 1}]},
    {"messages": [
        {"role": "user", "content": [{"type": "text", "text": "wh"}, {"type": "text", "text": "y"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
    ]},
    {"conversations": [{"from": "human", "value": "why"}, {"from": "gpt", "value": "so"}], "id": "x"},
    {"conversations": [{"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}]},
    {"prompt": [{"role": "user", "content": "why"}], "completion": [{"role": "assistant", "content": "so"}]},
]  # fmt: skip


@pytest.mark.parametrize("row", ASKED)
def test_a_question_and_its_answer_by_any_name(row):
    assert (example(row).prompt, example(row).response) == ("why", "so")


@pytest.mark.parametrize("row", CHATS)
def test_a_chat_by_any_name(row):
    assert (example(row).prompt, example(row).response) == (turns(("user", "why")), "so")


def test_the_input_of_an_alpaca_row_follows_its_instruction():
    assert example({"instruction": "Sum up.", "input": "A text.", "output": "x"}).prompt == "Sum up.\n\nA text."
    assert example({"prompt": "Sum up.", "input": "of the form", "response": "x"}).prompt == "Sum up."


@pytest.mark.parametrize("row", [{"prompt": "why", "response": "so"}, CHATS[0], CHATS[2]])
def test_a_system_prompt_of_its_own_comes_first(row):
    assert example({**row, "system": "Be brief."}).prompt == turns(("system", "Be brief."), ("user", "why"))


def test_a_chat_that_has_a_system_message_keeps_it():
    row = {"system": "other", "messages": [{"role": "developer", "content": "Be brief."}, *CHATS[0]["messages"]]}
    assert example(row).prompt[0] == {"role": "system", "content": "Be brief."}


def test_a_map_names_the_columns():
    row = {
        "question": "why",
        "context": "here",
        "answer": "so",
        "kind": "hard",
        "voice": "Be kind.",
        "prompt": "no",
    }
    mapped = example(row, prompt="question", input="context", response="answer", task="kind", system="voice")
    assert mapped.prompt == turns(("system", "Be kind."), ("user", "why\n\nhere"))
    assert (mapped.response, mapped.task) == ("so", "hard")
    assert example({"talk": CHATS[2]["conversations"]}, messages="talk").prompt == turns(("user", "why"))


@pytest.mark.parametrize(
    ("row", "fields", "complaint"),
    [
        ({"question": "x"}, {}, "or data.fields names its columns, as in prompt=question,response=answer ("),
        ({"question": "x", "answer": "y"}, {"prompt": "query", "response": "answer"}, "no 'query'"),
        ({"prompt": "x", "response": "y"}, {"messages": "talk"}, "no 'talk', which data.fields names for messages"),
        ({"prompt": "x", "response": "y"}, {"task": "kind"}, "no 'kind', which data.fields names for task"),
        ({"instruction": "x"}, {}, "no 'output'"),
        ({"instruction": "x", "input": 3, "output": "y"}, {}, "'input' must be a non-empty text, not 3"),
        ({"prompt": "x", "response": "y", "system": ["a"]}, {}, "'system' must be a non-empty text"),
        ({"prompt": "x", "response": [1] * 10**6}, {}, "not [1, 1, 1, 1, 1, 1, ...]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, 1]}, {},
         "a content part is 'image_url', and only text can be learned"),
        ({"messages": [{"role": "user", "content": ["hi"]}, 1]}, {}, "a content part is 'str'"),
        ({"conversations": [{"from": "gpt", "value": "a"}, {"from": "human", "value": "b"}]}, {},
         "the last message must be the assistant's"),
        ({"conversations": [{"from": "ghost", "value": "a"}, {"from": "gpt", "value": "b"}]}, {}, "one of system"),
        ({"prompt": "x", "response": "y", "task": "macro"}, {}, "no task can be called 'macro'"),
        ({"prompt": "x", "response": "y", "task": "a\nb"}, {}, "printable"),
        ({"prompt": "x", "response": "y", "task": "a" * 81}, {}, "at most 80"),
        ({f"k{i}": 1 for i in range(99)}, {}, "'k11', …)"),
    ],
)  # fmt: skip
def test_a_row_that_fits_no_format_is_one_sentence(row, fields, complaint):
    with pytest.raises(UserError) as caught:
        example(row, **fields)
    message = str(caught.value)
    assert message.startswith("a.jsonl:1: ") and complaint in message and "\n" not in message
    assert len(message) < 500


@pytest.mark.parametrize(
    ("pairs", "complaint"),
    [
        (["promt=question"], "did you mean 'prompt'?"),
        (["prompt"], "'prompt' names no column"),
        (["question", "answer"], "'question' does not say what it holds"),
        (["prompt="], "names no column"),
        (["messages=a", "prompt=b"], "either messages or prompt"),
    ],
)
def test_a_wrong_map_is_one_sentence(pairs, complaint):
    with pytest.raises(UserError, match=complaint):
        read_fields(pairs)


@pytest.mark.parametrize(
    "written", ["prompt=q,client=site a", ["prompt=q", "client=site a"], {"prompt": "q", "client": "site a"}]
)
def test_a_map_is_written_as_text_list_or_mapping(written):
    config = from_tree({"data": {"source": "jsonl", "path": "x", "fields": written}})
    assert read_fields(config.data.fields) == {"prompt": "q", "client": "site a"}


# -------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_csv_as_spreadsheets_write_it(tmp_path, separator, ends, mark):
    lines = [
        ["id", "prompt", "response", "task"],
        ["1", '"Say ""hi"", please"', "hi", "a"],
        ["", "", "", ""],
        ["2", f'"two{ends}lines{separator}"', "ünï", ""],
    ]
    path = tmp_path / "a.csv"
    path.write_bytes((mark + ends.join(separator.join(cells) for cells in lines) + ends).encode())
    first, second = read_examples(path)
    assert (first.prompt, first.response, first.task, first.origin) == ('Say "hi", please', "hi", "a", "a.csv:2")
    assert (second.prompt, second.response, second.task) == (f"two{ends}lines{separator}", "ünï", "all")
    assert second.origin == "a.csv:4"


def test_tsv_and_gzipped_csv_and_a_long_cell(tmp_path):
    (tmp_path / "a.TSV").write_text("prompt\tresponse\nx, y, z\tso\n")
    long = "word " * 100_000
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(f'prompt,response\n"{long}",so\n'.encode()))
    assert read_examples(tmp_path / "a.TSV")[0].prompt == "x, y, z"
    assert read_examples(tmp_path / "b.csv.gz")[0].prompt == long


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"prompt,response\nx,y\nx,y,z\n", r"a\.csv:3: 3 cells under 2 columns; put quotes"),
        (b"prompt,response\nx\n", r"a\.csv:2: 1 cells under 2 columns"),
        (b'prompt,response\nx,"y\nz,z\n', r"a\.csv:2: not valid CSV .*stray quote"),
        (b'prompt,response\n"x"y,z\n', r"a\.csv:2: not valid CSV"),
        (b"prompt,prompt\nx,y\n", r"a\.csv:1: two columns are called 'prompt'"),
        (b"prompt,response\nx,y\nx,caf\xe9\n", r"a\.csv:3: not UTF-8"),
        ("prompt,response\nx,y\n".encode("utf-16"), r"a\.csv:1: not UTF-8"),
        (b"prompt,response\n,y\n", r"a\.csv:2: 'prompt' must be a non-empty text, not None"),
        (b"x,y\nz,z\n", r"a\.csv:2: no 'prompt'"),
        (b'"', r"a\.csv:1: the header is no CSV"),
    ],
)
def test_a_wrong_table_names_the_line(tmp_path, text, complaint):
    (tmp_path / "a.csv").write_bytes(text)
    with pytest.raises(UserError, match=complaint):
        read_examples(tmp_path / "a.csv")


def test_a_workbook_is_told_from_broken_text(tmp_path):
    (tmp_path / "a.xlsx").write_bytes(b"PK\x03\x04\n\n")
    with pytest.raises(
        UserError, match=r"a\.xlsx is a workbook or an archive, not text; save its rows as JSONL or CSV"
    ):
        read_examples(tmp_path / "a.xlsx")


def test_after_a_wrong_line_the_reader_can_go_on(tmp_path):
    (tmp_path / "a.csv").write_text('prompt,response\nx,y,z\n"a"b,c\nx,y\n')
    (tmp_path / "a.jsonl").write_text('{oops}\n[1]\n{"prompt": "x", "response": "y"}\n')
    for name in ("a.csv", "a.jsonl"):
        faults = []
        rows = list(read_rows(tmp_path / name, faults.append))
        assert len(faults) == 2 and [row["prompt"] for _, row in rows] == ["x"]


def test_a_json_list_is_read_where_it_is_named(tmp_path):
    path = tmp_path / "alpaca.json"
    path.write_text(json.dumps([{"instruction": "x", "input": "", "output": "y"}] * 3, indent=2))
    assert [e.origin for e in read_examples(path)] == ["alpaca.json:1", "alpaca.json:2", "alpaca.json:3"]
    for text, complaint in (("{}", "must hold a list"), ("[1]", ":1: a row must be"), ("[", "not valid JSON")):
        path.write_text(text)
        with pytest.raises(UserError, match=complaint):
            read_examples(path)


def test_parquet_reads_like_jsonl(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'fedweave[parquet]'")
    from pyarrow import parquet

    rows = [{"prompt": f"q {n}", "response": "a", "task": "t" if n else None} for n in range(3000)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([CHATS[0], CHATS[0]]), tmp_path / "b.parquet")
    read = read_examples(tmp_path / "a.parquet")
    assert [e.prompt for e in read] == [row["prompt"] for row in rows]
    assert (read[0].task, read[1].task, read[-1].origin) == ("all", "t", "a.parquet:3000")
    assert read_examples(tmp_path / "b.parquet")[1].prompt == turns(("user", "why"))
    (tmp_path / "c.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-40])
    with pytest.raises(UserError, match=r"c\.parquet cannot be read as Parquet"):
        read_examples(tmp_path / "c.parquet")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"pip install 'fedweave\[parquet\]', or save the rows as JSONL or CSV"):
        read_examples(tmp_path / "a.parquet")


def test_names_of_data_files():
    assert split_name("site.a.jsonl.gz") == ("site.a", ".jsonl")
    assert split_name("A.CSV") == ("A", ".csv")
    assert [split_name(n) for n in ("a.json", "a.parquet.gz", ".jsonl", "a.jsonl.bak", "a")] == [None] * 5


# -------------------------------------------------------------------------------------- folders, files, hub


@pytest.fixture
def write(tmp_path):
    """Call with a file name and rows to write them as JSONL or CSV."""

    def make(name: str, rows: list[dict]):
        if name.endswith(".csv"):
            lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
        else:
            lines = [json.dumps(row) for row in rows]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        return tmp_path / name

    return make


def rows(count: int, start: int = 0, **more) -> list[dict]:
    return [{"prompt": f"q {n}", "response": f"a {n}", **more} for n in range(start, start + count)]


def test_a_folder_may_mix_formats_and_hidden_files_do_not_count(tmp_path, write):
    write("a.jsonl", rows(20))
    write("b.csv", rows(20, 20))
    (tmp_path / "._a.jsonl").write_bytes(b"\x00\x05\x16\x07")  # what a Mac leaves on other disks
    (tmp_path / ".hidden.csv").write_bytes(b"\xff")
    data = load(tmp_path)
    assert data.sizes() == {"a": 16, "b": 16}
    assert [note for note in data.notes if "scores:" not in note] == []


def test_a_mark_before_the_first_row_is_no_part_of_it(tmp_path, write):
    path = write("a.jsonl", rows(2))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert [e.prompt for e in read_examples(path)] == ["q 0", "q 1"]


@pytest.mark.parametrize("name", ["Test.jsonl", "VALIDATION.csv", "test.JSONL.GZ"])
def test_a_held_out_set_by_another_spelling_is_not_a_client(tmp_path, write, name):
    write("a.jsonl", rows(20))
    if name == "test.JSONL.GZ":
        (tmp_path / name).write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
        assert len(load(tmp_path).test) == 20
        return
    write(name, rows(2))
    with pytest.raises(UserError, match=rf"{name} is taken for a client; rename it to {name.lower()}"):
        load(tmp_path)


def test_files_that_look_like_data_or_like_held_out_rows_are_remarked(tmp_path, write):
    write("a.jsonl", rows(20))
    write("val.jsonl", rows(20, 50))
    for name in ("c.json", "d.xlsx", "e.jsonl.bak", "README.md"):
        (tmp_path / name).write_text("x")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "x.csv").write_text("x")
    notes = load(tmp_path).notes
    assert [n.split()[0] for n in notes if "is not read" in n] == ["c.json", "d.xlsx", "e.jsonl.bak", "more/"]
    assert "val.jsonl is the client 'val'; rename it to validation.jsonl if it is to be held out." in notes


def test_test_rows_that_stand_in_train_are_remarked(tmp_path, write):
    write("a.jsonl", rows(20))
    write("b.jsonl", [*rows(10, 20), {"prompt": " q 90 ", "response": "a 90"}])
    write("test.jsonl", [*rows(2, 28), *rows(2, 90)])
    write("validation.jsonl", rows(2, 70))
    notes = [note for note in load(tmp_path).notes if "also stand in train" in note]
    assert notes == [
        "3 of 4 test rows also stand in train (test.jsonl:1 is b.jsonl:9), so their figures flatter the model."
    ]


@pytest.mark.parametrize("name", ["all.jsonl", "all.csv"])
def test_one_file_with_a_column_of_clients(write, name):
    path = write(name, [row | {"client": "north" if n % 3 else "south"} for n, row in enumerate(rows(60))])
    data = load(path)
    assert data.sizes() == {"north": 32, "south": 16}
    assert len(data.validation) == len(data.test) == 6
    mapped = write("mapped.csv", [row | {"hospital": n % 2} for n, row in enumerate(rows(40))])
    assert load(mapped, fields="client=hospital").sizes() == {"0": 16, "1": 16}


def test_a_folder_with_a_column_of_clients(tmp_path, write):
    write("2024.csv", [row | {"site": "ab"[n % 2]} for n, row in enumerate(rows(20))])
    write("2025.jsonl", [row | {"site": "bc"[n % 2]} for n, row in enumerate(rows(20, 20))])
    write("test.csv", rows(3, 90))
    data = load(tmp_path, fields={"client": "site"}, holdout=0.2)
    assert data.sizes() == {"a": 8, "b": 16, "c": 8} and len(data.test) == 3


def test_a_folder_of_one_client_file_may_hold_the_rows_of_all(tmp_path, write):
    write("cases.csv", [row | {"client": "ab"[n % 2]} for n, row in enumerate(rows(40))])
    write("test.csv", rows(3, 90))
    assert load(tmp_path).sizes() == {"a": 18, "b": 18}
    write("cases.csv", rows(40))
    assert load(tmp_path).sizes() == {"cases": 36}


def test_one_file_without_clients_is_dealt_out(write):
    path = write("all.jsonl", [*rows(100, task="x"), *rows(100, 100, task="y")])
    data = load(path, clients=5, alpha=1.0)
    assert list(data.clients) == [f"client_{i}" for i in range(5)]
    assert (sum(data.sizes().values()), len(data.validation), len(data.test)) == (160, 20, 20)
    everything = [e.origin for part in (*data.clients.values(), data.validation, data.test) for e in part]
    assert sorted(everything) == sorted(f"all.jsonl:{n + 1}" for n in range(200))
    assert any("dealt out to data.clients=5 simulated clients" in note for note in data.notes)
    assert load(path, clients=5, alpha=1.0) == data


def test_a_row_of_no_client_among_others_is_named(write):
    path = write("all.jsonl", [*rows(20, client="a"), *rows(1, 20)])
    with pytest.raises(UserError, match=r"all\.jsonl:21: the row says of no client, while others do"):
        load(path)
    with pytest.raises(UserError, match=r"all\.jsonl:1: no 'site', which data\.fields names for client"):
        load(path, fields="client=site")


def test_a_data_set_of_the_hub_needs_its_package_or_a_whole_name(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(UserError, match=r"needs the datasets package: pip install 'fedweave\[hub\]'"):
        load("hf://owner/name")
    with pytest.raises(UserError, match="is not of the form hf://owner/name"):
        load("hf://owner")


def test_a_data_set_by_its_name(tmp_path, monkeypatch):
    """A folder owner/name is taken by the datasets package for the hub's data set of that name."""
    pytest.importorskip("datasets", reason="datasets is not installed: pip install 'fedweave[hub]'")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    for split, count in (("train", 40), ("test", 4)):
        text = "".join(json.dumps(row | {"user": n % 2}) + "\n" for n, row in enumerate(rows(count)))
        (folder / f"{split}.jsonl").write_text(text)
    data = load("hf://owner/name", fields="client=user")
    assert data.sizes() == {"0": 18, "1": 18} and len(data.validation) == 4
    assert [e.origin for e in data.test] == [f"hf://owner/name/test:{n}" for n in range(1, 5)]
