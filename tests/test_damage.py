"""Damaged runs, bundles, models and site files, and settings out of type and range: every verb ends well or in one
sentence.

Each case follows from its number, so that a failure can be had again; FEDWEAVE_DAMAGES=3000 tries more of them.
"""

import contextlib
import io
import itertools
import json
import os
import random
import shutil
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from fedweave.cli import main
from fedweave.config import Config, from_tree, load_config
from fedweave.errors import UserError
from fedweave.settings import describe, insert, to_tree
from tests.helpers import SMALL, write_jsonl

TRIALS = int(os.environ.get("FEDWEAVE_DAMAGES", "40"))
LONGEST = 120  # seconds until a command is taken to hang


# -------------------------------------------------------------------------------------- what can happen to a file


def flipped(data: bytes, dice: random.Random) -> bytes:
    spoilt = bytearray(data)
    for _ in range(dice.choice([1, 1, 8])):
        spoilt[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    return bytes(spoilt)


ODD = [None, -1, 99999, 1e300, True, "", "x", "$", [], {}, [[]], {"a": None}, 2**70]


def changed_value(data: bytes, dice: random.Random) -> bytes:
    """Somewhere in a line of JSON another value, and no checksum that would tell; elsewhere another word."""
    lines = data.splitlines()
    single = len(lines) == 0 or not lines[0].strip().endswith(b"}")  # not one object a line
    parts = [data] if single else lines
    at = dice.randrange(len(parts))
    try:
        tree = json.loads(parts[at])
    except ValueError:
        return data.replace(dice.choice(data.split() or [b"x"]), json.dumps(dice.choice(ODD)).encode())
    tree.pop("checksum", None)
    inner, path = tree, []
    while isinstance(inner, dict | list) and inner and (not path or dice.random() < 0.8):
        path.append((inner, dice.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))))
        inner = path[-1][0][path[-1][1]]
    if path:
        holder, key = path[-1]
        holder[key] = dice.choice(ODD)
    parts[at] = json.dumps(tree).encode()
    return parts[0] if single else b"\n".join(parts) + b"\n"


BYTES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "empty": lambda data, dice: b"",
    "cut": lambda data, dice: data[: dice.randrange(len(data) + 1)],
    "junk": lambda data, dice: dice.randbytes(200),
    "flipped": flipped,
    "changed": changed_value,
    "list": lambda data, dice: b"[]",
    "object": lambda data, dice: b"{}",
    "other": lambda data, dice: dice.choice([b"null", b"3", b'"text"', b"[1, 2]", b'{"a": 1}', b"NaN"]),
    "deep": lambda data, dice: b"[" * 100_000,
    "zeros": lambda data, dice: bytes(len(data)),
    "doubled": lambda data, dice: data + data,
}
DAMAGES = [*BYTES, "flipped", "changed", "missing", "folder", "unreadable"]


def spoil(path: Path, damage: str, dice: random.Random) -> None:
    if damage == "missing":
        path.unlink()
    elif damage == "folder":
        path.unlink()
        path.mkdir()
    elif damage == "unreadable":
        path.chmod(0)  # which root does not mind
    else:
        path.write_bytes(BYTES[damage](path.read_bytes() or b"x", dice))


def outcome(*argv: object) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of a command of this process, which must not hang."""

    def give_up(number: int, frame: object) -> None:
        raise AssertionError(f"{argv} hangs")

    out, err = io.StringIO(), io.StringIO()
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(LONGEST)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([str(part) for part in argv])
    except SystemExit as end:  # argparse explains itself
        code = int(end.code or 0)
    finally:
        signal.alarm(0)
    return code, out.getvalue(), err.getvalue()


def place_of(error: Exception) -> str:
    """An error and the lines of our own that it came through, on one line."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "fedweave" in f.filename]
    return f"{error!r:.300} {[f'{Path(f.filename).name}:{f.lineno}' for f in frames[-3:]]}"


def assert_one_sentence(*argv: object) -> str:
    """Success, or a last line that says what is wrong; returns it."""
    code, _, err = outcome(*argv)
    assert code in (0, 1, 2), (argv, code)
    last = err.splitlines()[-1] if err else ""
    if code == 2:
        assert last.startswith(("fedweave: ", "fedweave ")) and last.isprintable() and len(last) < 1500, (argv, err)
    return last if code == 2 else ""


# -------------------------------------------------------------------------------------- runs, bundles, models


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tiny_run, exported, model_folder) -> dict[str, Path]:
    """One of each that is in order, to be copied and spoilt."""
    place = tmp_path_factory.mktemp("whole")
    run = shutil.copytree(tiny_run(), place / "run")
    assert outcome("diagnose", run, "--quiet")[0] == 0
    bundle, model = (
        shutil.copytree(exported, place / "bundle"),
        shutil.copytree(model_folder("llama"), place / "model"),
    )
    site = place / "site"
    site.mkdir()
    rows = [{"prompt": f"How many are {n} and {n}?", "response": str(2 * n)} for n in range(20)]
    write_jsonl(site / "rows.jsonl", rows)
    text = (
        f"name: north\ndata: rows.jsonl\nbackbone: {{model: {model}, device: cpu}}\nsuperlink: {{insecure: true}}\n"
    )
    (site / "site.yaml").write_text(text)
    settings = "".join(
        f"{key}\n" for key in [f"backbone: {{model: {model}, device: cpu, max_length: 128}}", "seed: 1"]
    )
    (site / "recipe.yaml").write_text(settings)
    return {"run": run, "bundle": bundle, "model": model, "site": site}


def verbs(kind: str, spoilt: Path, whole: dict[str, Path], place: Path) -> list[list[object]]:
    """Every command that reads such a folder."""
    rows = whole["site"] / "rows.jsonl"
    use = [
        ["generate", spoilt, "How many?", "--max-new-tokens", 2],
        ["export", spoilt, place / "merged", "--merge", 0],
        ["export", spoilt, place / "soft", "--soft", "1,0"],
        ["serve", spoilt, "--port", 0, "--max-new-tokens", 10**9],  # it ends after loading, with a sentence
    ]
    if kind == "run":
        return [
            *use,
            ["resume", spoilt, "--quiet"],
            ["resume", spoilt, "--quiet", "--checkpoint", 2],
            ["evaluate", spoilt, "--quiet"],
            ["export", spoilt, place / "bundle"],
            ["export", spoilt, place / "told", "--describe", "words"],
            ["describe", spoilt, "--quiet"],
            ["report", spoilt],
            ["watch", spoilt, "--once"],
            ["budget", spoilt],
            ["diagnose", spoilt, "--quiet"],
            ["run", "quickstart", f"output={spoilt}"],
            ["federate", "--resume", spoilt, "--insecure"],
        ]
    if kind == "bundle":
        begin = ["run", "quickstart", *SMALL, f"init={spoilt}", f"output={place / 'new'}", "training.rounds=1"]
        read = [["evaluate", spoilt, "--data", rows, "--quiet"], ["describe", spoilt, "--data", rows, "--quiet"]]
        return [*use, *read, ["push", spoilt, "a/b"], [*begin, "--quiet"]]
    model = f"backbone.model={spoilt}"
    if kind == "model":
        return [
            ["budget", spoilt],
            ["run", "quickstart", *SMALL, model, f"output={place / 'new'}", "training.rounds=1", "--quiet"],
            ["check", rows, "own", model],
            ["generate", whole["bundle"], "Hi"],
        ]
    recipe = spoilt / "recipe.yaml"
    return [
        ["site", "check", spoilt / "site.yaml", recipe, "--quiet"],
        ["config", recipe],
        ["budget", recipe],
        ["compare", recipe, *SMALL, "training.rounds=0", "method=fedit", "--output", place / "grid", "--quiet"],
        ["check", spoilt / "rows.jsonl", recipe],
        ["generate", whole["bundle"], "Hi", "--max-new-tokens", 1],
    ]


@pytest.mark.parametrize("block", range(4))
def test_a_damaged_file_is_one_sentence_for_every_verb(whole, tmp_path, block):
    cases = [
        (kind, path.relative_to(folder), damage, verb)
        for kind, folder in whole.items()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        for damage in DAMAGES
        for verb in range(len(verbs(kind, folder, whole, tmp_path)))
    ]
    random.Random(0).shuffle(cases)
    failures = []
    for number in range(block, TRIALS, 4):
        kind, file, damage, verb = cases[number % len(cases)]
        place = tmp_path / str(number)
        spoilt = shutil.copytree(whole[kind], place / kind)
        spoil(spoilt / file, damage, random.Random(number))
        try:
            assert_one_sentence(*verbs(kind, spoilt, whole, place)[verb])
        except Exception as error:
            failures.append((number, kind, str(file), damage, verb, place_of(error)))
        shutil.rmtree(place)
    assert not failures, "\n".join(map(str, failures))


# -------------------------------------------------------------------------------------- settings

KEYS = [key for key, _, _ in describe(Config)]
VALUES = [
    None, True, 0, 1, -1, 3, 0.5, -0.5, 1e-300, 1e9, 1e12, 1e30, 1e308, 2**31, 2**63, 2**64, 10**400, float("nan"),
    float("inf"), "", " ", "auto", "x", "$x_0$", "a\0b", "\udcff", "../..", "x" * 300, "1e9", "[", [], ["x"], [1],
    [None], {}, {"a": 1}, [[]], "\u202e", "a=b",
]  # fmt: skip


def test_every_key_with_every_odd_value_is_a_config_or_one_sentence():
    for key, value in itertools.product(KEYS, VALUES):
        tree: dict = {}
        insert(tree, key, value)
        try:
            from_tree(tree)
        except UserError as error:
            said = str(error)
            assert key.split(".")[-1] in said and said.isprintable() and len(said) < 1000, (key, value, said)


@pytest.mark.parametrize("block", range(2))
def test_a_run_with_an_odd_value_is_one_sentence(block, small, tmp_path, monkeypatch):
    """Those that the config allows: they end in a run or in a sentence, and soon."""
    monkeypatch.chdir(tmp_path)
    tree = to_tree(load_config("quickstart", [*small, "training.rounds=1", "evaluation.scores=false"]))
    allowed = []
    for key, value in itertools.product(KEYS, VALUES):
        alone: dict = {}
        insert(alone, key, value)
        with contextlib.suppress(UserError):
            from_tree(alone)
            allowed.append((key, value))
    random.Random(0).shuffle(allowed)
    failures = []
    for number in range(block, TRIALS // 5 if TRIALS > 100 else 4, 2):
        key, value = allowed[number % len(allowed)]
        changed = json.loads(json.dumps(tree))
        insert(changed, key, value)
        Path("odd.yaml").write_text(json.dumps(changed))
        try:
            assert_one_sentence("run", "odd.yaml", "--quiet")
        except Exception as error:
            failures.append((number, key, value, place_of(error)))
        shutil.rmtree("runs", ignore_errors=True)
    assert not failures, "\n".join(map(str, failures))


def test_what_was_found_before(whole, small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = ["run", "quickstart", *small, "--quiet"]
    for said, command in (
        ("seed must be between", [*run, f"seed={2**64}"]),
        ("experts.rank must be between", [*run, "experts.rank=1e9"]),
        ("data.train", [*run, "data.train=1e12"]),
        ("too long", [*run, f"output={'x' * 300}"]),
        ("max_new_tokens", ["generate", whole["bundle"], "Hi", "--max-new-tokens", 10**9]),
        ("--router-rate", ["diagnose", whole["run"], "--router-rate", "1e30"]),
        ("--temperature", ["generate", whole["bundle"], "Hi", "--top-p", 0.5]),
    ):
        assert said in assert_one_sentence(*command)
    odd = tmp_path / "a $x_0$ run"
    shutil.copytree(whole["run"], odd)
    assert assert_one_sentence("report", odd) == ""
    monkeypatch.setenv("RANK", "")
    assert assert_one_sentence("watch", whole["run"], "--once") == ""
    monkeypatch.setenv("RANK", "first")
    assert "RANK must be a whole number" in assert_one_sentence("watch", whole["run"], "--once")
    monkeypatch.delenv("RANK")
    monkeypatch.setenv("FEDWEAVE_OVERRIDES", "output='x")
    assert "FEDWEAVE_OVERRIDES" in assert_one_sentence(*run)


def test_advice_of_a_test_on_own_rows_is_possible(whole, tmp_path, capsys):
    """Settings that are fixed for a run or a bundle are not what `evaluate` recommends."""
    rows = [{"prompt": "How many?", "response": "many " * 400}, {"prompt": "Who?", "response": "Ada"}]
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    for folder in (whole["run"], whole["bundle"]):
        said = assert_one_sentence("evaluate", folder, "--data", file)
        assert "data.long_answers=skip" in said and "for a new run" in said
        assert assert_one_sentence("evaluate", folder, "--data", file, "data.long_answers=skip") == ""
