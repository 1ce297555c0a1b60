"""The quickstart as a new user runs it, with the real 135M model. Minutes, and a network or a warm cache."""

import resource
import subprocess

import pytest

from tests.helpers import command, read_json, users_environment


@pytest.mark.slow
def test_quickstart_specialises_within_three_minutes(tmp_path):
    """Three minutes of two cores, counted in the time that they spend on it: others may keep them busy, too."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = command("run", "quickstart", f"output={tmp_path / 'run'}")
    subprocess.run(run, env=users_environment(), check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2 * 180
    summary = read_json(tmp_path / "run" / "summary.json")
    test = summary["test"]
    assert test["best"]["loss"]["sparse"]["macro"] < 0.2 * test["untouched"]["loss"]["macro"]
    dominant = [max(range(len(row)), key=row.__getitem__) for row in test["best"]["routing"].values()]
    assert len(set(dominant)) == 4 and all(max(row) > 0.8 for row in test["best"]["routing"].values())
    assert summary["audit"]["global"]["purity"] > 0.9
