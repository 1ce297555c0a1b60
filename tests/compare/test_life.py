"""`fedweave compare drift`: every cell finishes, and what happened in them is a table."""

import pytest

from fedweave.compare.grid import cells, load_comparison


def test_the_cells_of_the_study(tmp_path):
    grid = cells(load_comparison("drift", ["seed=42"], None), tmp_path)
    asked = {(c.config.data.name, c.config.method, c.config.living.notice) for c in grid}
    told = {(name, method, "off") for name in ("drift", "control") for method in ("fedweave", "ifca", "oracle")}
    assert asked == told | {
        ("drift", "fedweave", "open"),
        ("control", "fedweave", "open"),
        ("restart", "fedweave", "off"),
    }


@pytest.mark.slow
def test_the_study_on_a_tiny_model(tmp_path, small, says):
    quick = [*small, "data.train=40", "data.clients=6", "discovery.warmup_steps=6", "discovery.warmup_lr=1e-2"]
    quick += ["training.rounds=6", "training.local_steps=2", "living.least=8", "seed=42"]
    table = says("compare", "drift", *quick, "--output", tmp_path / "drift")
    rows = [line for line in table.splitlines() if line.startswith("| drift") or line.startswith("| control")]
    assert "rounds until noticed" in table and len(rows) >= 7
