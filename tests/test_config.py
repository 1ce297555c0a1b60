"""Settings: defaults, recipes, overrides, and one helpful sentence for every mistake."""

import re

import pytest
import yaml

from fedweave.config import (
    Config,
    dump_config,
    find_recipe,
    from_tree,
    load_config,
    recipe_names,
)
from fedweave.errors import UserError
from fedweave.settings import describe, to_tree


@pytest.fixture
def recipe(tmp_path):
    """Call with YAML text to get the path of a recipe file."""

    def write(text: str):
        path = tmp_path / "mine.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def complaint(tree: dict) -> str:
    """The one sentence that a user reads."""
    with pytest.raises(UserError) as caught:
        from_tree(tree)
    message = str(caught.value)
    assert "\n" not in message
    return message


def nested(key: str, value) -> dict:
    """{"a": {"b": value}} for "a.b"."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


# -------------------------------------------------------------------------------------- precedence


def test_no_settings_at_all_give_the_defaults():
    assert from_tree({}) == Config()


def test_empty_file_and_empty_section_give_the_defaults(recipe):
    assert load_config(recipe("")) == Config()
    assert load_config(recipe("training:\n")) == Config()


def test_recipe_beats_default_and_override_beats_recipe(recipe):
    path = recipe("training: {rounds: 7, local_steps: 3}\nseed: 5\n")
    config = load_config(path, ["training.rounds=9", "router.warm_start.steps=11"])
    assert config.training.rounds == 9  # override
    assert config.training.local_steps == 3  # recipe
    assert config.training.batch_size == Config().training.batch_size  # default
    assert config.seed == 5
    assert config.router.warm_start.steps == 11  # a section that the recipe does not mention


def test_later_override_wins(recipe):
    assert load_config(recipe(""), ["seed=1", "seed=2"]).seed == 2


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "0.0001", "1E-4"])
def test_every_spelling_of_a_small_number_is_a_number(recipe, text):
    assert load_config(recipe(f"training: {{lr: {text}}}")).training.lr == 1e-4
    assert load_config(recipe(""), [f"training.lr={text}"]).training.lr == 1e-4


@pytest.mark.parametrize(
    ("override", "section", "name", "value"),
    [
        ("experts.target_modules=q_proj", "experts", "target_modules", ("q_proj",)),
        ("experts.target_modules=[q_proj, o_proj]", "experts", "target_modules", ("q_proj", "o_proj")),
        ("training.clients_per_step=3", "training", "clients_per_step", 3),
        ("training.clients_per_step=auto", "training", "clients_per_step", "auto"),
        ("training.participation=4", "training", "participation", 4.0),
        ("backbone.end_of_answer=false", "backbone", "end_of_answer", False),
        ("backbone.revision=main", "backbone", "revision", "main"),
        ("backbone.revision=", "backbone", "revision", None),
    ],
)
def test_override_values_are_read_as_yaml(recipe, override, section, name, value):
    config = load_config(recipe("backbone: {revision: dev}"), [override])
    assert getattr(getattr(config, section), name) == value


# -------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("trainig", "'training'"),
        ("backbone.modle", "'backbone.model'"),
        ("router.warm_start.step", "'router.warm_start.steps'"),
        ("rank", "'experts.rank'"),  # right name, no section
        ("training.rank", "'experts.rank'"),  # right name, wrong section
        ("lr", "'training.lr'"),
        ("zzzz", "method, seed, output"),  # nothing near: all of them
        ("experts.zzzz", "rank, experts.alpha"),  # the section's name, shared by all, is no likeness
    ],
)
def test_unknown_key_is_named_with_the_nearest_valid_one(key, suggestion):
    message = complaint(nested(key, 1))
    assert f"unknown config key {key!r}" in message
    assert suggestion in message


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("training.rounds", "many", "a whole number"),
        ("training.rounds", 2.5, "a whole number"),
        ("training.rounds", None, "a whole number"),
        ("training.rounds", True, "a whole number"),
        ("training.rounds", [3], "a whole number"),
        ("training.rounds", {"x": 3}, "a whole number"),
        ("training.rounds", float("nan"), "a whole number"),
        ("training.rounds", -1, "between 0 and 1000000"),
        ("seed", -1, "between 0 and 9.2"),
        ("seed", 2**63, "between 0 and 9.2"),
        ("experts.rank", 1e9, "between 1 and 4096"),
        ("training.lr", "fast", "a number"),
        ("training.lr", -1e-4, "at least 0"),
        ("backbone.max_length", 15, "between 16 and 1000000"),
        ("data.holdout", 0.41, "between 0 and 0.4"),
        ("experts.dropout", -0.1, "between 0 and 0.9"),
        ("backbone.end_of_answer", "maybe", "true or false"),
        ("backbone.end_of_answer", 1, "true or false"),
        ("backbone.model", 3, "text"),
        ("backbone.revision", 3, "text"),
        ("output", ["a"], "text"),
        ("experts.target_modules", [], "a list of names"),
        ("experts.target_modules", ["q_proj", 3], "a list of names"),
        ("experts.target_modules", 3, "a list of names"),
        ("training.clients_per_step", "most", "a whole number"),
        ("evaluation.routing", "sparce", "'sparse'"),
        ("data.source", "jsonlines", "'jsonl'"),
        ("backbone.dtype", "float16", "'bfloat16'"),
        ("evaluation.rouge", 3, "rouge-score, paper"),
        ("discovery.clusterer", "k-means", "'kmeans'"),
        ("method", "fedweav", "'fedweave'"),
        ("training", 5, "keys and values"),
        ("router.warm_start", [1], "keys and values"),
        ("training.rounds", float("inf"), "a whole number"),
        ("seed", 10**400, "a whole number"),
        ("training.lr", float("inf"), "a number"),
    ],
)
def test_bad_value_is_named_with_its_key_and_a_remedy(key, value, remedy):
    message = complaint(nested(key, value))
    assert message.startswith(key)
    assert remedy in message


def test_large_seed_is_kept_exactly():
    assert from_tree({"seed": 2**53 + 1}).seed == 2**53 + 1


@pytest.mark.parametrize(
    ("tree", "keys"),
    [
        ({"data": {"source": "jsonl"}}, ["data.source=jsonl", "data.path"]),
        ({"data": {"source": "sample", "path": "x"}}, ["data.source=sample", "data.path"]),
        ({"training": {"clients_per_step": 0}}, ["training.clients_per_step", "auto or at least 1"]),
        ({"evaluation": {"batch_size": 0}}, ["evaluation.batch_size", "auto or at least 1"]),
        ({"training": {"participation": 2.5}}, ["training.participation", "whole number"]),
    ],
)
def test_rules_that_span_keys_name_them(tree, keys):
    message = complaint(tree)
    assert all(key in message for key in keys)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.rounds", "'training.rounds' is not of the form key=value"),
        ("=3", "'=3' is not of the form key=value"),
        ("seed.low=3", "'seed' has no keys below it"),
        ("experts.target_modules=[q_proj", "the value of experts.target_modules is not valid YAML"),
    ],
)
def test_malformed_override_is_a_user_error(recipe, override, message):
    with pytest.raises(UserError, match=re.escape(message)):
        load_config(recipe("seed: 3"), [override])


def test_override_below_an_empty_section(recipe):
    assert load_config(recipe("training:\n"), ["training.rounds=3"]).training.rounds == 3


@pytest.mark.parametrize(("text", "overrides"), [("output: 2024-13-45\n", []), ("", ["output=2024-13-45"])])
def test_impossible_date_is_a_user_error(recipe, text, overrides):
    with pytest.raises(UserError, match="not valid YAML"):
        load_config(recipe(text), overrides)


LAUGHS = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10))


@pytest.mark.parametrize("text", [f"a0: &a0 [x, x]\n{LAUGHS}method: *a9\n", "data: &a {tasks: [*a]}\n"])
def test_aliases_that_stand_for_a_billion_values_are_not_written_out(recipe, text):
    """The federation's config comes from a server, and a run's from whoever made it."""
    with pytest.raises(UserError, match="stand for too many values"):
        load_config(recipe(text))
    assert load_config(recipe("seed: &n 3\ntraining: {rounds: *n}\n")).training.rounds == 3


def test_recipe_that_is_not_utf8_is_a_user_error(tmp_path):
    (tmp_path / "latin.yaml").write_bytes("# für\nseed: 3\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin\.yaml.*UTF-8"):
        load_config(tmp_path / "latin.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [("seed: 3\ndata: [1\n", r"mine\.yaml, line \d is not valid YAML"), ("- a\n", "must hold keys and values")],
)
def test_malformed_recipe_is_a_user_error_that_names_the_file(recipe, text, message):
    with pytest.raises(UserError, match=message) as caught:
        load_config(recipe(text))
    assert "mine.yaml" in str(caught.value)


def test_unknown_recipe_names_the_nearest_one():
    with pytest.raises(UserError, match="'quikstart': did you mean 'quickstart'"):
        find_recipe("quikstart")


def test_missing_recipe_file_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match=r"no config file .*gone\.yaml"):
        find_recipe(tmp_path / "gone.yaml")


# -------------------------------------------------------------------------------------- printing


def test_printed_config_loads_back_as_itself(recipe):
    config = load_config(
        recipe("data: {source: jsonl, path: 'Größe/ü'}"),
        ["training.lr=3e-5", "training.clients_per_step=2", "experts.target_modules=[q_proj, o_proj]"],
    )
    assert load_config(recipe(dump_config(config))) == config


def test_reference_lists_every_key_once_with_its_default_and_meaning():
    rows = describe(Config)
    keys = [key for key, _, _ in rows]

    def leaves(tree, prefix=""):
        for name, value in tree.items():
            yield from leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]

    defaults = dict(leaves(to_tree(Config())))
    assert len(keys) == len(set(keys))
    assert keys == list(defaults)
    assert {key: yaml.safe_load(default) for key, default, _ in rows} == yaml.safe_load(yaml.safe_dump(defaults))
    assert all(doc.strip().endswith(".") for _, _, doc in rows)


@pytest.mark.parametrize("name", recipe_names())
def test_packaged_recipe_begins_with_its_own_command_and_loads_so(name):
    first, second, *_ = find_recipe(name).read_text(encoding="utf-8").splitlines()
    assert re.fullmatch(rf"# fedweave run {re.escape(name)}( \S+=\S+)*", first)
    load_config(name)
    load_config(name, first.split()[4:])
    assert re.fullmatch(r"# \S.*\.", second)  # what `fedweave list recipes` shows


def test_fixed_words_are_parted_by_commas_too():
    assert from_tree({"loggers": "wandb, tensorboard"}).loggers == ("wandb", "tensorboard")
    with pytest.raises(UserError, match="did you mean 'wandb'"):
        from_tree({"loggers": "wand,tensorboard"})


def test_a_fault_of_the_file_is_told_with_its_name_and_one_that_was_typed_without(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("training: {ronds: 3}\n")
    with pytest.raises(UserError, match=r"mine\.yaml: unknown config key 'training.ronds'"):
        load_config(path)
    path.write_text("training: {rounds: 3}\n")
    with pytest.raises(UserError, match=r"^unknown config key 'training.ronds'"):
        load_config(path, ["training.ronds=4"])
