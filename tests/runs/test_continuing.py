"""`init=BUNDLE`: a new federation starts from a bundle's experts and router, and says when it cannot."""

import shutil

import pytest
import torch

from fedweave.cli import main
from fedweave.runs.use import export_run, load
from tests.helpers import read_json


@pytest.fixture(scope="module")
def first(tiny_run, tmp_path_factory):
    """A bundle to go on from."""
    folder = tmp_path_factory.mktemp("first") / "bundle"
    export_run(tiny_run(), folder)
    return folder


def test_a_federation_goes_on_from_a_bundle(first, tmp_path, small):
    second = tmp_path / "second"
    options = [*small, f"init={first}", "seed=7", "training.rounds=0"]
    assert main(["run", "quickstart", *options, f"output={second}", "--quiet"]) == 0
    old, new = load(first), load(second)
    routers = [model.experts.forgetting().phi for model in (old, new)]
    assert torch.equal(old.theta, new.theta) and torch.equal(*routers)
    # every bucket was given to the expert that the router prefers for its prompts
    discovery = read_json(second / "discovery.json")
    assert discovery["experts"] == old.mixture.layout.experts
    assert all(0 <= m < discovery["experts"] for c in discovery["clients"].values() for m in c["experts"])

    assert main(["resume", str(second), "training.rounds=2", "--quiet"]) == 0
    moved = load(second, last=True)
    served = {m for c in discovery["clients"].values() for m in c["experts"]}
    owner = moved.mixture.layout.expert_of_column
    for m in range(moved.mixture.layout.experts):
        assert torch.equal(moved.theta[owner == m], old.theta[owner == m]) == (m not in served)


def test_the_bundle_is_not_needed_once_the_run_has_begun(first, tmp_path, small):
    second, bundle = tmp_path / "second", shutil.copytree(first, tmp_path / "bundle")
    options = [*small, f"init={bundle}", "training.rounds=1", f"output={second}", "--quiet"]
    assert main(["run", "quickstart", *options]) == 0
    shutil.rmtree(bundle)
    assert main(["resume", str(second), "training.rounds=2", "--quiet"]) == 0


LIVING = ["living.notice=open", "living.least=8", "discovery.warmup_steps=6", "discovery.warmup_lr=1e-2"]


@pytest.fixture(scope="module")
def knowing(tiny_run, tmp_path_factory):
    """A bundle of three kinds that has kept its signatures."""
    folder = tmp_path_factory.mktemp("knowing") / "bundle"
    export_run(tiny_run(*LIVING, "data.train=40", "data.tasks=[edit,mood,choice]"), folder)
    return folder


def test_a_kind_that_the_bundle_has_never_seen_opens_an_expert(knowing, tmp_path, small):
    run = tmp_path / "run"
    options = [*small, *LIVING, f"init={knowing}", "data.train=40", "data.tasks=[edit,sum]", "training.rounds=1"]
    assert main(["run", "quickstart", *options, f"output={run}", "--quiet"]) == 0
    old, new = load(knowing), load(run)
    known, experts = old.mixture.layout.experts, new.mixture.layout.experts
    discovery = read_json(run / "discovery.json")
    assert experts > known and discovery["experts"] == experts
    owners = {
        task: {m for name, tasks in discovery["bucket_tasks"].items() for m, own in
               zip(discovery["clients"][name]["experts"], tasks, strict=True) if max(own, key=own.get) == task}
        for task in ("edit", "sum")
    }  # fmt: skip
    assert max(owners["sum"]) >= known, "sums have an expert of their own"
    assert main(["resume", str(run), "training.rounds=2", "--quiet"]) == 0


def test_signatures_that_cannot_be_compared_are_one_sentence(first, knowing, tmp_path, small, complains):
    options = [*small, *LIVING, f"output={tmp_path / 'run'}", "--quiet"]
    assert "has no signatures to tell new kinds from" in complains("run", "quickstart", *options, f"init={first}")
    other = [*options, f"init={knowing}", "discovery.warmup_steps=3"]
    assert "set discovery.warmup_steps=6" in complains("run", "quickstart", *other)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("experts.rank=2", "set experts.rank=4"),
        ("experts.alpha=8", "set experts.alpha=16"),
        ("experts.target_modules=[q_proj]", "set experts.target_modules=[q_proj,v_proj]"),
        ("method=fedit", "set method=fedweave"),
        ("backbone.max_length=64", "another backbone, tokenizer or prompt rendering"),
        ("init=nowhere", "nowhere is no bundle"),
    ],
)
def test_a_bundle_that_does_not_fit_is_one_sentence(first, tmp_path, small, complains, setting, message):
    options = [*small, f"init={first}", setting, f"output={tmp_path / 'second'}", "--quiet"]
    assert message in complains("run", "quickstart", *options)
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize("method", ["fedit", "fedsa-lora", "fedlease"])
def test_baselines_go_on_too(tiny_run, tmp_path, small, method):
    options = [f"method={method}", "experts.single_rank=4", "training.rounds=1"]
    first, second = tiny_run(*options), tmp_path / "second"
    export_run(first, tmp_path / "bundle", last=True)
    continued = [*small, *options, f"init={tmp_path / 'bundle'}", f"output={second}", "--quiet"]
    assert main(["run", "quickstart", *continued]) == 0
    old, new = (load(run, last=True) for run in (first, second))
    assert old.theta.shape == new.theta.shape and not torch.equal(old.theta, new.theta)
