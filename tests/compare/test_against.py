"""`fedweave compare attacks` and `private`: their cells, and what the tables make of them."""

from types import SimpleNamespace

import pytest

from fedweave.compare.against import attack_table, private_table
from fedweave.compare.grid import cells, load_comparison
from fedweave.config import load_config


def grid(name, tmp_path):
    return cells(load_comparison(name, ["seed=42", "data.path=."], None), tmp_path)


def arms(grid, clients):
    """(rule, quarantine) of the cells with so many hostile clients, and their attacks"""
    found: dict[tuple[str, int], list[str]] = {}
    for cell in grid:
        if cell.values["attack.clients"] == clients:
            federation = cell.config.federation
            found.setdefault((federation.rule, federation.quarantine), []).append(cell.config.attack.kind)
    return found


def test_the_cells_of_the_study(tmp_path):
    study, attacks = grid("attacks", tmp_path), ["flip", "shout", "claim", "inflate", "labels", "bucket"]
    for clients in (0.05, 0.3):
        assert arms(study, clients) == {("agreement", 0): ["absent", *attacks]}
    assert set(arms(study, 0.0)) == {("agreement", 0), ("mean", 0)} and len(study) == 16
    assert {c.config.federation.max_share for c in study if c.config.federation.rule != "mean"} == {0.2}
    assert [c.config.attack.kind for c in study[:2]] == ["none"] * 2, "what a cut run needs first comes first"


def test_every_rule_in_the_longer_study(tmp_path):
    study, longer = grid("attacks", tmp_path), grid("attack-rules", tmp_path)
    assert {c.folder for c in study} <= {c.folder for c in longer} and len(longer) == 68
    unclaimed = [
        "flip",
        "shout",
        "inflate",
        "labels",
        "bucket",
    ]  # a claim is refused: whoever sends it has no cosine
    for rule in ("mean", "clip", "median", "trimmed", "krum", "agreement"):
        assert set(unclaimed) <= set(arms(longer, 0.3)[rule, 0])
        assert arms(longer, 0.0)[rule, 0] == ["none"]
    assert arms(longer, 0.3)["agreement", 2] == unclaimed
    assert set(arms(longer, 0.1)) == set(arms(longer, 0.05)) == {("clip", 0), ("agreement", 0)}


def finished(kind: str, clients: float, rule: str, seed: int, contested: str = "vote", **losses: float):
    rule, _, quarantine = rule.partition("+")
    overrides = [f"attack.kind={kind}", f"attack.clients={clients}", f"federation.rule={rule}"]
    config = load_config("quickstart", [*overrides, f"federation.quarantine={quarantine or 0}"])
    macro = sum(losses.values()) / len(losses)
    last = {"used": "sparse", "loss": {"sparse": {**losses, "macro": macro}}}
    values = {"attack.kind": kind, "attack.clients": clients, "federation.contested": contested, "seed": seed}
    return SimpleNamespace(config=config, values=values), {"seed": seed, "test": {"last": last}}


def test_an_attack_is_held_against_honest_clients_of_the_same_rule_and_seed():
    table = attack_table([
        finished("none", 0.0, "median", 1, sum=2.0, mood=2.0),
        finished("none", 0.0, "agreement", 1, sum=1.0, mood=1.0),
        finished("none", 0.0, "agreement", 2, sum=2.0, mood=2.0),
        finished("none", 0.0, "agreement+3", 1, sum=1.0, mood=1.2),
        finished("flip", 0.3, "agreement", 1, sum=1.0, mood=3.0),
        finished("flip", 0.3, "agreement", 2, sum=2.0, mood=6.0),
        finished("shout", 0.3, "agreement", 1, sum=1.0, mood=1.0),
        finished("flip", 0.3, "median", 1, sum=2.0, mood=2.2),
        finished("flip", 0.3, "agreement+3", 1, sum=1.0, mood=1.2),
        finished("flip", 0.3, "median", 3, sum=9.0, mood=9.0),
        finished("labels", 0.05, "agreement", 1, sum=1.0, mood=1.2),
        finished("absent", 0.3, "agreement", 1, sum=1.0, mood=1.5),
        finished("absent", 0.3, "median", 1, sum=9.0, mood=9.0),
    ])  # fmt: skip
    for row in (
        "| 0% | median | none | – | – | +100.0% |",  # what a rule costs
        "| 0% | agreement, quarantine | none | – | – | +10.0% |",
        "| 30% | agreement | flip | +100.0% ± 0.0 | +60.0% | +100.0% ± 0.0 |",  # the worst of two attacks
        "| 30% | agreement, quarantine | flip | +0.0% | -12.0% | +10.0% |",  # without them, by the default
        "| 30% | median | flip | +5.0% | -76.7% | +110.0% |",  # absence is no attack, not even the worst
        "| 30% of the clients against agreement, quarantine, the best rule | +5.0% | +0.0% | -12.0% | yes |",
        "| 5% of the clients against agreement, the default | +2.0% | +10.0% | – | **no** |",
        "| clients | attack | rule | sum | mood | macro |",
        "| 30% | absent | agreement | +0.0% | +50.0% | +25.0% |",
        "| 30% | flip | agreement | +0.0% ± 0.0 | +200.0% ± 0.0 | +100.0% ± 0.0 |",
        "| 30% | flip | median | +0.0% | +10.0% | +5.0% |",
    ):
        assert row in table.splitlines()


def test_without_attacks_or_honest_clients_there_is_no_such_table():
    assert attack_table([finished("none", 0.0, "mean", 1, sum=1.0)]) == ""
    assert attack_table([finished("flip", 0.3, "mean", 1, sum=1.0)]) == ""


def test_whatever_else_a_grid_varies_has_tables_of_its_own():
    """In one table the cell that came last would be all that is shown of a row."""
    table = attack_table([
        finished("none", 0.0, "agreement", 1, contested="keep", sum=1.0),
        finished("none", 0.0, "agreement", 1, contested="vote", sum=2.0),
        finished("flip", 0.3, "agreement", 1, contested="keep", sum=1.5),
        finished("flip", 0.3, "agreement", 1, contested="vote", sum=2.2),
    ])  # fmt: skip
    assert table.splitlines()[0] == "**federation.contested=keep**"
    keep, vote = table.split("**federation.contested=vote**")
    assert "| 30% | agreement | flip | +50.0% |" in keep and "| 30% | agreement | flip | +10.0% |" in vote


def test_a_bar_is_not_met_while_attacks_are_to_come():
    runs = [finished("none", 0.0, "agreement", 1, sum=1.0), finished("flip", 0.3, "agreement", 1, sum=1.0)]
    others = [finished(kind, 0.3, "agreement", 1, sum=1.0)[0] for kind in ("labels", "bucket", "absent")]
    bar = "| 30% of the clients against agreement, the best rule | +5.0% | +0.0% | – | {} |"
    assert bar.format("yes") in attack_table(runs).splitlines()
    assert bar.format("so far; 2 attacks to come") in attack_table(runs, others).splitlines()
    other_size = [finished("labels", 0.05, "agreement", 1, sum=1.0)[0]]
    assert bar.format("yes") in attack_table(runs, other_size).splitlines()


def test_an_attack_of_other_seeds_than_honest_clients_is_not_the_worst():
    table = attack_table([
        finished("none", 0.0, "agreement", 1, sum=1.0),
        finished("flip", 0.3, "agreement", 1, sum=0.9),
        finished("labels", 0.3, "agreement", 2, sum=9.0),
    ])  # fmt: skip
    assert "| 30% | agreement | flip | -10.0% | – | -10.0% |" in table.splitlines()


@pytest.mark.slow
def test_the_study_on_a_tiny_model(tmp_path, small, says):
    quick = [*small, "data.source=sample", "data.clients=5", "training.rounds=1", "seed=42", "data.distinct=true"]
    table = says("compare", "attacks", *quick, "--output", tmp_path / "attacks")
    rows = [line for line in table.splitlines() if line.startswith("| 30%") or line.startswith("| 5%")]
    assert len(rows) == 2 + 14 + 2 and not any("–" in row for row in rows)


def test_the_cells_of_the_study_of_privacy(tmp_path):
    study = grid("private", tmp_path)
    for clients in (20, 200):
        own = [c.config for c in study if c.config.data.clients == clients]
        noised = [(c.privacy.level, c.privacy.epsilon) for c in own if c.privacy.level != "none"]
        assert noised == [("client", 8.0), ("client", 2.0), ("example", 8.0), ("example", 2.0)]
        assert [c.discovery.max_buckets for c in own if c.privacy.level == "none"] == [8, 1]
        assert all(c.federation.secure_aggregation == (c.privacy.level == "client") for c in own)


def private(level: str, epsilon: float, buckets: int, seed: int, loss: float, lr: float = 1e-4):
    asked = [f"privacy.level={level}", f"privacy.epsilon={epsilon}", f"discovery.max_buckets={buckets}"]
    config = load_config("quickstart", [*asked, "discovery.sketch=4", "data.clients=20"])
    summary = {"seed": seed, "test": {"best": {"used": "sparse", "loss": {"sparse": {"macro": loss}}}}}
    cell = SimpleNamespace(config=config, values={"privacy.level": level, "training.lr": lr, "seed": seed})
    return cell, summary | ({"privacy": {"spent": 1.5}} if level != "none" else {})


def test_privacy_is_held_against_none_with_the_same_seed():
    runs = [
        private("none", 8, 8, 1, 1.0), private("none", 8, 1, 1, 2.0), private("none", 8, 1, 2, 1.0),
        private("example", 8, 1, 1, 2.2), private("example", 8, 1, 2, 1.1), private("client", 2, 1, 3, 9.0),
    ]  # fmt: skip
    for row in (
        "| 20 | none | 8 | ∞ | 1.0000 | +0.0% | +0.0% |",
        "| 20 | none | 1 | ∞ | 1.5000 | +0.0% ± 0.0 | +100.0% |",
        "| 20 | example, ε = 8 | 1 | 1.50 | 1.6500 | +10.0% ± 0.0 | +120.0% |",
        "| 20 | client, ε = 2 | 1 | 1.50 | 9.0000 | – | – |",
    ):
        assert row in private_table(runs).splitlines()
    assert private_table(runs[:3]) == private_table(runs[3:]) == ""


def test_every_rate_of_a_search_is_held_against_none_at_that_rate():
    tried = ((0.1, 2.0, 1.0), (0.2, 3.0, 2.0))
    runs = [private("example", 8, 1, 1, loss, lr) for lr, loss, _ in tried]
    runs += [private("none", 8, 1, 1, loss, lr) for lr, _, loss in tried]
    low, high = private_table(runs).split("**training.lr=0.2**")
    assert low.startswith("**training.lr=0.1**") and "| 1.50 | 2.0000 | +100.0% |" in low
    assert "| 1.50 | 3.0000 | +50.0% |" in high


@pytest.mark.slow
def test_the_study_of_privacy_on_a_tiny_model(tmp_path, small, says):
    pytest.importorskip("dp_accounting")
    quick = [setting for setting in small if not setting.startswith("discovery.max_buckets")]
    quick += ["data.source=sample", "data.clients=5,6", "training.rounds=1", "seed=42", "data.distinct=true"]
    table = says("compare", "private", *quick, "--output", tmp_path / "private")
    rows = [line for line in table.splitlines() if line.startswith(("| 5 | example, ε", "| 6 | client, ε"))]
    assert len(rows) == 4 and not any("–" in row for row in rows)
