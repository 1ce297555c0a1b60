"""Crashes and bad surroundings: kill -9, a full disk, damaged files, NaN. Nothing already computed is lost."""

import os
import random
import resource
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch

from fedweave.cli import main
from fedweave.errors import UserError
from fedweave.federation.checkpoint import load_checkpoint, round_checkpoints, save_checkpoint
from tests.helpers import forked, read_json


def state_of(folder: Path) -> dict:
    """Everything a run computed, bit for bit, without its clock."""
    tensors, meta = load_checkpoint(round_checkpoints(folder / "checkpoints")[-1])
    return {
        "tensors": {k: v.numpy().tobytes() for k, v in tensors.items()},
        "clients": meta["clients"],
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
    assert [p.name for p in round_checkpoints(folder / "checkpoints")] == ["round-0000", "round-0001"]
    load_checkpoint(folder / "checkpoints" / "round-0001")
    assert main(more) == 0


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tiny_run, tiny_copy, capsys):
    folder = tiny_copy()
    newest = round_checkpoints(folder / "checkpoints")[-1] / "state.safetensors"
    newest.write_bytes(newest.read_bytes()[:100])
    assert main(["resume", str(folder)]) == 0
    assert "damaged" in capsys.readouterr().err
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
    assert "data of" in complains("resume", folder, "--quiet")


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
