"""Crashes and bad surroundings: kill -9, a full disk, damaged files, NaN. Nothing already computed is lost."""

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fedweave.cli import main
from fedweave.errors import UserError
from fedweave.federation.checkpoint import load_checkpoint, round_checkpoints, save_checkpoint


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "fedweave.cli", *arguments]


def state_of(folder: Path) -> dict:
    """Everything a run computed, bit for bit, without its clock."""
    tensors, meta = load_checkpoint(round_checkpoints(folder / "checkpoints")[-1])
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "tensors": {k: v.numpy().tobytes() for k, v in tensors.items()},
        "clients": meta["clients"],
        "metrics": (folder / "metrics.jsonl").read_text(),
        "predictions": (folder / "predictions.jsonl").read_text(),
        "test": summary["test"],
    }


def kill_after(process: subprocess.Popen, folder: Path, writes: int) -> bool:
    """SIGKILL once the folder has been seen to change so many times; False where the run ended before."""

    def seen() -> set:
        found = set()
        for path in folder.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # renamed while we look
                found.add((path, path.stat().st_size))
        return found

    last = seen()
    while writes and process.poll() is None:
        now = seen()
        writes, last = writes - (now != last), now
        time.sleep(0.001)
    process.kill()  # nothing, where it has ended
    return process.wait() == -signal.SIGKILL


@pytest.mark.parametrize("seed", [1, 2])
def test_kill_at_any_moment_and_resume_is_bit_identical(tmp_path, small, seed):
    """Moments are counted in writes to the run's folder, not in seconds: a slow machine changes nothing."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    subprocess.run(command("run", "quickstart", *small, f"output={whole}", "--quiet"), check=True)
    rng = random.Random(seed)
    kills = 0
    for _ in range(3):
        verb = ["resume", str(broken)] if (broken / "config.yaml").exists() else ["run", "quickstart", *small,
                                                                                  f"output={broken}"]  # fmt: skip
        if not kill_after(subprocess.Popen(command(*verb, "--quiet")), broken, writes=rng.randint(1, 6)):
            break
        kills += 1
    assert kills > 0
    subprocess.run(command("resume", str(broken), "--quiet"), check=True)
    assert state_of(whole) == state_of(broken)


def test_a_full_disk_is_one_sentence_and_the_last_checkpoint_survives(tmp_path, small):
    """A real limit on file size stands for the full disk: the first checkpoint fits, a later one does not."""
    folder = tmp_path / "run"
    assert main(["run", "quickstart", *small, "training.rounds=1", f"output={folder}", "--quiet"]) == 0
    size = max(p.stat().st_size for p in folder.rglob("state.safetensors"))

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))

    done = subprocess.run(command("resume", str(folder), "training.rounds=3", "--quiet"), preexec_fn=limit,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 2 and "cannot be written" in done.stderr and "Traceback" not in done.stderr
    assert [p.name for p in round_checkpoints(folder / "checkpoints")] == ["round-0000", "round-0001"]
    load_checkpoint(folder / "checkpoints" / "round-0001")
    assert main(["resume", str(folder), "training.rounds=3", "--quiet"]) == 0


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path, small, capsys):
    folder = tmp_path / "run"
    assert main(["run", "quickstart", *small, f"output={folder}", "--quiet"]) == 0
    good = state_of(folder)
    newest = round_checkpoints(folder / "checkpoints")[-1] / "state.safetensors"
    newest.write_bytes(newest.read_bytes()[:100])
    assert main(["resume", str(folder)]) == 0
    assert "damaged" in capsys.readouterr().err
    assert state_of(folder) == good


def test_a_run_killed_before_its_first_checkpoint_begins_again(tmp_path, small):
    folder = tmp_path / "run"
    assert main(["run", "quickstart", *small, f"output={folder}", "--quiet"]) == 0
    good = state_of(folder)
    shutil.rmtree(folder / "checkpoints")
    assert main(["resume", str(folder), "--quiet"]) == 0
    assert state_of(folder) == good


def test_another_config_or_backbone_is_refused(tmp_path, small, model_folder, capsys):
    folder = tmp_path / "run"
    assert main(["run", "quickstart", *small, "training.rounds=1", f"output={folder}", "--quiet"]) == 0
    config = folder / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace("lr: 0.001", "lr: 0.002", 1))
    assert main(["resume", str(folder), "--quiet"]) == 2
    assert "another config" in capsys.readouterr().err
    weights = model_folder("llama") / "model.safetensors"
    config.write_text(text)
    original = weights.read_bytes()
    try:
        weights.write_bytes(original[:-8] + b"\x00" * 8)
        assert main(["resume", str(folder), "--quiet"]) == 2
        assert "another backbone" in capsys.readouterr().err
    finally:
        weights.write_bytes(original)
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace("sample/edit:0", "sample/edit:99999"))
    assert main(["resume", str(folder), "--quiet"]) == 2
    assert "data of" in capsys.readouterr().err


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
