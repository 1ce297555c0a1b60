"""A run that notices: back to the best state at half of the rates, and an end where that does not help."""

import math
from dataclasses import replace

import pytest
import torch

from fedweave.cli import main
from fedweave.federation.rounds import federate
from fedweave.methods import build_method
from fedweave.runs.course import BACK, BETTER, END, HALVINGS, ON, ended, follow, judge, rounds_left
from fedweave.runs.folder import Progress, RunFolder
from fedweave.runs.run import RunContext
from fedweave.training.lockstep import LaneGroup
from tests.federations import changed, make_engine
from tests.helpers import events, read_json
from tests.report.test_page import page_of
from tests.runs.test_faults import state_of

# Steps so long that every round does harm, also at an eighth of them.
HARMFUL = ["training.lr=30", "discovery.warmup_lr=1e-3", "training.patience=1", "evaluation.scores=false"]


class Recorder:
    """As much of an engine as a course needs."""

    def __init__(self):
        self.went_back = 0

    def go_back(self, private):
        self.went_back += 1


def test_any_loss_is_better_than_one_that_is_no_number():
    for before, loss, expected in ((math.nan, 9.0, True), (math.nan, math.nan, False), (1.0, math.nan, False)):
        progress = Progress(None, 1, None, 0, before, 0.0)
        assert RunContext.better(None, {"loss": loss}, progress) is expected


def verdicts(losses, patience, state, first=10.0):
    """What becomes of a run with these validation losses."""
    progress, engine, found = Progress(state, 0, state, 0, first, 0.0), Recorder(), []
    for t, loss in zip(rounds_left(progress, len(losses)), losses, strict=False):
        progress.completed = t + 1
        found.append(judge(progress, loss, loss < progress.best_loss, patience))
        follow(progress, found[-1], engine)
    assert engine.went_back == found.count(BACK)
    return found, progress


@pytest.fixture
def state(config, backbone):
    fedit = changed(config, method="fedit")
    return build_method(fedit).prepare(make_engine(fedit, backbone))


def test_a_run_that_gets_no_better_goes_back_and_a_gain_gives_it_new_patience(state):
    found, progress = verdicts([9, 9.5, 9.4, 8.5, 8.6, 8.7, 8.8, 8.9], 2, state)
    assert found == [BETTER, ON, BACK, BETTER, ON, BACK, ON, BACK]
    assert (progress.best_round, progress.best_loss, progress.state.pace) == (4, 8.5, 0.125)
    assert progress.setbacks == 2 and not ended(progress)


def test_it_ends_where_halving_has_not_helped(state):
    found, progress = verdicts([11.0] * 20, 2, state)
    assert found == [ON, BACK] * HALVINGS + [ON, END]
    assert ended(progress) and progress.state.pace == 0.5**HALVINGS
    assert list(rounds_left(progress, 100)) == []


def test_going_back_forgets_nothing_of_the_clients(state):
    """Else one in quarantine would be asked again, and one that counts nothing be believed."""
    progress = Progress(state, 1, state, 0, 1.0, 0.0)
    known = {"norms": {"experts": [1.0]}, "standing": {"a": -1.0}, "doubts": {"a": 2}, "bucket_doubts": {"b": [1]}}
    progress.state = replace(state, theta=state.theta + 1, **known)
    follow(progress, BACK, Recorder())
    assert torch.equal(progress.state.theta, state.theta) and progress.state.pace == 0.5
    assert {name: getattr(progress.state, name) for name in known} == known


def test_without_patience_nothing_happens_and_a_loss_that_is_no_number_is_no_gain(state):
    found, progress = verdicts([11.0] * 9, 0, state)
    assert found == [ON] * 9 and progress.state.pace == 1.0
    assert verdicts([float("nan")] * 2, 2, state)[0] == [ON, BACK]


def test_clients_learn_at_the_pace_that_was_broadcast(config, backbone, monkeypatch):
    """Half of all rates, on top of the schedule's."""
    seen, step = [], LaneGroup.step

    def spy(self, batch):
        seen.append([float(group["lr"]) for group in self.optimiser.param_groups])
        return step(self, batch)

    monkeypatch.setattr(LaneGroup, "step", spy)
    late = changed(config, training={"rounds": 4, "local_steps": 1, "schedule": "late"})
    engine, method = make_engine(late, backbone), build_method(late)
    progress = Progress(method.prepare(engine), 0, None, 0, 0.0, 0.0)
    progress.best, seen[:] = progress.state, []  # the warmup is over

    def after_round(state, report):
        progress.state, progress.completed = state, report.t + 1
        follow(progress, BACK if report.t in (0, 2) else ON, engine)
        return progress.state

    federate(method, engine, progress.state, range(4), after_round)
    engine.detach()
    adapters, router = zip(*seen, strict=True)
    assert adapters == pytest.approx([1e-2, 0.5e-2, 0.5e-2, 0.125e-2]) == router


def test_a_run_goes_back_says_so_and_ends_early(tmp_path, small, capsys):
    folder = tmp_path / "run"
    assert main(["run", "quickstart", *small, *HARMFUL, "training.rounds=9", f"output={folder}"]) == 0
    said, summary = capsys.readouterr().err, read_json(folder / "summary.json")
    assert "goes back to round 0, and on at 0.5 of its rates" in said and "the run ends early" in said
    assert "best of 4 rounds (it ended early): 0" in said
    setbacks = events(folder, "setback")
    assert [(e["round"], e["best_round"], e["pace"], e["ended"]) for e in setbacks] == [
        (1, 0, 0.5, False), (2, 0, 0.25, False), (3, 0, 0.125, False), (4, 0, 0.125, True)
    ]  # fmt: skip
    assert summary["rounds"] == 4 and summary["ended_early"]
    losses = {e["round"]: e["loss"] for e in events(folder, "validation")}
    assert min(losses, key=losses.get) == 0
    page = page_of(folder)
    assert "The run went back to its best state" in page and "It ended early, after round 4" in page
    assert main(["resume", str(folder), "training.rounds=20", "--quiet"]) == 0
    assert read_json(folder / "summary.json")["rounds"] == 4, "an ended run stays ended"


def test_the_state_goes_back_and_is_tested_once(tiny_run):
    """Where the last round is undone, the last state is the best one."""
    folder = tiny_run(*HARMFUL, "training.rounds=1")
    last, first = RunFolder(folder).snapshots()
    assert all(torch.equal(tensor, last.tensors[name]) for name, tensor in first.tensors.items())
    assert (first.meta["pace"], last.meta["pace"], last.meta["setbacks"]) == (1.0, 0.5, 1)
    test = read_json(folder / "summary.json")["test"]
    assert test["last"] == test["best"] and test["best"]["round"] == 0


@pytest.mark.parametrize(
    "method",
    [["method=fedweave"], ["method=fedsa-lora", "federation.update_dtype=int8", "training.participation=2"]],
    ids=["fedweave", "fedsa-lora"],
)
def test_a_run_resumed_after_every_round_is_bit_identical(tiny_run, tmp_path, small, method):
    """Also what clients keep for themselves, and what rounding has taken."""
    settings = [*method, *HARMFUL, "experts.single_rank=8"]
    folder = tmp_path / "run"
    assert main(["run", "quickstart", *small, *settings, "training.rounds=1", f"output={folder}", "--quiet"]) == 0
    for rounds in (2, 3):
        assert main(["resume", str(folder), f"training.rounds={rounds}", "--quiet"]) == 0
    assert len(events(folder, "setback")) == 3
    assert state_of(folder) == state_of(tiny_run(*settings, "training.rounds=3"))


def test_who_is_in_good_standing_is_known_after_resuming(tiny_run, tmp_path, small):
    settings, folder = ["federation.rule=agreement", "attack.kind=flip", "attack.clients=0.34"], tmp_path / "run"
    assert main(["run", "quickstart", *small, *settings, "training.rounds=1", f"output={folder}", "--quiet"]) == 0
    assert main(["resume", str(folder), "training.rounds=3", "--quiet"]) == 0
    whole = tiny_run(*settings, "training.rounds=3")
    assert state_of(folder) == state_of(whole)
    resumed, through = (RunFolder(run).snapshots()[0].meta["standing"] for run in (folder, whole))
    assert resumed and resumed == through
