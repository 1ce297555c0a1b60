"""Every cell of a comparison in one file, for documents."""

from pathlib import Path

import pytest

from fedweave.cli import main
from tests.helpers import ROOT, read_json


def test_a_record_has_every_cell_in_short_and_keeps_those_of_others(tmp_path, quick):
    record = tmp_path / "results" / "all.json"
    grid = ["compare", "quickstart", "method=fedit,ffa-lora", *quick, "seed=1", "--record", str(record), "--quiet"]
    assert main([*grid, "data.name=mine", "--output", str(tmp_path / "a")]) == 0
    assert main([*grid, "data.name=yours", "method=fedit", "--output", str(tmp_path / "b")]) == 0
    found = read_json(record)
    assert list(found["cells"]) == ["a/method-fedit", "a/method-ffa-lora", "b/run"]
    one, run = found["cells"]["a/method-fedit"], read_json(tmp_path / "a/cells/method-fedit/summary.json")
    assert (one["set"], one["method"], one["seed"]) == ("mine", "fedit", 1)
    assert one["model"] == Path(run["config"]["backbone"]["model"]).name
    assert one["test"]["best"]["loss"]["sparse"]["macro"] == pytest.approx(
        run["test"]["best"]["loss"]["sparse"]["macro"], abs=1e-5
    )
    assert one["settings"]["training.local_steps"] == 1 and one["validation"]["best_round"] in (0, 1)
    assert str(tmp_path) not in record.read_text() and found["environment"] == run["environment"]
    known = read_json(ROOT / "docs/results/h200-comparison.json")["cells"]
    assert set(next(iter(known.values()))) <= set(one)


@pytest.mark.parametrize("content", ["[1, 2]", '{"a": 1}', "spoilt"])
def test_a_record_that_is_something_else_is_not_overwritten(tmp_path, quick, complains, content):
    other = tmp_path / "other.json"
    other.write_text(content)
    grid = ["compare", "quickstart", "method=fedit", *quick, "--record", other, "--output", tmp_path / "x"]
    assert "name another file in --record" in complains(*grid, "--quiet")
    assert other.read_text() == content and not (tmp_path / "x").exists(), "it is said before anything runs"
