"""`engine=flower`: the simulated clients as Flower nodes in Ray's processes."""

import pytest

from fedweave.cli import main
from fedweave.runs.folder import RunFolder
from tests.helpers import assert_trained_alike


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
