"""`init=BUNDLE`: a new federation starts from a bundle's experts and router, and says when it cannot."""

import json

import pytest
import torch

from fedweave.cli import main
from fedweave.runs.use import export_run, load


@pytest.fixture
def first(tmp_path, small):
    assert main(["run", "quickstart", *small, f"output={tmp_path / 'first'}", "--quiet"]) == 0
    export_run(tmp_path / "first", tmp_path / "bundle")
    return tmp_path / "bundle"


def test_a_federation_goes_on_from_a_bundle(first, tmp_path, small):
    second = tmp_path / "second"
    options = [*small, f"init={first}", "seed=7", "training.rounds=0"]
    assert main(["run", "quickstart", *options, f"output={second}", "--quiet"]) == 0
    old, new = load(first), load(second)
    assert torch.equal(old.theta, new.theta) and torch.equal(old.experts.phi, new.experts.phi)
    # every bucket was given to the expert that the router prefers for its prompts
    discovery = json.loads((second / "discovery.json").read_text())
    assert discovery["experts"] == old.mixture.layout.experts
    assert all(0 <= m < discovery["experts"] for c in discovery["clients"].values() for m in c["experts"])

    assert main(["resume", str(second), "training.rounds=2", "--quiet"]) == 0
    moved = load(second, last=True)
    served = {m for c in discovery["clients"].values() for m in c["experts"]}
    owner = moved.mixture.layout.expert_of_column
    for m in range(moved.mixture.layout.experts):
        assert torch.equal(moved.theta[owner == m], old.theta[owner == m]) == (m not in served)


def test_the_bundle_is_not_needed_once_the_run_has_begun(first, tmp_path, small):
    second = tmp_path / "second"
    options = [*small, f"init={first}", "training.rounds=1", f"output={second}", "--quiet"]
    assert main(["run", "quickstart", *options]) == 0
    (first / "fedweave.json").unlink()
    assert main(["resume", str(second), "training.rounds=2", "--quiet"]) == 0


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
def test_a_bundle_that_does_not_fit_is_one_sentence(first, tmp_path, small, capsys, setting, message):
    options = [*small, f"init={first}", setting, f"output={tmp_path / 'second'}", "--quiet"]
    assert main(["run", "quickstart", *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize("method", ["fedit", "fedsa-lora", "fedlease"])
def test_baselines_go_on_too(tmp_path, small, method):
    options = [*small, f"method={method}", "experts.single_rank=4", "training.rounds=1"]
    assert main(["run", "quickstart", *options, f"output={tmp_path / 'first'}", "--quiet"]) == 0
    export_run(tmp_path / "first", tmp_path / "bundle", last=True)
    second = [*options, f"init={tmp_path / 'bundle'}", f"output={tmp_path / 'second'}", "--quiet"]
    assert main(["run", "quickstart", *second]) == 0
    old, new = (load(tmp_path / f, last=True) for f in ("first", "second"))
    assert old.theta.shape == new.theta.shape and not torch.equal(old.theta, new.theta)
