"""Damaged data: whatever happens to the files, loading is one sentence or data, and a check agrees with it.

Every damage follows from its number, so that a failure can be had again; FEDWEAVE_DAMAGES=5000 tries more of them.
"""

import gzip
import json
import os
import random

import pytest

from fedweave.cli import main
from fedweave.config import from_tree
from fedweave.data import load_data
from fedweave.data.check import Characters, check_own
from fedweave.errors import UserError

TRIALS = int(os.environ.get("FEDWEAVE_DAMAGES", "300"))
ODD_VALUES = [
    None, True, 0, -1.5, 10**400, float("inf"), "", " ", "\x00", "macro", "é" * 3, "\u202e", [], [[]], {},
    {"a": {}}, [{"role": "user"}], [{"role": "user", "content": "x"}] * 3, ["a", "b"], "x" * 200_000, [None] * 2,
    "😀",
    [{"from": "human", "value": []}, {"from": "gpt", "value": [{"type": "text", "text": "x"}]}],
]  # fmt: skip
ODD_BYTES = [
    b"", b"\x00" * 50, b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b'"', b"'", b"{", b"}", b"[" * 5000,
    b"\r", b"\n", b",", b";", b"\t", b"\\ud800", b"9" * 5000, b"1e999", b"NaN", b"PAR1", b"\x1f\x8b", b"null",
]  # fmt: skip
ODD_NAMES = [
    "Test.jsonl", "val.jsonl", "c.json", "._a.jsonl", ".jsonl", "a.jsonl.gz", "a b.csv", "ü.tsv", "-.csv",
    "x" * 120 + ".jsonl", "new\nline.jsonl", "\udcff.jsonl", "tasks.yaml", "b.parquet", "t$x$.jsonl", "%s.jsonl",
    "validation.csv",
]  # fmt: skip
ODD_TASKS = [
    "all: bleu",
    "all: os:system",
    "x: {",
    "- 1",
    "1: 2",
    "all: {title: [1]}",
    "? [a]\n: b",
    "\x00",
    "&a [*a]",
]


def rows(dice: random.Random, count: int) -> list[dict]:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    made = [
        lambda n: {"prompt": f"question {n}", "response": f"answer {n}", "task": "ask"},
        lambda n: {"instruction": f"do {n}", "input": "", "output": "done"},
        lambda n: {"messages": [*chat, {"role": "user", "content": f"more {n}"}, chat[1]]},
        lambda n: {"prompt": f"who {n}", "completion": "we", "client": f"c{n % 3}"},
    ]
    kind = dice.choice(made)
    return [kind(dice.randrange(1000)) for _ in range(count)]


def write(folder, dice: random.Random) -> None:
    """A folder that is in order: JSONL, CSV and a gzipped file."""
    for name in ("a", "b"):
        text = "".join(json.dumps(row) + "\n" for row in rows(dice, 25))
        (folder / f"{name}.jsonl").write_text(text)
    cells = "".join(f'"question, {n}",answer {n},ask\n' for n in range(25))
    (folder / "c.csv").write_text(f"prompt,response,task\n{cells}")
    (folder / "d.jsonl.gz").write_bytes(gzip.compress((folder / "a.jsonl").read_bytes()))
    if dice.random() < 0.3:
        (folder / "tasks.yaml").write_text("ask: f1\n")


def spoil_bytes(data: bytes, dice: random.Random) -> bytes:
    at = dice.randrange(len(data) + 1)
    how = dice.randrange(6)
    if how == 0:
        return data[:at]
    if how == 1:
        return data[:at] + dice.choice(ODD_BYTES) + data[at:]
    if how == 2:
        return data[:at] + bytes(dice.randrange(256) for _ in range(8)) + data[at + 8 :]
    if how == 3:
        code = dice.choice(["utf-16", "utf-32", "utf-8-sig", "cp037"])
        return data.decode("utf-8", "replace").encode(code, "replace")
    if how == 4:
        lines = data.split(b"\n")
        dice.shuffle(lines)
        return b"\n".join(lines[dice.randrange(3) :])
    return dice.choice(ODD_BYTES) * dice.randrange(1, 3)


def spoil(folder, dice: random.Random) -> None:
    """One of everything that can happen to a folder."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    if not files:
        return
    path = dice.choice(files)
    how = dice.randrange(7)
    if how <= 1:
        path.write_bytes(spoil_bytes(path.read_bytes(), dice))
    elif how == 2:  # a value of another kind
        made = rows(dice, 25)
        for _ in range(dice.randrange(1, 4)):
            row = dice.choice(made)
            row[dice.choice([*row, "task", "system", "messages", "client"])] = dice.choice(ODD_VALUES)
        text = "".join(json.dumps(row, ensure_ascii=dice.random() < 0.5) + "\n" for row in made)
        replace(folder / "a.jsonl", text.encode("utf-8", "surrogatepass"))
    elif how == 3:
        replace(folder / dice.choice(ODD_NAMES), path.read_bytes())
    elif how == 4:
        path.unlink()
        dice.choice([path.mkdir, lambda: path.symlink_to(path), lambda: os.mkfifo(path), lambda: None])()
    elif how == 5:
        replace(folder / "tasks.yaml", dice.choice(ODD_TASKS).encode())
    else:  # the bytes below the compression
        damaged = gzip.compress(spoil_bytes(path.read_bytes(), dice))
        replace(folder / "d.jsonl.gz", damaged if dice.random() < 0.5 else spoil_bytes(damaged, dice))


def replace(path, data: bytes) -> None:
    """Write a file where something else may lie by now."""
    if path.is_dir() and not path.is_symlink():
        return
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def one_sentence(message: str) -> bool:
    return "\n" not in message and 0 < len(message) < 1000 and message.isprintable()


@pytest.mark.parametrize("block", range(4))
def test_damaged_folders_are_one_sentence_or_data(tmp_path, block):
    for trial in range(block, TRIALS, 4):
        dice = random.Random(trial)
        folder = tmp_path / str(trial)
        folder.mkdir()
        write(folder, dice)
        for _ in range(dice.randrange(1, 4)):
            spoil(folder, dice)
        fields = dice.choice([(), (), "client=client", "prompt=question,response=answer", "task=kind"])
        path = folder if dice.random() < 0.8 else dice.choice([*sorted(folder.iterdir()), folder])
        try:
            config = from_tree({"data": {"source": "jsonl", "path": str(path), "fields": fields, "clients": 3}})
        except UserError as error:  # a name that is no text is refused before anything is read
            assert one_sentence(str(error)), (trial, error)
            continue
        try:
            load_data(config)
            refused = None
        except UserError as error:
            refused = str(error)
            assert one_sentence(refused), (trial, refused)
        found = check_own(config, Characters())
        assert found.passes == (refused is None), (trial, refused, found.faults)
        spoken = [*(fault["what"] for fault in found.faults), *found.remarks]
        assert [text for text in spoken if not one_sentence(text)] == [], trial
        json.dumps(found.as_dict()).encode()


@pytest.mark.parametrize("trial", range(10))
def test_the_verb_says_so_too(tmp_path, capsys, trial):
    dice = random.Random(1_000_000 + trial)
    write(tmp_path, dice)
    spoil(tmp_path, dice)
    assert main(["check", str(tmp_path)]) in (0, 1)
    capsys.readouterr().out.encode()


ABSURD = [
    "/nowhere",
    "a\x00b",
    "x" * 5000,
    "~nobody-of-this-name/x",
    "/dev/null/x",
    "\udcff",
    "",
    ".",
    "a\nb",
    "/dev/zero",
]


@pytest.mark.parametrize("path", ABSURD)
@pytest.mark.parametrize("source", ["jsonl", "paper", "tasks"])
def test_absurd_paths_are_one_sentence(path, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        load_data(from_tree({"data": {"source": source, "path": path}}))
    assert one_sentence(str(caught.value))


@pytest.mark.parametrize("path", ABSURD)
def test_a_check_of_an_absurd_path_is_one_sentence(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["check", path]) in (1, 2)
    shown = capsys.readouterr()
    (shown.out + shown.err).encode()


@pytest.mark.parametrize(
    "settings",
    [
        {"train": 1e12},
        {"test": 10**30},
        {"clients": 10**15, "train": 20},
        {"alpha": 1e308},
        {"source": "paper", "path": "."},
        {"source": "jsonl", "path": "."},
    ],
)
def test_absurd_sizes_are_one_sentence_at_once(settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        load_data(from_tree({"data": settings}))
    assert one_sentence(str(caught.value))
