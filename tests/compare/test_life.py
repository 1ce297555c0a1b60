"""`fedweave compare drift`: every cell finishes, and what happened in them is a table."""

import json
from itertools import count

import pytest

from benchmarks.drift_noise import lines, wobble
from benchmarks.drift_picture import ARMS, draw
from fedweave.compare.bar import BAR, CONTROL, NOTICES, STILL, TOLD, UNAWARE, row_of
from fedweave.compare.grid import Cell, cells, load_comparison
from fedweave.compare.life import AROUND, SOON, noticed, with_life
from fedweave.config import load_config
from fedweave.data.sample import make_sample
from tests.helpers import read_json, read_jsonl, write_jsonl


def test_the_cells_of_the_study(tmp_path):
    grid = cells(load_comparison("drift", ["seed=42", "data.path=."], None), tmp_path)
    asked = {(c.config.data.name, c.config.method, c.config.living.notice) for c in grid}
    assert len(grid) == len(asked) and asked == {
        ("drift", "fedweave", "open"),
        ("drift", "fedweave", "off"),
        ("drift", "ifca", "off"),
        ("drift", "oracle", "off"),
        ("control", "fedweave", "open"),
        ("still", "fedweave", "open"),
        ("restart", "fedweave", "off"),
    }


@pytest.mark.parametrize(
    ("opened", "late"),
    [([10, 12], [0, 0]), ([12], [2]), ([11, 11], [1]), ([10, 10, 13], [0, 1]), ([9], []), ([], [])],
)
def test_an_opening_is_the_notice_of_one_kind_that_came_before_it(opened, late):
    assert noticed({"a": 10, "b": 12}, opened) == late


def test_a_run_whose_sites_tell_no_kinds_has_no_life(tiny_copy):
    """Over Flower a site measures its own rows, whatever their kinds."""
    folder = tiny_copy("data.changes=['2: all gain sum']", "data.train=16")
    config, log = load_config(folder / "config.yaml"), folder / "metrics.jsonl"
    cell, summary = Cell({}, config, folder), read_json(folder / "summary.json")
    assert with_life(summary, cell)["life"]["came"] == {"sum": 2}
    rows = [{key: value for key, value in row.items() if key != "tasks"} for row in read_jsonl(log)]
    write_jsonl(log, rows)
    assert "life" not in with_life(summary, cell)


def one_seed(late=1.0, without=0.0, opened=0.0, new=1.0, old=1.0, sent=1.0) -> dict[str, dict[str, float]]:
    """The figures of five arms, of which those of the arm that notices and of the control are given."""
    kept = "loss, kinds that stayed"
    ours = {"new kinds without one": without, "rounds until noticed, at most": late, kept: old}
    losses = [name for name, _ in (SOON, AROUND)]
    return {
        NOTICES: ours | dict.fromkeys(losses, new) | {"bytes": sent}, CONTROL: {"experts opened": opened},
        TOLD: dict.fromkeys(losses, 1.0),
        STILL: {kept: 1.0, "bytes": 1.0}, UNAWARE: {"bytes": 1.0},
    }  # fmt: skip


@pytest.mark.parametrize("demand", range(len(BAR)))
def test_the_bar_is_met_at_its_limit_in_every_seed_and_not_beyond(demand):
    at_it = one_seed(late=2, new=1.0199, old=1.0049, sent=1.0999)
    beyond = one_seed(late=3, opened=1, new=1.0201, old=1.0051, sent=1.1001)
    assert row_of(BAR[demand], [at_it, at_it]).endswith(" yes |")
    assert row_of(BAR[demand], [at_it, beyond, at_it]).endswith(" **no**, in 2 of 3 seeds |")
    assert row_of(BAR[demand], [at_it, {NOTICES: {}}]).endswith(" not measured in every seed |")


def test_a_kind_without_an_expert_was_never_noticed():
    assert "| never |" in row_of(BAR[0], [one_seed(late=0, without=1)])


def write_kinds(folder, tasks, rows: int) -> None:
    """Ten kinds under the names of the study's tasks, of the four patterns of the sample in other words."""
    pools, _ = make_sample(3 * rows, 0)
    folder.mkdir()
    with (folder / "tasks.jsonl").open("w") as listed, (folder / "rows.jsonl").open("w") as written:
        for number, task in zip(count(), tasks):
            pool = list(pools.values())[number % 4][number // 4 * rows : (number // 4 + 1) * rows]
            listed.write(json.dumps({"task": task, "definition": f"Job {number}.", "category": task[:8]}) + "\n")
            for row in pool:
                written.write(json.dumps({"task": task, "input": row.prompt, "output": row.response}) + "\n")


@pytest.mark.slow
def test_the_study_on_a_tiny_model(tmp_path, small, says):
    quick = [f"data.path={tmp_path}", *(x for x in small if not x.startswith("data.")), "training.local_steps=1"]
    quick += ["data.train=40", "data.validation=2", "data.test=2", "training.rounds=13", "seed=42"]
    quick += [
        "discovery.warmup_steps=8",
        "discovery.warmup_lr=3e-2",
        "living.least=4",
        "router.warm_start.rounds=1",
    ]
    tasks = load_comparison("drift", [f"data.path={tmp_path}"], None)
    (listed,) = [json.loads(x.partition("=")[2]) for x in tasks.settings if x.startswith("data.tasks=")]
    write_kinds(tmp_path / "natural_instructions", listed, 44)
    table = says("compare", "drift", *quick, "--output", tmp_path / "drift")
    rows = [line for line in table.splitlines() if line.startswith(("| drift, ", "| control, ", "| still, "))]
    assert "new kinds without one" in table and len(rows) == 6
    demands = [line.split(" | ") for line in table.splitlines() if any(f"| {x.title} |" in line for x in BAR)]
    assert len(demands) == len(BAR)
    # thirteen rounds are too short for two figures; all others are there
    assert [" rounds," in cells[0] or "3 to 7" in cells[0] for cells in demands] == [
        "–" in cells for cells in demands
    ]
    courses = json.loads((tmp_path / "drift" / "course.json").read_text())
    came = {c["title"]: sorted(c["came"].values()) for c in courses}
    assert came["drift, fedweave, open"] == [10, 12] and came["still, fedweave, open"] == []
    assert all(set(c["old"]) == set(map(str, range(14))) for c in courses if c["title"].startswith("drift"))
    before = {
        c["title"]: [c["old"][str(t)] for t in range(10)]
        for c in courses
        if c["title"] in (NOTICES, UNAWARE, STILL)
    }
    assert before[NOTICES] == before[UNAWARE] == before[STILL]  # until something comes they are one run
    assert set(ARMS) == {c["title"] for c in courses} - {"control, fedweave, open"}
    draw(tmp_path / "drift" / "course.json", tmp_path / "drift.svg")
    assert "an oracle that is told" in (tmp_path / "drift.svg").read_text()


def test_chance_is_what_is_no_trend():
    assert wobble([3.0, 2.5, 2.0, 1.5, 1.0]) == 0 and wobble([0.0, 0.3, 0.0, 0.3, 0.0]) == pytest.approx(
        0.6 / 6**0.5
    )


def test_how_far_above_others_an_arm_lies_and_how_sure_a_mean_is():
    def flat(loss):
        return {str(t): loss for t in range(1, 21)}

    arms = {NOTICES: (1.25, 1.01), UNAWARE: (1.0, 1.0), TOLD: (1.0, 1.0), STILL: (1.0, 1.0)}
    courses = [
        {"title": title, "seed": seed, "came": {"a": 10}, "new": {"a": flat(new)}, "old": flat(old + more)}
        for title, (new, old) in arms.items()
        for seed, more in ((7, 0.0), (8, 0.02 if title == NOTICES else 0.0))
    ]
    told = list(lines(courses))
    alone = [line for line in told if line.startswith("| a: ")]
    assert len(alone) == 8 and all(("+0.250" in line) == (NOTICES in line) for line in alone)
    assert f"| {NOTICES}, 5 | +25.00% | +25.00% | +25.00% ± 0.00% |" in told
    assert f"| {NOTICES}, 3 to 7 | +25.00% | +25.00% | +25.00% ± 0.00% |" in told
    for rounds in ("1", "5", "3 to 7", "in the last round"):
        assert f"| {rounds} | +25.00% | +25.00% | +25.00% ± 0.00% |" in told
    assert f"| round 10, a: {NOTICES} | 1.25 | 1.25 | 1.25 |" in told
    for rounds in ("20", "16 to 20"):  # 1 and 3 %: a standard error of one, times 12.7 with one degree of freedom
        assert f"| {NOTICES}, {rounds} | +1.00% | +3.00% | +2.00% ± 12.71% |" in told
        assert f"| {TOLD}, {rounds} | +0.00% | +0.00% | +0.00% ± 0.00% |" in told
