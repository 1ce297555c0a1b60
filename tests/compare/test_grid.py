"""Which cells a comparison has: its file, its axes, what belongs to some of them."""

import pytest

from fedweave.compare.grid import cells, comparison_names, load_comparison
from fedweave.config import load_config
from fedweave.errors import UserError
from fedweave.settings import flatten, to_tree


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
