"""What comparisons say: means, marks, tests, and the value that validation chooses."""

import pytest

from fedweave.compare import _write
from fedweave.compare.grid import Cell, Comparison
from fedweave.compare.ours import ours_table
from fedweave.compare.runner import Outcome
from fedweave.compare.tables import Results, choose_best, holm, latex, markdown, paired_p
from fedweave.config import Config
from fedweave.console import Console

TASKS = {"a": "Task A", "b": "Task B"}


def summary(method: str, seed: int, loss: float, score: float, validation: float = 1.0) -> dict:
    per_task = {"a": loss - 0.1, "b": loss + 0.1, "macro": loss}
    scores = {"a": score, "b": score, "macro": score}
    return {
        "method": method, "seed": seed, "tasks": TASKS, "notes": ["a remark"],
        "parameters": {"experts": 2_000_000, "router": 0},
        "trained_parameters": 1_500_000, "audit": None,
        "validation": {"best_loss": validation, "best_round": 1},
        "test": {"best": {"used": "sparse", "loss": {"sparse": per_task, "soft": per_task}, "score": scores}},
    }  # fmt: skip


def cell(**values) -> Cell:
    return Cell(values, Config(), None)


@pytest.fixture
def results() -> Results:
    runs = [
        ("fedit", [1.0, 1.2], [0.4, 0.5]),
        ("fedweave", [0.8, 0.9], [0.6, 0.75]),
        ("ffa-lora", [2.0, 2.3], [0.0, 0.1]),
    ]
    return Results.of([
        (cell(method=m, seed=seed), summary(m, seed, loss, score))
        for m, losses, scores in runs
        for seed, loss, score in zip((42, 43), losses, scores, strict=True)
    ])  # fmt: skip


def test_means_deviations_and_ranks(results):
    figure = results.rows[("fedit",)]["loss macro"]
    assert figure.mean == pytest.approx(1.1) and figure.deviation == pytest.approx(0.1414, abs=1e-4)
    assert results.ranks("loss macro") == {("fedweave",): 0, ("fedit",): 1, ("ffa-lora",): 2}
    assert results.ranks("score macro")[("fedweave",)] == 0


def test_markdown_and_latex_mark_best_and_second(results):
    text = markdown(results)
    assert "**0.8500** ± 0.0707" in text and "<u>1.1000</u> ± 0.1414" in text and "Note: a remark" in text
    assert "score Task A" in text and "1.50M" in text  # what is frozen does not count
    assert r"\textbf{0.8500}" in latex(results) and r"\underline{1.1000}" in latex(results)


def test_seeds_with_other_numbers_of_experts_train_other_numbers_of_parameters():
    runs = [(cell(method="fedlease", seed=s), summary("fedlease", s, 1.0, 0.5)) for s in (1, 2, 3)]
    runs[1][1]["trained_parameters"] = 3_000_000
    assert "| fedlease | 3 | 1.50M to 3.00M |" in markdown(Results.of(runs))


def test_a_run_that_nothing_here_could_test_has_its_validation_loss():
    """FedSA-LoRA over sites: every client's B stays where it is."""
    untested = {**summary("fedsa-lora", 1, 1.0, 0.5, validation=0.25), "test": {}, "tasks": {}}
    runs = [(cell(method="fedsa-lora"), untested), (cell(method="fedit"), summary("fedit", 1, 1.0, 0.5))]
    text = markdown(Results.of(runs))
    assert "score Task A" in text and "| fedsa-lora | 1 | 1.50M | – |" in text and "0.2500" in text


def test_rows_that_look_equal_are_marked_alike():
    runs = [("a", 0.50001), ("b", 0.50004), ("c", 0.7)]
    text = markdown(Results.of([(cell(method=m), summary(m, 1, loss, 0.5)) for m, loss in runs]))
    assert text.count("| **0.5000** |") >= 2 and "<u>0.7000</u>" in text


def test_tests_are_corrected_for_their_number():
    found = holm({("a",): 0.03, ("b",): 0.01, ("c",): 0.04, ("d",): 0.9})
    assert found == pytest.approx({("b",): 0.04, ("a",): 0.09, ("c",): 0.09, ("d",): 0.9})
    assert max(holm({("a",): 0.6, ("b",): 0.7}).values()) == 1.0


def test_rows_that_never_differ_have_p_of_one():
    """A t-test of no difference at all is 0 / 0, which sorts anywhere and spoils the correction of the others."""
    assert paired_p([0.5, 0.6], [0.5, 0.6]) == 1.0 and paired_p([0.5, 0.6, 0.9], [0.5, 0.6, 0.8]) < 1
    losses = {"a": (0.5, 0.6), "b": (0.5, 0.6), "c": (0.7, 0.8001), "d": (0.9, 0.91)}
    runs = [(cell(method=m, seed=s), summary(m, s, x[s - 1], 0.5)) for m, x in losses.items() for s in (1, 2)]
    text = markdown(Results.of(runs))
    assert "b: 1.000 (1.000)" in text and "nan" not in text


def test_a_row_with_nobody_behind_it_is_not_called_the_best():
    alone = Results.of([(cell(method="fedit", seed=1), summary("fedit", 1, 0.5, 0.5, 0.5))])
    assert (
        alone.ranks("loss macro") == {} and "| 0.5000 |" in markdown(alone) and "**0.5000**" not in markdown(alone)
    )


def test_paired_test_uses_common_seeds(results):
    from scipy.stats import ttest_rel

    expected = ttest_rel([0.8, 0.9], [1.0, 1.2]).pvalue
    assert results.paired("loss macro")[("fedit",)] == pytest.approx(expected)


def test_rows_of_different_seeds_are_judged_by_those_that_all_have():
    """A mean over other seeds is a mean over other data: seed 2 is easy, and only one row has it."""
    runs = [("fedit", 1, 1.0), ("fedweave", 1, 1.1), ("fedweave", 2, 0.1), ("oracle", 1, 0.05)]
    found = Results.of([(cell(method=m, seed=s), summary(m, s, loss, 0.5)) for m, s, loss in runs])
    assert found.ranks("loss macro") == {("fedit",): 0, ("fedweave",): 1}
    text = markdown(found)
    assert "judged by the seeds that all have (1)" in text and "| oracle † |" in text
    assert r"oracle$^\dagger$" in latex(found) and "**0.0500**" not in text
    bound = [("fedit", 1, 1.0), ("fedit", 2, 0.1), ("oracle", 1, 0.5)]
    found = Results.of([(cell(method=m, seed=s), summary(m, s, loss, 0.5)) for m, s, loss in bound])
    assert any("A bound has other seeds" in said for said in found.caveats()), "0.5 is no worse than 0.55"
    even = Results.of([(cell(method=m, seed=1), summary(m, 1, loss, 0.5)) for m, loss in (("a", 1.0), ("b", 2.0))])
    assert not even.caveats()


def test_best_value_is_chosen_by_validation_not_by_test():
    finished = [
        (cell(method="fedit", seed=1, **{"training.lr": lr}), summary("fedit", 1, loss, 0.5, validation))
        for lr, loss, validation in ((0.1, 0.5, 2.0), (0.2, 0.9, 1.0))
    ]
    chosen, lines = choose_best(finished, "training.lr")
    assert [c.values["training.lr"] for c, _ in chosen] == [0.2]
    assert "training.lr=0.2 → 1.0000 (chosen)" in lines[0]


def test_one_value_for_all_sets_is_chosen_by_what_it_gains_in_each():
    """1 % of a large loss is not worth 50 % of a small one."""
    tried = {("easy", 0.1): 0.10, ("easy", 0.2): 0.15, ("easy", 0.4): 0.3,
             ("hard", 0.1): 9.1, ("hard", 0.2): 9.0, ("hard", 0.4): 9.9}  # fmt: skip
    finished = [
        (cell(method="fedit", **{"data.name": d, "training.lr": lr}), summary("fedit", 1, 1.0, 0.5, loss))
        for (d, lr), loss in tried.items()
    ]
    chosen, lines = choose_best(finished, "training.lr", over="data.name")
    assert {c.values["training.lr"] for c, _ in chosen} == {0.1} and len(chosen) == 2
    assert len(lines) == 1 and lines[0].startswith("fedit: training.lr=0.1 → 0.9539 (chosen)")
    assert lines[0].endswith("at the edge of what was tried")
    apart, lines = choose_best(finished, "training.lr")
    assert [(c.values["data.name"], c.values["training.lr"]) for c, _ in apart] == [("easy", 0.1), ("hard", 0.2)]
    assert "edge" in lines[0] and "edge" not in lines[1]


def test_sets_of_data_are_ranked_apart(tmp_path):
    runs = [("easy", "fedit", 0.3), ("easy", "fedweave", 0.2), ("hard", "fedit", 0.8), ("hard", "fedweave", 0.9)]
    outcome = Outcome(
        [(cell(**{"data.name": d, "method": m}), summary(m, 1, x, 0.5)) for d, m, x in runs], [tmp_path] * 4
    )
    text = _write(Comparison("quickstart", {}, tables="data.name"), outcome, tmp_path / "out", Console(quiet=True))
    easy, hard = text.split("### hard")
    assert easy.startswith("### easy") and "| **0.2000** |" in easy and "| **0.8000** |" in hard
    assert (tmp_path / "out/results.csv").read_text().count("easy,") == (
        tmp_path / "out/results.csv"
    ).read_text().count("hard,")


def test_tables_say_how_many_cells_they_lack(tmp_path):
    lacking = [cell(method=m) for m in ("ifca", "rolora", "fedsvd")]
    outcome = Outcome([(cell(method="fedit"), summary("fedit", 1, 1.0, 0.5))], [tmp_path])
    assert "not in these tables" not in _write(Comparison("quickstart", {}), outcome, tmp_path, Console(quiet=True))
    outcome.left, outcome.taken, outcome.failed = lacking[:1], lacking[1:2], lacking[2:]
    text = _write(Comparison("quickstart", {}), outcome, tmp_path, Console(quiet=True))
    assert "3 of the comparison's 4 cells are not in these tables" in text


def test_a_method_is_held_against_every_other_one_seed_by_seed():
    losses = {"fedweave": (0.98, 0.95, 0.99), "fedit": (1.0, 1.0, 1.0), "oracle": (0.9, 0.9, 0.9)}
    runs = [
        (cell(**{"data.name": "easy", "method": m, "seed": s}), summary(m, s, x, 0.5 + 0.01 * (m == "fedweave")))
        for m, values in losses.items()
        for s, x in zip((1, 2, 3), values, strict=True)
    ]
    alone = [
        (cell(**{"data.name": "hard", "method": m, "seed": 1}), summary(m, 1, 1.0, 0.5)) for m in ("fedit", "ifca")
    ]
    text = ours_table([*runs, *alone], "fedweave")
    fedit = next(line for line in text.splitlines() if "| fedit |" in line)
    assert "| easy | fedit | -2.0% | -5.0% | -1.0% | -2.7% |" in fedit and fedit.endswith("| +1.0 |")
    assert fedit.count("0.157") == 2, "a bound is no test to be corrected for"
    assert "oracle † |" in text and "hard" not in text and "for the 1 tests" in text
    assert ours_table(runs, None) == "" == ours_table(runs[:3], "fedweave")
