"""`fedweave watch`: after a run, while one goes on, and before the first round."""

import json
import os
import threading
import time

from fedweave.cli import main
from fedweave.report.live import render, seconds_left, sparkline
from fedweave.runs.reading import read_run


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
        live={"state": "running", "phase": {}, "round_seconds": [4.0]},
    )
    assert seconds_left(run) == 8.0  # two of three rounds are left
    assert "8 s left" in render(run) and "discovery comes first" in render(run)
    assert seconds_left(record(live={"state": "finished", "round_seconds": [4.0]})) is None


def test_a_stopped_run_says_how_to_go_on(record):
    assert "fedweave resume runs/x" in render(record(live={"state": "stopped", "phase": {}, "round_seconds": []}))


def test_sparkline():
    assert sparkline([3.0, 2.0, 1.0]) == "█▅▁" and sparkline([1.0, 1.0]) == "▁▁"


def test_no_run_is_one_sentence(tmp_path, capsys):
    assert main(["watch", str(tmp_path)]) == 2
    assert "no run folder" in capsys.readouterr().err


def test_it_follows_a_run_that_goes_on(tmp_path, small, capsys):
    folder = tmp_path / "run"
    arguments = ["run", "quickstart", *small, "training.rounds=6", f"output={folder}", "--quiet"]
    run = threading.Thread(target=main, args=[arguments])
    run.start()
    while not (folder / "progress.json").exists() and run.is_alive():
        time.sleep(0.02)
    assert main(["watch", str(folder)]) == 0
    shown = capsys.readouterr().out
    run.join()
    assert "running" in shown and shown.rstrip().splitlines()[-1].startswith("  test, best round")
    assert read_run(folder).state == "finished"


def test_the_page_is_written_again_until_the_run_ends(finished, monkeypatch, capsys):
    done, looks = (finished / "progress.json").read_text(), []
    (finished / "progress.json").write_text(
        json.dumps({**json.loads(done), "state": "running", "pid": os.getpid()})
    )

    def pause(seconds: float) -> None:
        looks.append((finished / "report.html").read_text())
        if len(looks) == 2:  # the run ends between two looks
            (finished / "progress.json").write_text(done)

    monkeypatch.setattr("fedweave.cli.show.time.sleep", pause)
    assert main(["report", str(finished), "--watch"]) == 0
    page = (finished / "report.html").read_text()
    assert "refreshes itself" in capsys.readouterr().err
    assert len(looks) == 2 and all('http-equiv="refresh"' in look for look in looks)
    assert 'http-equiv="refresh"' not in page and ">finished<" in page
