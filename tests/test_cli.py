"""The command line: what the cheap verbs print, and one line and exit code 2 for every mistake."""

import io
import json
import runpy
import sys

import pytest
import yaml

import fedweave
from fedweave.cli import main
from fedweave.config import find_recipe, from_tree, load_config, recipe_names
from fedweave.data import load_data
from fedweave.methods import METHODS
from fedweave.runs.folder import RunFolder
from tests.helpers import contents, read_json

NO_MODEL = "backbone.model=./none"  # a test that fails must not fetch the default model


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """An empty working folder of its own for every test."""
    folder = tmp_path / "place"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def complains(complains, place):
    """As everywhere; and nothing may have been created or changed."""

    def call(*argv: str) -> str:
        before = set(place.rglob("*")), contents(place)
        line = complains(*argv)
        assert (set(place.rglob("*")), contents(place)) == before
        return line

    return call


# -------------------------------------------------------------------------------------- cheap verbs


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"fedweave {fedweave.__version__}\n"


@pytest.mark.parametrize("module", ["fedweave", "fedweave.cli"])
def test_the_package_is_the_command_too(module, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [module, "--version"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module(module, run_name="__main__")
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"fedweave {fedweave.__version__}\n"


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("recipes", recipe_names()),
        ("methods", list(METHODS)),
        ("models", ["HuggingFaceTB/SmolLM2-135M-Instruct", "google/gemma-2-2b", "meta-llama/Llama-3.2-3B"]),
        ("clusterers", ["agglomerative", "kmeans", "spectral"]),
    ],
)
def test_list_names_everything_once(says, what, names):
    first = [line.split()[0] for line in says("list", what).splitlines()]
    assert len(first) == len(set(first))
    assert set(names) <= set(first)
    assert what == "models" or set(names) == set(first)


def test_list_says_what_each_recipe_is(says):
    for line in says("list", "recipes").splitlines():
        name, _, headline = line.partition("  ")
        assert f"# {headline.strip()}\n" in find_recipe(name).read_text(encoding="utf-8")
        assert headline.strip() and "fedweave run" not in headline


def test_config_without_a_recipe_is_the_reference(says):
    reference = says("config")
    assert "training.rounds = 20\n    Communication rounds T.\n" in reference
    assert "router.warm_start.steps = " in reference


def test_config_of_a_recipe_is_the_resolved_config(says):
    printed = yaml.safe_load(says("config", "quickstart", "training.rounds=9"))
    assert from_tree(printed) == load_config("quickstart", ["training.rounds=9"])


def test_copy_keeps_comments_and_the_copy_loads(says, place):
    says("copy", "quickstart", "mine.yaml")
    assert (place / "mine.yaml").read_text() == find_recipe("quickstart").read_text()
    assert load_config("mine.yaml") == load_config("quickstart")


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["list"], ["list", "colours"], ["run"]])
def test_command_that_argparse_refuses_exits_with_2(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    assert "usage: fedweave" in capsys.readouterr().err


# -------------------------------------------------------------------------------------- mistakes of run


def test_run_of_an_unknown_recipe(complains):
    assert "'quikstart': did you mean 'quickstart'?" in complains("run", "quikstart")


def test_run_of_a_missing_file(complains):
    assert "no config file mine.yaml" in complains("run", "mine.yaml")


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        (["run", "quickstart", "--output", "X"], "--output X; settings have no dashes: output=X"),
        (["run", "quickstart", "seed=3", "--training.rounds=5"], "settings have no dashes: training.rounds=5"),
        (["resume", "runs/a", "--local-steps", "5"], "settings have no dashes: training.local_steps=5"),
        (["run", "quickstart", "--gpu"], "unrecognized arguments: --gpu\n"),
        (["generate", "runs/a", "--seeds", "X"], "unrecognized arguments: --seeds X\n"),
    ],
)
def test_an_option_that_is_a_setting_is_told_how_to_type_it(typed, hint, capsys):
    with pytest.raises(SystemExit) as stop:
        main(typed)
    assert stop.value.code == 2 and hint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.round=3", "unknown config key 'training.round': did you mean 'training.rounds'?"),
        ("training.rounds=many", "training.rounds must be a whole number, not 'many'."),
        ("evaluation.routing=sharp", "evaluation.routing='sharp' is not allowed: did you mean 'sparse'?"),
        ("method=fedweav", "method='fedweav' is unknown: did you mean 'fedweave'?"),
        ("rounds", "'rounds' is not of the form key=value"),
        ("data.source=jsonl", "data.source=jsonl needs data.path"),
    ],
)
@pytest.mark.parametrize("verb", ["run", "config"])
def test_bad_override(complains, verb, override, message):
    assert message in complains(verb, "quickstart", override)


def test_run_on_a_missing_data_folder(complains):
    line = complains("run", "quickstart", NO_MODEL, "data.source=jsonl", "data.path=nowhere")
    assert "data.path=nowhere: there is no such file or folder" in line


def test_run_on_malformed_jsonl_names_the_line(complains, place):
    (place / "data").mkdir()
    (place / "data" / "site.jsonl").write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n\n{oops}\n")
    line = complains("run", "quickstart", NO_MODEL, "data.source=jsonl", "data.path=data")
    assert "site.jsonl:3: not valid JSON" in line


def test_run_into_an_existing_folder(complains, place):
    (place / "old").mkdir()
    (place / "old" / "thesis.txt").write_text("precious")
    line = complains("run", "quickstart", NO_MODEL, "output=old")
    assert "old exists and is no run folder; choose another output." in line


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("backbone.model=./nowhere", "backbone.model=./nowhere is neither a folder"),
        ("backbone.device=tpu", "backbone.device='tpu' is no device"),
        ("experts.target_modules=query", "experts.target_modules: 'query' matches no layer"),
        ("backbone.max_length=16", "leaves no room for its prompt within backbone.max_length=16"),
        ("backbone.prompt=chat", "has no chat template; use backbone.prompt=plain"),
        ("data.clients=500", "data.clients=500, but there are only 240 training examples"),
        ("data.train=4800", "distinct 'edit' examples; lower data.train"),
    ],
)
def test_run_that_cannot_work_stops_before_it_writes(complains, model_folder, override, message):
    settings = [f"backbone.model={model_folder('llama')}", "backbone.device=cpu"]
    assert message in complains("run", "quickstart", *settings, override)


def test_run_with_experts_on_the_output_layer(complains, model_folder):
    settings = ["data.train=4", "data.validation=1", "data.test=1", "experts.target_modules=lm_head"]
    assert "experts.target_modules: 'lm_head'" in complains(
        "run", "quickstart", f"backbone.model={model_folder('llama')}", "backbone.device=cpu", *settings
    )


# -------------------------------------------------------------------------------------- mistakes with runs


@pytest.fixture
def fresh_run(place, model_folder):
    """A run that was stopped before its first checkpoint."""
    config = load_config(
        "quickstart",
        [f"backbone.model={model_folder('llama')}", "backbone.device=cpu", "data.train=6", "data.test=2",
         "data.validation=2", "data.clients=2"],
    )  # fmt: skip
    RunFolder.create(place / "fresh", config, load_data(config).manifest)
    return "fresh"


@pytest.mark.parametrize(
    "argv",
    [("resume", "."), ("resume", "gone"), ("evaluate", "gone"), ("generate", "gone", "Hi"), ("diagnose", "gone")],
)
def test_verbs_on_a_folder_that_is_no_run(complains, argv):
    assert f"{argv[1]} is no run folder: it has no config.yaml." in complains(*argv)


@pytest.mark.parametrize("key", ["training.lr", "seed", "data.alpha", "backbone.prompt", "trainin.rounds"])
def test_resume_with_a_fixed_key(complains, fresh_run, key):
    line = complains("resume", fresh_run, f"{key}=3")
    assert f"{key} is fixed for a run; only output, " in line and "training.rounds" in line


def test_resume_with_a_bad_value_of_a_free_key(complains, fresh_run):
    assert "training.rounds must be between 0 and 1000000, not -1." in complains(
        "resume", fresh_run, "training.rounds=-1"
    )


def test_resume_of_a_run_whose_data_changed(complains, fresh_run, place):
    manifest = read_json(place / fresh_run / "manifest.json")
    manifest["fingerprint"]["test"] = "other"
    (place / fresh_run / "manifest.json").write_text(json.dumps(manifest))
    assert f"the data of {fresh_run} has changed since the run began (test); " in complains("resume", fresh_run)


def test_resume_of_a_run_whose_config_is_damaged(complains, fresh_run, place):
    with open(place / fresh_run / "config.yaml", "a") as out:
        out.write("tempo: fast\n")
    assert "unknown config key 'tempo'" in complains("resume", fresh_run)


@pytest.mark.parametrize(
    ("verb", "lack"), [("diagnose", "no checkpoint"), ("budget", "not been through discovery")]
)
def test_explaining_a_run_that_has_hardly_begun(complains, fresh_run, verb, lack):
    assert lack in complains(verb, fresh_run)


def test_generate_without_a_checkpoint(complains, fresh_run):
    assert f"{fresh_run} has no checkpoint yet; finish it with" in complains("generate", fresh_run, "Hi")


@pytest.mark.parametrize("prompts", [[""], ["Hi", "  "]])
def test_generate_with_an_empty_prompt(complains, fresh_run, prompts):
    assert "there is no prompt" in complains("generate", fresh_run, *prompts)


def test_generate_without_any_prompt(complains, fresh_run, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("\n \n"))
    assert "there is no prompt" in complains("generate", fresh_run)


def test_generate_no_tokens(complains, fresh_run):
    line = complains("generate", fresh_run, "Hi", "--max-new-tokens", "0")
    assert "max_new_tokens must be at least 1" in line


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "--data d.jsonl: there is no such file"),
        ("\n", "the file is empty"),
        ("{}", "d.jsonl:1: no 'prompt'"),
    ],
)
def test_evaluate_on_a_bad_file(complains, fresh_run, place, content, message):
    if content is not None:
        (place / "d.jsonl").write_text(content)
    assert message in complains("evaluate", fresh_run, "--data", "d.jsonl")


# -------------------------------------------------------------------------------------- mistakes of copy


def test_copy_never_overwrites(complains, place):
    (place / "mine.yaml").write_text("seed: 1\n")
    assert "mine.yaml exists; choose another name." in complains("copy", "quickstart", "mine.yaml")


def test_copy_into_a_missing_folder(complains):
    assert "no/mine.yaml cannot be written" in complains("copy", "quickstart", "no/mine.yaml")


def test_copy_to_a_name_that_run_would_not_find(complains):
    assert ".yaml" in complains("copy", "quickstart", "mine")
