"""`fedweave watch`: after a run, while one goes on, and before the first round."""

import json
import os
import threading
import time

import pytest

from fedweave.cli import main
from fedweave.console import Console
from fedweave.errors import UserError
from fedweave.federation.engines.flower.tasks import Runtime
from fedweave.report.live import render, seconds_left, sparkline
from fedweave.runs import federated
from fedweave.runs.folder import RunFolder
from fedweave.runs.live import LiveProgress
from fedweave.runs.reading import read_run
from tests.helpers import read_json, wait_for


def test_a_finished_run_is_shown_once(finished, says):
    shown = says("watch", finished)
    summary = read_json(finished / "summary.json")
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


def test_a_run_whose_start_was_validated_a_moment_ago_is_shown(record):
    """The log then speaks of experts that no other file knows of yet."""
    validated = {"event": "validation", "round": 0, "loss": 2.0, "tasks": {"macro": 2.0}, "router_entropy": 0.3466,
                 "expert_load": [0.75, 0.25]}  # fmt: skip
    shown = render(record(events=[validated], live={"state": "running", "phase": {}, "round_seconds": []}))
    assert "expert 1   25%" in shown and "entropy 50%" in shown


def test_who_came_into_quarantine_is_shown(record):
    event = {"event": "round", "round": 1, "train_loss": 1.0, "quarantined": ["site-q"]}
    assert "round 1: site-q in quarantine" in render(record(events=[event]))


def test_a_stopped_run_says_how_to_go_on(record):
    assert "fedweave resume runs/x" in render(record(live={"state": "stopped", "phase": {}, "round_seconds": []}))


def test_a_stopped_federation_is_resumed_by_its_server(record):
    run = record(live={"state": "stopped", "phase": {}, "round_seconds": []}, config={"data": {"source": "sites"}})
    assert "fedweave federate --resume runs/x" in render(run)


def test_sparkline():
    assert sparkline([3.0, 2.0, 1.0]) == "█▅▁" and sparkline([1.0, 1.0]) == "▁▁"


def test_a_run_that_diverged_is_shown():
    nan, inf = float("nan"), float("inf")
    assert sparkline([3.0, nan, 2.0, inf, 1.0]) == "█×▅×▁" and sparkline([nan, nan]) == "××"


def test_a_loss_that_is_no_number_stands_in_the_table(record):
    events = [
        {"event": "validation", "round": t, "loss": x, "tasks": {"sum": x}, "router_entropy": None}
        for t, x in enumerate([2.0, 1.5, float("nan")])
    ]
    shown = render(record(events=events, manifest={"tasks": {"sum": "Sums"}}))
    assert "Sums             2.000  1.500  nan" in shown and shown.count("×") == 1


def test_a_federation_goes_on_before_any_site_is_there(config, says, tmp_path, monkeypatch):
    """Its server may load a model and wait for hours before there is anything else to see."""
    run, console = RunFolder.create(tmp_path / "run", config, {"source": "sample", "seed": 1}), Console(quiet=True)

    def look(runtime):
        console.on_progress("sites here", 1, 2)
        raise UserError(says("watch", run.path, "--once"))

    monkeypatch.setattr("fedweave.runs.live._PAUSE", 0.0)
    monkeypatch.setattr(federated, "submit", look)
    with pytest.raises(UserError, match=r"(?s)· running .*now: sites here, 1 of 2"):
        federated._execute(run, config, Runtime("here"), console, None)
    console.on_progress("of another run", 0, 1)
    shown = says("watch", run.path)
    assert "· stopped" in shown and "another run" not in shown, "this process is alive, and no longer at it"


def test_no_run_is_one_sentence(tmp_path, complains):
    assert "no run folder" in complains("watch", tmp_path)


def test_it_follows_a_run_that_goes_on(tmp_path, small, says, monkeypatch):
    """However fast the run is, it does not end before it was looked at."""
    folder, seen, finish, sleep = tmp_path / "run", threading.Event(), LiveProgress.finish, time.sleep
    monkeypatch.setattr(LiveProgress, "finish", lambda self: seen.wait(120) and finish(self))
    monkeypatch.setattr("fedweave.report.live.time.sleep", lambda _: (seen.set(), sleep(0.02)))
    run = threading.Thread(target=main, args=[["run", "quickstart", *small, f"output={folder}", "--quiet"]])
    run.start()
    wait_for(lambda: (folder / "progress.json").exists() or not run.is_alive(), "a sign of the run")
    shown = says("watch", folder)
    run.join()
    assert "running" in shown and shown.rstrip().splitlines()[-1].startswith("  test, best round")
    assert read_run(folder).state == "finished"


def test_the_page_is_written_again_until_the_run_ends(finished, monkeypatch, capsys):
    done, looks = (finished / "progress.json").read_text(), []
    going = {**json.loads(done), "state": "running", "pid": os.getpid()}
    (finished / "progress.json").write_text(json.dumps(going))

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
