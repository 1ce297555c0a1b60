"""The quickstart as a new user runs it, with the real 135M model. Minutes, and a network or a warm cache."""

import json
import os
import subprocess
import sys
import time

import pytest


@pytest.mark.slow
def test_quickstart_specialises_within_three_minutes(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k not in ("FEDWEAVE_CACHE", "HF_HUB_OFFLINE")}
    command = [sys.executable, "-m", "fedweave.cli", "run", "quickstart", f"output={tmp_path / 'run'}"]
    started = time.monotonic()
    subprocess.run(command, env=environment, check=True)
    assert time.monotonic() - started < 180
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    test = summary["test"]
    assert test["best"]["loss"]["sparse"]["macro"] < 0.2 * test["untouched"]["loss"]["macro"]
    dominant = [max(range(len(row)), key=row.__getitem__) for row in test["best"]["routing"].values()]
    assert len(set(dominant)) == 4 and all(max(row) > 0.8 for row in test["best"]["routing"].values())
    assert summary["audit"]["global"]["purity"] > 0.9
