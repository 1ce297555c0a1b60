"""`fedweave compare attacks`: its cells, and what the table makes of them."""

from types import SimpleNamespace

import pytest

from fedweave.compare.grid import cells, load_comparison
from fedweave.compare.hostile import attack_table
from fedweave.config import load_config


def test_the_cells_of_the_study(tmp_path):
    grid = cells(load_comparison("attacks", ["seed=42", "data.path=."], None), tmp_path)
    honest = [c.config.federation.rule for c in grid if c.config.attack.kind == "none"]
    few = {
        c.config.federation.rule for c in grid if c.config.attack.kind != "none" and c.config.attack.clients == 0.05
    }
    many = {c.config.federation.rule for c in grid if c.config.attack.clients == 0.3}
    assert len(honest) == len(many) == 6 and few == {"clip"} and len(grid) == 51
    assert {c.config.federation.max_share for c in grid if c.config.federation.rule == "agreement"} == {0.2}


def finished(kind: str, clients: float, rule: str, seed: int, **losses: float):
    config = load_config(
        "quickstart", [f"attack.kind={kind}", f"attack.clients={clients}", f"federation.rule={rule}"]
    )
    macro = sum(losses.values()) / len(losses)
    last = {"used": "sparse", "loss": {"sparse": {**losses, "macro": macro}}}
    return SimpleNamespace(config=config), {"seed": seed, "test": {"last": last}}


def test_an_attack_is_held_against_honest_clients_of_the_same_seed():
    table = attack_table([
        finished("none", 0.0, "median", 1, sum=1.0, mood=1.1),
        finished("none", 0.0, "mean", 1, sum=1.0, mood=1.0),
        finished("none", 0.0, "mean", 2, sum=2.0, mood=2.0),
        finished("flip", 0.3, "mean", 1, sum=1.0, mood=3.0),
        finished("flip", 0.3, "mean", 2, sum=2.0, mood=6.0),
        finished("flip", 0.3, "median", 3, sum=1.0, mood=1.0),
    ])  # fmt: skip
    assert "| attack | clients | mean | median |" in table
    assert "| none | 0% | +0.0% (sum +0.0%) | +5.0% (mood +10.0%) |" in table
    assert "| flip | 30% | +100.0% (mood +200.0%) | – |" in table


def test_without_attacks_there_is_no_such_table():
    assert attack_table([finished("none", 0.0, "mean", 1, sum=1.0)]) == ""


@pytest.mark.slow
def test_the_study_on_a_tiny_model(tmp_path, small, says):
    quick = [*small, "data.source=sample", "data.clients=5", "training.rounds=1", "seed=42", "attack.clients=0.3"]
    table = says("compare", "attacks", *quick, "data.distinct=true", "--output", tmp_path / "attacks")
    assert sum(line.startswith("| ") and "30%" in line for line in table.splitlines()) == 5
