"""Data that change while a run goes on: rows come and go, and resuming finds them as they were."""

import pytest

from fedweave.cli import main
from tests.helpers import events, read_json
from tests.runs.test_faults import state_of

CHANGES = "data.changes=['2: client_0, client_1 gain sum', '3: all lose mood']"
METHODS = ["fedit", "fedlease", "ifca", "fedrouter", "local-only", "centralised", "oracle", "fedweave"]


@pytest.mark.parametrize("method", METHODS)
def test_rows_come_and_go_under_every_method(tmp_path, small, method):
    run = tmp_path / "run"
    assert main(["run", "quickstart", *small, CHANGES, f"method={method}", f"output={run}", "--quiet"]) == 0
    first, second = events(run, "change")
    assert (first["round"], second["round"]) == (2, 3)
    assert sum(first["came"].values()) == 12 and not first["went"]
    assert not second["came"] and sum(second["went"].values()) == 12
    assert sum(second["fed"]) == 36, "sums, edits and choices are trained on"
    assert first["bytes_up"] and read_json(run / "summary.json")["communication"]["changes_up"] >= 0


def test_a_run_resumed_after_every_round_finds_the_rows_of_that_round(tmp_path, small):
    """Also the best round, which is chosen anew where the data have changed."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    begin = ["run", "quickstart", *small, CHANGES, "training.rounds=4", "method=fedit", "--quiet"]
    assert main([*begin, f"output={whole}"]) == 0
    assert main([*begin, f"output={broken}", "training.rounds=1"]) == 0
    for rounds in (2, 3, 4):
        assert main(["resume", str(broken), f"training.rounds={rounds}", "--quiet"]) == 0
    assert state_of(whole) == state_of(broken)
    assert read_json(whole / "summary.json")["validation"]["best_round"] >= 3
