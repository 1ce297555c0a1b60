"""Comparisons: the grid, its tables, and what a crash or a broken cell costs."""

import csv
import shutil
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from fedweave.cli import main
from fedweave.compare import _write, compare, runner
from fedweave.compare.grid import Cell, Comparison, cells, comparison_names, load_comparison
from fedweave.compare.ours import ours_table
from fedweave.compare.runner import Outcome, Runner
from fedweave.compare.tables import Results, choose_best, holm, latex, markdown, paired_p
from fedweave.config import Config, load_config
from fedweave.console import Console
from fedweave.errors import UserError
from fedweave.federation.compute import Compute
from fedweave.federation.message import Message
from fedweave.json_files import write_json
from fedweave.report.groups import find_runs
from fedweave.runs import workspace
from fedweave.runs.lock import locked
from fedweave.settings import flatten, to_tree
from tests.helpers import read_json, write_jsonl

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


def test_a_method_can_have_its_own_values_of_an_axis(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text(
        "recipe: quickstart\naxes: {method: [fedit, fedsvd], training.lr: [0.01, 0.02], seed: [1]}\n"
        "per: {method=fedsvd: {training.lr: [0.001, 0.002, 0.003]}}\nbest_of: training.lr\n"
    )

    def rates(*overrides):
        grid = cells(load_comparison(str(file), overrides, None), tmp_path)
        assert len({c.folder for c in grid}) == len(grid)
        return [(c.config.method, c.config.training.lr) for c in grid]

    own = [("fedsvd", 0.001), ("fedsvd", 0.002), ("fedsvd", 0.003)]
    assert rates() == [("fedit", 0.01), ("fedit", 0.02), *own]
    assert rates("training.lr=0.5,0.6", "method=fedsvd") == [("fedsvd", 0.5), ("fedsvd", 0.6)]
    assert rates("method=fedit:training.lr=0.5,0.6") == [("fedit", 0.5), ("fedit", 0.6), *own]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("axes: {seed: [1]}", "recipe is missing"),
        ("recipe: [a]\naxes: {seed: [1]}", "recipe must hold a name"),
        ("recipe: quickstart\naxes: [seed]", "axes must hold keys and values"),
        ("recipe: quickstart\naxes: {method: fedit}", "axes.method must be a list of values"),
        ("recipe: quickstart\naxes: {seed: 1}", "axes.seed must be a list of values"),
        ("recipe: quickstart\naxes: {seed: []}", "axes.seed must be a list of values"),
        ("recipe: quickstart\naxes: {seed: [1]}\nper: {seed=1: 5}", "per.seed=1 must hold keys and values"),
        ("like: {file}", "like itself"),
    ],
)
def test_a_comparison_that_is_none_is_one_sentence(tmp_path, text, sentence):
    file = tmp_path / "odd.yaml"
    file.write_text(text.replace("{file}", str(file)))
    with pytest.raises(UserError, match=sentence):
        load_comparison(str(file), [], None)


def test_empty_sections_and_values_that_are_nothing(tmp_path):
    file = tmp_path / "nothing.yaml"
    file.write_text("recipe: quickstart\naxes: {backbone.revision: [null, main]}\nset:\nper:\n")
    found = [c.config.backbone.revision for c in cells(load_comparison(str(file), [], None), tmp_path)]
    assert found == [None, "main"]


def test_a_setting_for_cells_that_there_are_none_of_is_refused():
    with pytest.raises(UserError, match=r"no cell has method=fedti, .* did you mean 'method=fedit'"):
        load_comparison("quickstart", ["method=fedit,fedweave", "method=fedti:training.lr=0.1"], None)


def test_a_folder_that_this_version_cannot_read_is_left_alone(tmp_path):
    (one,) = cells(load_comparison("quickstart", [], None), tmp_path)
    one.folder.mkdir(parents=True)
    (one.folder / "config.yaml").write_text("method: fedit\nof_another_version: 1\n")
    one.settle()
    assert one.folder.name == "run (2)" and one.finished is None


def test_a_comparison_may_be_like_another(tmp_path):
    (tmp_path / "base.yaml").write_text(
        "recipe: quickstart\naxes: {method: [fedit, fedweave], seed: [1, 2]}\nset: {data.clients: 5}\n"
        "per: {method=fedit: {training.lr: 0.5, data.alpha: 0.9}}\n"
    )
    like = tmp_path / "like.yaml"
    like.write_text(
        f"like: {tmp_path / 'base.yaml'}\naxes: {{seed: [7]}}\nset: {{data.train: 9}}\n"
        "per: {method=fedit: {training.lr: 0.25}}\n"
    )
    one, two = (c.config for c in cells(load_comparison(str(like), [], None), tmp_path))
    assert (one.method, two.method, one.seed, two.seed) == ("fedit", "fedweave", 7, 7)
    assert (one.data.clients, one.data.train, one.data.alpha, one.training.lr) == (5, 9, 0.9, 0.25)


def test_commas_make_axes_and_single_values_settings(tmp_path):
    comparison = load_comparison("main-results", ["seed=7", "method=fedit,fedweave", "data.alpha=0.1,0.5"], None)
    assert comparison.axes == {"method": ["fedit", "fedweave"], "data.alpha": ["0.1", "0.5"]}
    grid = cells(comparison, tmp_path)
    assert len(grid) == 4 and all(c.config.seed == 7 for c in grid) and len({c.folder for c in grid}) == 4
    assert {c.config.data.alpha for c in grid} == {0.1, 0.5}


@pytest.mark.parametrize("name", comparison_names())
def test_packaged_comparisons_are_valid_and_open_with_their_command(name, tmp_path):
    from fedweave.compare.grid import COMPARISONS

    first, second = (COMPARISONS / f"{name}.yaml").read_text().splitlines()[:2]
    assert cells(load_comparison(name, ["data.path=DATA"] if "DATA" in first else [], None), tmp_path)
    assert first.startswith(f"# fedweave compare {name}") and len(second) > 10


@pytest.mark.parametrize(
    ("name", "overrides", "best_of", "word"),
    [
        ("main-result", [], None, "main-results"),
        ("benchmark", ["method=fedit,fedwave"], None, "fedweave"),
        ("benchmark", ["training.round=1,2"], None, "training.rounds"),
        ("main-results", [], "training.lr", "no axis"),
        ("benchmark", ["training.lr=0.01,1e-2"], None, "training.lr=0.01 and training.lr=1e-2 are the same run"),
    ],
)
def test_mistakes_are_found_before_anything_runs(tmp_path, name, overrides, best_of, word):
    with pytest.raises(UserError, match=word):
        cells(load_comparison(name, overrides, best_of), tmp_path)


def test_a_grid_runs_survives_a_broken_cell_and_is_not_run_twice(tmp_path, quick):
    output = tmp_path / "grid"
    axes = ["method=fedit,ffa-lora", "seed=1,2"]
    grid = ["compare", "quickstart", *axes, *quick, "--output", str(output), "--quiet"]
    broken = output / "cells" / "seed-2_method-fedit"
    broken.mkdir(parents=True)
    (broken / "something").write_text("a folder that is in the way")
    assert main(grid) == 0
    first = read_json(output / "results.json")
    assert len(first) == 3 and "ffa-lora" in (output / "table.md").read_text()
    (broken / "something").unlink()
    broken.rmdir()
    times = {p: p.stat().st_mtime_ns for p in output.rglob("summary.json")}
    assert main(grid) == 0
    assert len(read_json(output / "results.json")) == 4
    assert all(p.stat().st_mtime_ns == t for p, t in times.items()), "finished cells must not run again"
    rows = list(csv.reader((output / "results.csv").open()))
    assert rows[0] == ["method", "quantity", "mean", "standard deviation", "seeds"] and rows[1][-1] == "2"
    assert r"\toprule" in (output / "table.tex").read_text()


def test_a_key_that_came_into_being_since_does_not_run_a_cell_again(tmp_path, quick):
    """A study of days outlives versions: what it did not know of has its default."""
    grid = cells(load_comparison("quickstart", [*quick, "method=fedit"], None), tmp_path)
    Runner({"one": grid}, Console(quiet=True)).run()
    (one,) = grid
    written, tree = read_json(one.folder / "summary.json"), to_tree(one.config)
    older = {**tree, "living": {key: value for key, value in tree["living"].items() if key != "alarms"}}
    for config, found in ((tree, True), (older, True), ({**older, "seed": 7}, False), ({**tree, "gone": 1}, False)):
        write_json(one.folder / "summary.json", {**written, "config": config})
        assert (one.finished is not None) == found


def test_a_reason_that_many_cells_have_is_said_once(tmp_path, capsys, monkeypatch):
    def run(self, cell):
        if cell.config.method != "fedit":
            raise UserError("data.path=gone: there is no such file." if cell.config.seed < 4 else "another.")
        return summary("fedit", cell.config.seed, 1.0, 0.5)

    monkeypatch.setattr(Runner, "_run", run)
    monkeypatch.setattr(runner, "with_life", lambda found, cell: found)
    compare(["quickstart"], ["method=fedit,fedweave", "seed=1,2,3,4"], [tmp_path], None, Console())
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert told == [
        "warning: 3 cells (seed=1, method=fedweave; …): data.path=gone: there is no such file.",
        "warning: seed=4, method=fedweave: another.",
        "warning: 4 cells failed; run the same command again to retry them.",
    ]


@pytest.mark.parametrize("minutes", ["-3", "nan"])
def test_a_time_that_is_none_is_refused(minutes, tmp_path, complains):
    line = complains("compare", "quickstart", "--output", tmp_path, "--minutes", minutes)
    assert f"--minutes must be at least 0, not {minutes}." in line


def test_processes_share_a_grid_and_what_one_gives_up_another_takes(tmp_path, quick, capsys):
    asked = ["quickstart"], [*quick, "method=fedit,local-only"], [tmp_path]
    with locked(_claim(tmp_path, "method-fedit")):
        first = compare(*asked, None, Console())
    said = capsys.readouterr()
    assert "another process has it" in said.err + said.out and "other processes have 1 cells" in said.err + said.out
    assert "local-only" in first and "fedit" not in first
    second = compare(*asked, None, Console(quiet=True))
    assert "local-only" in second and "fedit" in second


def _claim(output, name):
    folder = output / "cells" / f"{name}.claim"
    folder.mkdir(parents=True)
    return folder


def test_several_comparisons_share_cells_and_stop_in_time(tmp_path, quick, capsys):
    rates = tmp_path / "rates.yaml"
    rates.write_text("recipe: quickstart\naxes: {training.lr: [1.0e-3, 2.0e-3]}\nset: {method: fedit}\n")
    both = tmp_path / "methods.yaml"
    both.write_text("recipe: quickstart\naxes: {method: [ffa-lora, fedit]}\nset: {training.lr: 1.0e-3}\n")
    settings = [*quick, "seed=1", "evaluation.scores=false"]
    command = ["compare", str(rates), str(both), *settings, "--output", str(tmp_path / "out")]
    assert main([*command, "--minutes", "0"]) == 2
    assert "4 cells to go" in capsys.readouterr().err and not list(tmp_path.rglob("summary.json"))
    assert main(command) == 0
    assert "fedit" in capsys.readouterr().out
    assert len(list(tmp_path.rglob("summary.json"))) == 3  # fedit at 1e-3 stands in both tables and ran once
    table = read_json(tmp_path / "out" / "methods" / "results.json")
    assert [row["values"]["method"] for row in table] == ["ffa-lora", "fedit"]
    assert (tmp_path / "out" / "rates" / "table.md").is_file()
    methods = [run.method for run in find_runs([tmp_path / "out" / "methods"])]
    assert sorted(methods) == ["fedit", "ffa-lora"]


def test_cells_that_begin_alike_discover_once_and_give_the_same_to_the_last_bit(tmp_path, quick, monkeypatch):
    """Data, clustering and warmups of a process's earlier cells stand for those of the next, unless rows differ."""
    asked = ["attack.kind=none,flip,labels,inflate", "attack.clients=0.4", "federation.rule=clip", "seed=1"]
    settings = [*quick, *asked, "training.rounds=2", "evaluation.scores=false", "federation.norm_factor=0"]
    trained: list[str] = []
    train, load = Compute.train, workspace.load_data

    def counted(self, layout, router, lanes, label, *given, **more):
        trained.append(label)
        return train(self, layout, router, lanes, label, *given, **more)

    monkeypatch.setattr(Compute, "train", counted)
    monkeypatch.setattr(workspace, "load_data", lambda config: trained.append("data") or load(config))
    made = {}
    for place, together in (("together", True), ("alone", False)):
        grid, trained[:] = cells(load_comparison("quickstart", settings, None), tmp_path / place), []
        for group in [grid] if together else [[cell] for cell in grid]:
            outcome = Runner({"one": group}, Console(quiet=True)).run()["one"]
            assert not outcome.failures
        made[place] = [_everything(cell.folder) for cell in grid]
        assert trained.count("warmup") == trained.count("data") == (2 if together else 4)
    for ours, theirs in zip(made["together"], made["alone"], strict=True):
        assert ours == theirs


def test_cells_that_score_otherwise_do_not_share_their_data(tmp_path, small):
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": f"Add {i} and 1.", "response": str(i + 1)} for i in range(40)])
    settings = [*small, "data.source=jsonl", f"data.path={tmp_path / 'rows.jsonl'}"]
    kept, found = workspace.Kept(), []
    for metric in ("number", "exact", "number"):
        config = load_config("quickstart", [*settings, f"evaluation.metrics={metric}"])
        prepared = workspace.prepare(config, Console(quiet=True), kept)
        found.append({task.metric for task in prepared.data.tasks.values()})
    assert found == [{"number"}, {"exact"}, {"number"}]


def _everything(folder) -> dict[str, object]:
    """What a run has written, but for times and places."""
    newest = max((folder / "checkpoints").iterdir())
    tensors = {p.name: load_file(p) for p in newest.glob("*.safetensors")}
    found: dict[str, object] = {
        f"{file} {name}": (x.dtype, x.numpy().tobytes()) for file, xs in tensors.items() for name, x in xs.items()
    }
    assert found
    summary = read_json(folder / "summary.json")
    found |= {key: summary[key] for key in ("test", "validation", "communication", "audit", "buckets", "experts")}
    return found | {"discovery": read_json(folder / "discovery.json")}


def test_every_comparison_gets_its_first_seed_before_any_its_second(tmp_path, monkeypatch):
    grids = {
        name: cells(load_comparison("benchmark", [axis, "seed=7,8"], None), tmp_path / name)
        for name, axis in {"a": "method=fedit,fedweave", "b": "data.alpha=0.1,0.5"}.items()
    }
    order = []
    monkeypatch.setattr(Runner, "_run", lambda self, cell: order.append(cell) or {})
    outcomes = Runner(grids, Console(quiet=True)).run()
    assert [c.config.seed for c in order] == [7, 7, 7, 7, 8, 8, 8, 8]
    assert [c for name in grids for c, _ in outcomes[name].finished] == grids["a"] + grids["b"]


@pytest.mark.parametrize("late", [True, False])
def test_processes_of_one_run_stop_before_the_same_cell(tmp_path, monkeypatch, late):
    """The first one's clock decides, whatever another's says."""
    other = SimpleNamespace(rank=1, size=2, pass_on=lambda owner, own: Message(facts={"late": late}))
    monkeypatch.setattr(runner, "world", lambda: other)
    monkeypatch.setattr(Runner, "_run", lambda self, cell: {})
    grid = cells(load_comparison("benchmark", ["method=fedit,fedweave"], None), tmp_path)
    outcome = Runner({"a": grid}, Console(quiet=True), minutes=0.0 if not late else 99.0).run()["a"]
    assert (len(outcome.left), len(outcome.finished)) == ((2, 0) if late else (0, 2))


def test_cells_differ_from_their_recipe_only_by_their_values(tmp_path):
    base = load_config("benchmark", [])
    one = cells(load_comparison("benchmark", ["method=fedit,fedweave"], None), tmp_path)[1]
    assert one.config.training == base.training and one.config.method == "fedweave"


def test_a_setting_can_belong_to_one_method(tmp_path):
    overrides = ["method=fedit,fedweave", "method=fedit:training.lr=3e-4"]
    one, two = cells(load_comparison("benchmark", overrides, None), tmp_path)
    assert one.config.training.lr == 3e-4 and two.config.training.lr == load_config("benchmark", []).training.lr


def test_one_value_of_an_axis_keeps_what_the_comparison_sets_for_it(tmp_path):
    grid = cells(
        load_comparison("suite", ["data.name=natural", "method=fedit", "seed=1", "data.path=x"], None), tmp_path
    )
    assert [c.values for c in grid] == [{"data.name": "natural", "method": "fedit"}]
    assert (grid[0].config.data.source, grid[0].config.data.clients, grid[0].config.training.lr) == (
        "tasks",
        40,
        0.01,
    )


def test_the_suites_sets_differ_as_their_names_say(tmp_path):
    grid = cells(load_comparison("suite", ["method=fedweave", "seed=1", "data.path=x"], None), tmp_path)
    data = {c.values["data.name"]: c.config.data for c in grid}
    assert [name for name, d in data.items() if d.wording == "varied"] == ["four-varied"]
    assert [name for name, d in data.items() if d.partition == "pure"] == ["pure-clients"]
    assert [name for name, d in data.items() if len(d.tasks) == 1] == ["one-kind"]
    assert all(d.distinct for d in data.values())


COMMON = ("training.schedule", "training.weighting", "training.patience")  # of the recipe, for all methods


@pytest.mark.parametrize("name", ["suite", "suite-search"])
def test_what_the_recipe_adds_reaches_no_baseline_of_the_suite(name, tmp_path):
    """Under `weave` a baseline is what it is in `benchmark`; data, features and budget are everybody's."""
    usual, ours = (flatten(to_tree(load_config(recipe))) for recipe in ("benchmark", "weave"))
    assert load_config("benchmark").trains_router
    usual["router.training"] = "soft"  # what auto is there, as the suite's records have it
    for c in cells(load_comparison(name, ["data.name=four", "seed=1", "data.path=x"], None), tmp_path):
        for key, value in flatten(to_tree(c.config)).items():
            own = key.startswith(("experts.", "router.", "alignment.", "discovery.", "training."))
            if own and key != "training.lr":
                woven = key in COMMON or c.config.method in ("fedweave", "oracle")
                assert value == (ours if woven else usual)[key], f"{c.config.method}: {key}"
            elif key.startswith("backbone."):
                assert value == ours[key]


def test_the_search_tries_as_many_rates_for_every_method_and_none_of_the_suites_seeds(tmp_path):
    search, suite = (
        cells(load_comparison(name, ["data.name=natural", "data.path=x"], None), tmp_path)
        for name in ("suite-search", "suite")
    )
    rates = {}
    for c in search:
        rates.setdefault(c.config.method, set()).add(c.config.training.lr)
        assert c.config.data.source == "tasks" and not c.config.evaluation.scores
    assert set(rates) == {c.config.method for c in suite} and {len(r) for r in rates.values()} == {4}
    assert not {c.config.seed for c in search} & {c.config.seed for c in suite}
    pinned = next(c.config for c in search if c.config.method == "fedlease")
    assert pinned.alignment.linkage == "average" and pinned.alignment.max_experts == 8


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


def test_a_setting_that_no_name_tells_gets_a_run_of_its_own(tmp_path, quick):
    """Names of folders tell the axes alone; what lies there is resumed only if it is the same run."""
    asked = [*quick, "method=fedit,local-only", "evaluation.scores=false"]

    def found(*more: str):
        grid = cells(load_comparison("quickstart", [*asked, *more], None), tmp_path)
        outcome = Runner({"one": grid}, Console(quiet=True)).run()["one"]
        assert not outcome.failures
        return [(cell.folder.name, summary["config"]["training"]["lr"]) for cell, summary in outcome.finished]

    assert found("training.lr=0.001") == [("method-fedit", 0.001), ("method-local-only", 0.001)]
    assert found("training.lr=0.002") == [("method-fedit (2)", 0.002), ("method-local-only (2)", 0.002)]
    shutil.rmtree(tmp_path / "cells" / "method-local-only")
    (tmp_path / "cells" / "method-fedit" / "summary.json").unlink()  # interrupted: resumed where it lies
    assert found("training.lr=0.001") == [("method-fedit", 0.001), ("method-local-only", 0.001)]
    assert len(list((tmp_path / "cells").glob("method-fedit*/config.yaml"))) == 2


def test_a_grid_of_which_nothing_can_run_says_why_in_its_one_sentence(tmp_path, complains):
    grid = ["quickstart", "method=fedit,fedweave", "data.source=jsonl", f"data.path={tmp_path / 'gone'}", "--quiet"]
    said = complains("compare", *grid, "--output", tmp_path / "grid")
    assert "no cell of the comparison finished: 2 cells (method=fedit; …): data.path=" in said
    assert said.count("no such file") == 1
    (tmp_path / "file").write_text("")
    assert f"--output {tmp_path / 'file'} is a file" in complains("compare", *grid, "--output", tmp_path / "file")
