"""One trained tiny run for all tests of bundles and serving, and fresh bundles of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fedweave.cli import main
from fedweave.runs.use import export_run
from tests.runs.conftest import SMALL

PROMPTS = ["How many?", "Fix the grammar: Ada go to the park.", "Pick the fruit from this list: dog, plum, bus."]


@pytest.fixture(scope="session")
def run(tmp_path_factory, model_folder) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "run"
    # no end token is trained: answers run on, so that streams, stop strings and hang-ups have something to work on
    settings = [
        f"backbone.model={model_folder('llama')}",
        *SMALL,
        "training.lr=1e-2",
        "backbone.end_of_answer=false",
    ]
    settings += [f"output={folder}"]
    assert main(["run", "quickstart", *settings, "--quiet"]) == 0
    return folder


@pytest.fixture(scope="session")
def exported(run) -> Path:
    """Not to be changed; `bundle` is a copy that may be."""
    export_run(run, run.parent / "exported")
    return run.parent / "exported"


@pytest.fixture
def bundle(exported, tmp_path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "bundle"))
