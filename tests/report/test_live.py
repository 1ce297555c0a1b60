"""`fedweave watch`: after a run, while one goes on, and before the first round."""

import json
import subprocess
import sys
import time

import pytest

from fedweave.cli import main
from fedweave.report.live import render, seconds_left, sparkline
from fedweave.report.records import read_run


def test_a_finished_run_is_shown_once(finished, capsys):
    assert main(["watch", str(finished)]) == 0
    shown = capsys.readouterr().out
    summary = json.loads((finished / "summary.json").read_text())
    assert "finished" in shown and "round 3 of 3" in shown
    assert f"loss {summary['test']['best']['loss']['sparse']['macro']:.3f}" in shown
    assert "expert 0" in shown and "Mood" in shown


def test_time_left_is_the_pace_of_recent_rounds(record):
    run = record(
        events=[{"event": "round", "round": 1, "train_loss": 1.0}],
        progress={"state": "running", "round_seconds": [4.0]},
    )
    assert seconds_left(run) == 8.0  # two of three rounds are left
    assert "8 s left" in render(run) and "discovery comes first" in render(run)
    assert seconds_left(record(progress={"state": "finished", "round_seconds": [4.0]})) is None


def test_a_stopped_run_says_how_to_go_on(record):
    assert "fedweave resume runs/x" in render(record(progress={"state": "stopped"}))


def test_sparkline():
    assert sparkline([3.0, 2.0, 1.0]) == "█▅▁" and sparkline([1.0, 1.0]) == "▁▁"


def test_no_run_is_one_sentence(tmp_path, capsys):
    assert main(["watch", str(tmp_path)]) == 2
    assert "no run folder" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["watch", "report"])
def test_it_follows_a_run_that_goes_on(tmp_path, small, verb):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "fedweave.cli"]
    run = subprocess.Popen(
        [*command, "run", "quickstart", *small, "training.rounds=12", f"output={folder}", "--quiet"]
    )
    try:
        while not (folder / "progress.json").exists():
            assert run.poll() is None
            time.sleep(0.05)
        arguments = [str(folder), "--watch"] if verb == "report" else [str(folder)]
        seen = subprocess.run([*command, verb, *arguments], capture_output=True, text=True, timeout=120)
    finally:
        assert run.wait(timeout=120) == 0
    assert seen.returncode == 0, seen.stderr
    if verb == "watch":
        assert "running" in seen.stdout and seen.stdout.rstrip().splitlines()[-1].startswith("  test, best round")
        assert read_run(folder).state == "finished"
    else:
        page = (folder / "report.html").read_text()
        assert "refreshes itself" in seen.stderr and 'http-equiv="refresh"' not in page and ">finished<" in page
