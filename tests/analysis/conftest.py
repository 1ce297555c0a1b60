"""Finished tiny runs, one per kind, shared by the tests that only read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedweave.cli import main
from tests.runs.conftest import SMALL


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory, model_folder):
    """Call with overrides of the quickstart to get the folder of a finished tiny run."""
    made: dict[tuple[str, ...], Path] = {}

    def make(*overrides: str) -> Path:
        if overrides not in made:
            folder = tmp_path_factory.mktemp("run") / "run"
            model = f"backbone.model={model_folder('llama')}"
            assert main(["run", "quickstart", model, *SMALL, *overrides, f"output={folder}", "--quiet"]) == 0
            made[overrides] = folder
        return made[overrides]

    return make


@pytest.fixture(scope="session")
def unlabelled_run(tiny_run, tmp_path_factory):
    """A run on own JSONL data, whose rows carry no task."""
    data = tmp_path_factory.mktemp("data")
    for name, verb in (("north", "Add"), ("south", "Spell")):
        rows = [{"prompt": f"{verb} {i} and {i}", "response": str(2 * i)} for i in range(20)]
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tiny_run("data.source=jsonl", f"data.path={data}", "evaluation.scores=false")
