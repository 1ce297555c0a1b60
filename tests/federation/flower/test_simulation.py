"""`engine=flower`: the simulated clients as Flower nodes in Ray's processes."""

import pytest

from fedweave.cli import main
from fedweave.runs.folder import RunFolder
from tests.helpers import assert_trained_alike, events


@pytest.mark.slow
def test_a_flower_simulation_gives_the_in_process_model_and_resumes(tmp_path, small):
    runs = {engine: tmp_path / engine for engine in ("in-process", "flower")}
    for engine, run in runs.items():
        settings = [*small, "training.rounds=2", f"engine={engine}", f"output={run}"]
        assert main(["run", "quickstart", *settings, "--quiet"]) == 0
        assert main(["resume", str(run), "training.rounds=3", "--quiet"]) == 0
    ours, theirs = (RunFolder(run).newest(3).tensors for run in runs.values())
    for name in ("theta", "phi"):
        assert_trained_alike(ours[name], theirs[name])


@pytest.mark.slow
def test_clients_whose_rows_change_keep_their_buckets_whichever_process_asks_them(tmp_path, small):
    """Ray's processes share nothing, and a resumed simulation has new ones."""
    changing = [
        "living.notice=open", "living.least=8", "data.train=40", "data.clients=4", "discovery.warmup_steps=6",
        "discovery.warmup_lr=1e-2",
        "data.changes=['2: client_0, client_1 gain sum', '3: all lose mood', '4: client_2 gains 50% of choice']",
    ]  # fmt: skip
    runs = {engine: tmp_path / engine for engine in ("in-process", "flower")}
    for engine, run in runs.items():
        settings = [*small, *changing, "training.rounds=3", f"engine={engine}", f"output={run}"]
        assert main(["run", "quickstart", *settings, "--quiet"]) == 0
        assert main(["resume", str(run), "training.rounds=4", "--quiet"]) == 0
    changes = {engine: events(run, "change") for engine, run in runs.items()}
    assert changes["flower"][0]["opened"]
    for ours, theirs in zip(*changes.values(), strict=True):
        assert all(ours[name] == theirs[name] for name in ("round", "came", "went", "opened", "fed"))
    assert all(
        len(event["participants"]) == 4 == len(event["bytes_up"]) for event in events(runs["flower"], "round")
    )
    ours, theirs = (RunFolder(run).newest(4).tensors for run in runs.values())
    for name in ("theta", "phi"):
        assert_trained_alike(ours[name], theirs[name])
