"""A SuperLink and three sites as processes on loopback, with TLS and node keys; some are really killed."""

import json
import subprocess

import pytest
import torch

from fedweave.cli import main
from fedweave.federation.checkpoint import load_checkpoint, round_checkpoints
from tests.federation.flower.processes import SITES, SMALL, Deployment, events, wait_for


@pytest.fixture(scope="module")
def deployment(tmp_path_factory, model_folder):
    """A SuperLink with three registered sites, all running."""
    made = Deployment(tmp_path_factory.mktemp("federation"), model_folder("llama"))
    made.superlink()
    made.register()
    for name in SITES:
        made.site(name)
    yield made
    made.stop()


def state(run):
    return load_checkpoint(round_checkpoints(run / "checkpoints")[-1])[0]


def in_process(deployment, tmp_path, rounds):
    """The same federation in one process."""
    run = tmp_path / "one-process"
    settings = [*SMALL, f"backbone.model={deployment.model}", "data.source=jsonl", f"data.path={deployment.data}"]
    assert main(["run", "quickstart", *settings, f"training.rounds={rounds}", f"output={run}", "--quiet"]) == 0
    return run


def assert_same(run, other):
    ours, theirs = state(run), state(other)
    for name in ("theta", "phi"):
        assert (ours[name] - theirs[name]).abs().max() <= 2e-5
        assert torch.isfinite(ours[name]).all()


@pytest.fixture(scope="module")
def federated(deployment):
    """A finished run of one round. Meanwhile a site with an unregistered key tries to join."""
    run = deployment.folder / "run"
    process = deployment.federate(
        "federate", "quickstart", *SMALL, "federation.sites=3", "training.rounds=1", f"output={run}",
        f"backbone.model={deployment.model}", f"federation.test={deployment.data / 'test.jsonl'}",
    )  # fmt: skip
    stranger = deployment.keys / "stranger"
    stranger.mkdir()
    (stranger / "ca.crt").write_bytes((deployment.keys / "north" / "ca.crt").read_bytes())
    command = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(stranger / "site.key")]
    subprocess.run(command, check=True)
    deployment.describe("stranger", deployment.data / "north.jsonl")
    deployment.site("stranger")
    deployment.finish(process, "federate", 240)
    return run


def test_a_deployment_gives_the_in_process_model(deployment, federated, tmp_path):
    other = in_process(deployment, tmp_path, 1)
    assert_same(federated, other)
    ours, theirs = (json.loads((run / "summary.json").read_text()) for run in (federated, other))
    assert ours["clients"] == 3 and ours["examples"] == theirs["examples"] and ours["rounds"] == 1
    assert ours["test"]["best"]["loss"]["soft"] == pytest.approx(theirs["test"]["best"]["loss"]["soft"], abs=1e-4)
    assert ours["validation"]["best_loss"] == pytest.approx(theirs["validation"]["best_loss"], abs=1e-4)
    assert set(events(federated, "validation")[0]["sites"]) == set(SITES)
    assert main(["generate", str(federated), "How many?", "--max-new-tokens", "2"]) == 0


def test_an_unregistered_site_is_turned_away(deployment, federated):
    assert deployment.processes["stranger"].wait(60) == 2
    assert "its key is not registered" in deployment.log("stranger")
    assert "stranger" not in deployment.log("federate")


def test_a_site_killed_in_a_round_is_missed_and_the_run_ends_well(deployment, federated):
    """kill -9 between two questions: the round ends at its deadline without the site, the next does not wait."""
    process = deployment.federate("killed", "--resume", federated, "training.rounds=3", "federation.deadline=8")
    wait_for(lambda: "resuming after round 1" in deployment.log("killed"), 120, "the resumed run")
    deployment.kill("west")
    deployment.finish(process, "killed", 240)
    log, rounds = deployment.log("killed"), events(federated, "round")
    assert [event["round"] for event in rounds] == [1, 2, 3]
    assert "site west did not answer within 8 s" in log, log
    assert [len(event["participants"]) for event in rounds] == [3, 3, 2] and len(rounds[1]["bytes_up"]) == 2
    assert set(events(federated, "validation")[-1]["sites"]) == {"north", "south"}
    assert torch.isfinite(state(federated)["theta"]).all()


@pytest.mark.slow
def test_server_and_superlink_killed_and_resumed_give_the_whole_runs_model(tmp_path, model_folder):
    """kill -9 of `fedweave federate`, then of the SuperLink, each in the middle of training."""
    made = Deployment(tmp_path, model_folder("llama"))
    try:
        made.superlink()
        made.register()
        for name in SITES:
            made.site(name)
        run = made.folder / "run"
        made.federate(
            "first", "quickstart", *SMALL, "federation.sites=3", "training.rounds=6", f"output={run}",
            f"backbone.model={made.model}", "federation.min_answers=3", "federation.repeats=5",
            "federation.deadline=60",
        )  # fmt: skip
        wait_for(lambda: events(run, "round"), 240, "round 1")
        made.kill("first")
        second = made.federate("second", "--resume", run)
        wait_for(lambda: len(events(run, "round")) >= 3, 240, "round 3")
        made.kill("superlink")
        assert second.wait(120) == 2 and "--resume" in made.log("second"), made.log("second")
        made.superlink()
        made.finish(made.federate("third", "--resume", run), "third", 400)
        assert "resuming after round" in made.log("third")
        assert [event["round"] for event in events(run, "round")] == [1, 2, 3, 4, 5, 6]
        assert_same(run, in_process(made, tmp_path, 6))
    finally:
        made.stop()


@pytest.mark.slow
def test_a_killed_site_comes_back(tmp_path, model_folder):
    made = Deployment(tmp_path, model_folder("llama"))
    try:
        made.superlink()
        made.register()
        for name in SITES:
            made.site(name)
        run = made.folder / "run"
        process = made.federate(
            "federate", "quickstart", *SMALL, "federation.sites=3", "training.rounds=12", f"output={run}",
            f"backbone.model={made.model}", "federation.deadline=10",
        )  # fmt: skip
        wait_for(lambda: events(run, "round"), 240, "round 1")
        made.kill("west")
        wait_for(lambda: "west did not answer" in made.log("federate"), 120, "the missed answer")
        made.site("west")
        made.finish(process, "federate", 600)
        rounds = events(run, "round")
        assert "west" in rounds[0]["participants"] and "west" in rounds[-1]["participants"], made.log("federate")
        assert any("west" not in event["participants"] for event in rounds)
        assert "site west is here" in made.log("federate")
    finally:
        made.stop()


@pytest.mark.slow
def test_a_late_site_joins_a_running_federation_and_a_second_one_of_its_name_does_not(tmp_path, model_folder):
    made = Deployment(tmp_path, model_folder("llama"))
    try:
        made.superlink()
        made.register()
        made.site("north")
        made.site("south")
        run = made.folder / "run"
        process = made.federate(
            "federate", "quickstart", *SMALL, "federation.sites=2", "training.rounds=8", f"output={run}",
            f"backbone.model={made.model}", "federation.join_distance=2.0", "federation.deadline=60",
        )  # fmt: skip
        wait_for(lambda: events(run, "round"), 240, "round 1")
        made.site("west")
        made.finish(process, "federate", 400)
        assert "site west joins with" in made.log("federate")
        assert "west" in events(run, "round")[-1]["participants"]
        made.describe("west", made.data / "west.jsonl", name="north")  # west poses as north
        made.kill("west")
        made.site("west")
        more = made.federate("more", "--resume", run, "training.rounds=10")
        made.finish(more, "more", 400)
        assert "site north is turned away: another node has this name" in made.log("more")
    finally:
        made.stop()
