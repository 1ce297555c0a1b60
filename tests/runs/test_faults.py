"""Crashes and bad surroundings: kill -9, a full disk, damaged files, NaN. Nothing already computed is lost."""

import os
import random
import resource
import shutil
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedweave.cli import main
from fedweave.config import Config
from fedweave.errors import UserError
from fedweave.experts.layout import AdapterLayout
from fedweave.federation.checkpoint import Writing, round_checkpoints, save_checkpoint
from fedweave.federation.state import ServerState
from fedweave.runs import folder
from fedweave.runs.folder import Progress, RunFolder
from tests.helpers import forked, read_json, wait_for


def state_of(folder: Path) -> dict:
    """Everything a run computed, bit for bit, without its clock."""
    newest = RunFolder(folder).newest()
    return {
        "tensors": {k: v.numpy().tobytes() for k, v in newest.tensors.items()},
        "clients": newest.meta["clients"],
        "metrics": (folder / "metrics.jsonl").read_text(),
        "predictions": (folder / "predictions.jsonl").read_text(),
        "test": read_json(folder / "summary.json")["test"],
    }


def killed_at(moment: int, folder: Path, *command: str) -> int:
    """The command, killed when it touches (opens, renames, removes) a file of the folder for the so-manieth time;
    if that never comes, it prints how often it did. progress.json does not count: a clock decides how often it is
    written."""
    touched = 0

    def look(event: str, given: tuple) -> None:
        nonlocal touched
        path = str(given[0]) if given and event.startswith(("open", "os.", "shutil.")) else ""
        if path.startswith(str(folder)) and "progress.json" not in path:
            touched += 1
            if touched == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)
    code = main(command)
    print(touched)
    return code


@pytest.mark.parametrize("seed", [1, 2])
def test_kill_at_any_moment_and_resume_is_bit_identical(tmp_path, small, tiny_run, seed):
    """Moments are counted in what happens to the run's files, not in seconds: a slow machine changes nothing."""
    broken, log = tmp_path / "broken", tmp_path / "log"
    begin = ["run", "quickstart", *small, f"output={broken}", "--quiet"]
    assert forked(killed_at, 0, broken, *begin, log=log) == 0
    moments, rng, ends = int(log.read_text().split()[-1]), random.Random(seed), []
    shutil.rmtree(broken)
    for _ in range(4):
        go_on = ["resume", str(broken), "--quiet"] if (broken / "config.yaml").exists() else begin
        ends.append(forked(killed_at, rng.randint(1, moments), broken, *go_on, log=log))
    assert ends[0] == -signal.SIGKILL and set(ends) <= {0, -signal.SIGKILL}  # the rest may take fewer moments
    assert main(["resume", str(broken), "--quiet"]) == 0
    assert state_of(tiny_run()) == state_of(broken)


def test_a_checkpoint_is_written_while_the_next_round_trains_as_of_its_own(tmp_path, small, tiny_run, monkeypatch):
    """Each waits for the next round's event, which comes before that round's own checkpoint is begun."""
    output, real = tmp_path / "run", folder.save_checkpoint
    metrics = output / "metrics.jsonl"

    def late(place, name, tensors, meta):
        if meta["completed"] < 3:
            event = f'"event": "round", "round": {meta["completed"] + 1},'
            wait_for(lambda: event in metrics.read_text(), "the next round")
        assert max(round_checkpoints(place), default=-1) == meta["completed"] - 1
        return real(place, name, tensors, meta)

    monkeypatch.setattr(folder, "save_checkpoint", late)
    assert main(["run", "quickstart", *small, f"output={output}", "--quiet"]) == 0
    assert state_of(output) == state_of(tiny_run())
    for one, other in zip(RunFolder(output).snapshots(), RunFolder(tiny_run()).snapshots(), strict=True):
        assert one.meta | {"seconds": 0} == other.meta | {"seconds": 0}
        assert all(torch.equal(one.tensors[name], x) for name, x in other.tensors.items())


@pytest.mark.parametrize("travels", [False, True])
def test_sites_go_on_once_the_checkpoint_is_on_the_disk(tmp_path, monkeypatch, travels):
    """They remember one round back, and the server must not forget two."""
    written, go = [], threading.Event()
    layers = {"layer": SimpleNamespace(in_features=8, out_features=8)}
    layout = AdapterLayout.of(layers, 2, 2)
    state = ServerState(layout, None, torch.zeros(layout.size), None, [0.5, 0.5])
    engine = SimpleNamespace(travels=travels, members=[], answered={"a": {"train": 1}}, memories=dict)
    context = SimpleNamespace(engine=engine, config=Config(), backbone=SimpleNamespace(fingerprint="b"))
    run = RunFolder(tmp_path)
    run.metrics.touch()

    def save(place, name, tensors, meta):
        assert travels or go.wait(60)
        written.append((meta["answered"], tensors["theta"].sum().item()))

    monkeypatch.setattr(folder, "save_checkpoint", save)
    run.save(context, Progress(state, 1, state, 1, 0.5, 1.0))
    assert len(written) == travels
    engine.answered["a"]["train"] = 2
    state.theta.add_(1)
    go.set()
    run.writing.finish()
    assert written == [({"a": {"train": 1}}, 0.0)]


def test_one_checkpoint_at_a_time_and_a_failure_is_raised_by_whoever_waits():
    order, go, writing = [], threading.Event(), Writing()

    def fail():
        raise UserError("the disk is full")

    writing.begin(lambda: (go.wait(60), order.append("first")))
    order.append("training")
    go.set()
    writing.begin(lambda: order.append("second"))
    writing.begin(fail)
    assert order == ["training", "first", "second"]
    with pytest.raises(UserError, match="the disk is full"):
        writing.begin(lambda: order.append("third"))
    writing.finish()
    assert len(order) == 3


def with_files_below(size: int, *command: str) -> int:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    return main(command)


def test_a_full_disk_is_one_sentence_and_the_last_checkpoint_survives(tmp_path, tiny_copy):
    """A real limit on file size stands for the full disk: the first checkpoint fits, a later one does not."""
    folder = tiny_copy("training.rounds=1")
    size, log = max(p.stat().st_size for p in folder.rglob("state.safetensors")), tmp_path / "log"
    more = ["resume", str(folder), "training.rounds=3", "--quiet"]
    assert forked(with_files_below, size // 2, *more, log=log) == 2
    assert "cannot be written" in log.read_text() and "Traceback" not in log.read_text()
    assert list(round_checkpoints(folder / "checkpoints")) == [0, 1]
    assert RunFolder(folder).newest().meta["completed"] == 1
    assert main(more) == 0


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 1
    path.write_bytes(bytes(content))


DAMAGES = {
    "flipped": flip_a_bit,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:100]),
    "empty": lambda path: path.write_bytes(b""),
    "missing": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", ["state.safetensors", "meta.json"])
def test_a_damaged_checkpoint_is_a_sentence_and_a_choice(tiny_run, tiny_copy, complains, tmp_path, file, damage):
    folder = tiny_copy()
    DAMAGES[damage](round_checkpoints(folder / "checkpoints")[3] / file)
    for verb in (
        ["resume", folder],
        ["evaluate", folder],
        ["generate", folder, "Hi"],
        ["export", folder, tmp_path / "b"],
    ):
        said = complains(*verb)
        assert "round-0003 is damaged" in said and f"fedweave resume {folder} --checkpoint 2" in said
    assert main(["generate", str(folder), "Hi", "--checkpoint", "2"]) == 0
    assert main(["resume", str(folder), "--checkpoint", "2", "--quiet"]) == 0
    assert state_of(folder) == state_of(tiny_run())


def test_going_back_to_a_round_of_ones_choice(tiny_run, tiny_copy, complains, tmp_path):
    folder = tiny_copy()
    assert "no checkpoint of round 1; there is: 0, 2, 3" in complains("resume", folder, "--checkpoint", 1)
    assert main(["export", str(folder), str(tmp_path / "bundle"), "--checkpoint", "2", "--last"]) == 0
    assert read_json(tmp_path / "bundle" / "fedweave.json")["round"] == 2
    assert "| task | score" not in (tmp_path / "bundle" / "README.md").read_text()  # those are of round 3
    assert main(["resume", str(folder), "--checkpoint", "0", "--quiet"]) == 0
    assert state_of(folder) == state_of(tiny_run())


def test_a_damaged_log_is_noticed_and_what_can_be_written_again_is(tiny_run, tiny_copy, complains):
    folder = tiny_copy()
    for name in ("discovery.json", "embedding.json", "summary.json", "predictions.jsonl"):
        (folder / name).write_bytes(b"{")
    assert main(["resume", str(folder), "--quiet"]) == 0
    assert state_of(folder) == state_of(tiny_run())
    assert (folder / "discovery.json").read_bytes() == (tiny_run() / "discovery.json").read_bytes()
    for damage in DAMAGES.values():
        shutil.copy(tiny_run() / "metrics.jsonl", folder)
        damage(folder / "metrics.jsonl")
        assert "metrics.jsonl is damaged" in complains("resume", folder)


def interrupted_at(event: str, sent: signal.Signals, folder: Path, *command: str) -> int:
    """The command, which gets a signal when it logs its first event of this kind."""
    log = folder / "metrics.jsonl"

    def look(name: str, given: tuple) -> None:
        if name == "os.mkdir" and log.is_file() and f'"event": "{event}"' in log.read_text():
            os.kill(os.getpid(), sent)

    sys.addaudithook(look)
    return main(command)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_names_the_command_that_continues(tmp_path, small, tiny_run, sent):
    folder, log = tmp_path / "a run", tmp_path / "log"
    begin = ["run", "quickstart", *small, f"output={folder}", "--quiet"]
    assert forked(interrupted_at, "round", sent, folder, *begin, log=log) == 130
    said = f"fedweave: interrupted; `fedweave resume '{folder}'` goes on from the last checkpoint.\n"
    assert log.read_text() == said and not (folder / "lock").exists()
    assert main(["resume", str(folder), "--quiet"]) == 0
    assert state_of(folder) == state_of(tiny_run())


def test_a_run_killed_before_its_first_checkpoint_begins_again(tiny_run, tiny_copy):
    folder = tiny_copy()
    shutil.rmtree(folder / "checkpoints")
    assert main(["resume", str(folder), "--quiet"]) == 0
    assert state_of(folder) == state_of(tiny_run())


def test_another_config_or_backbone_is_refused(tiny_copy, model_folder, complains):
    folder = tiny_copy("training.rounds=1")
    config = folder / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace("lr: 0.001", "lr: 0.002", 1))
    assert "another config" in complains("resume", folder, "--quiet")
    weights = model_folder("llama") / "model.safetensors"
    config.write_text(text)
    original = weights.read_bytes()
    try:
        weights.write_bytes(original[:-8] + b"\x00" * 8)
        assert "another backbone" in complains("resume", folder, "--quiet")
    finally:
        weights.write_bytes(original)
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace("sample/edit:0", "sample/edit:99999"))
    assert "manifest.json is damaged" in complains("resume", folder, "--quiet")


def test_a_nan_update_stops_with_a_sentence_and_keeps_the_checkpoint(tmp_path, small, capsys):
    folder = tmp_path / "run"
    wild = [*small, "training.lr=1e30", "training.clip=1e30", "discovery.warmup_steps=1"]
    assert main(["run", "quickstart", *wild, f"output={folder}", "--quiet"]) == 2
    assert "NaN or infinity" in capsys.readouterr().err
    assert not list((folder / "checkpoints").glob(".*")) if (folder / "checkpoints").exists() else True


def test_saving_fails_cleanly_when_the_folder_cannot_be_written(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("a file where a folder should be")
    with pytest.raises(UserError, match="last good one is intact"):
        save_checkpoint(blocked, "round-0001", {"x": torch.ones(2)}, {})
    assert os.listdir(tmp_path) == ["file"]
