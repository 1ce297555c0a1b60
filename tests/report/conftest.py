"""A finished tiny run, made once for all tests of this folder, and records made of nothing but dictionaries."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fedweave.cli import main
from fedweave.config import from_tree
from fedweave.runs.reading import RunRecord
from tests.runs.conftest import SMALL, small

__all__ = ["small"]


@pytest.fixture(scope="session")
def finished_once(tmp_path_factory, model_folder) -> Path:
    folder = tmp_path_factory.mktemp("report") / "run"
    settings = [f"backbone.model={model_folder('llama')}", *SMALL, "evaluation.compare_routings=true"]
    assert main(["run", "quickstart", *settings, f"output={folder}", "--quiet"]) == 0
    return folder


@pytest.fixture
def finished(finished_once, tmp_path) -> Path:
    """A copy that a test may spoil."""
    return shutil.copytree(finished_once, tmp_path / "run")


@pytest.fixture
def grid(finished_once, tmp_path) -> Path:
    """A comparison's folder: two α with two seeds each; the figures are one run's but for the macro loss."""
    import json

    import yaml

    for alpha in (0.1, 0.5):
        for seed in (1, 2):
            folder = shutil.copytree(finished_once, tmp_path / "grid" / "cells" / f"alpha-{alpha}-seed-{seed}")
            config = yaml.safe_load((folder / "config.yaml").read_text())
            config["data"]["alpha"], config["seed"] = alpha, seed
            (folder / "config.yaml").write_text(yaml.safe_dump(config))
            summary = json.loads((folder / "summary.json").read_text())
            summary["test"]["best"]["loss"]["sparse"]["macro"] = 1.0 + seed  # 2 and 3: mean 2.5
            (folder / "summary.json").write_text(json.dumps(summary))
    return tmp_path / "grid"


@pytest.fixture
def record():
    """Call with the parts that matter; everything else is missing."""

    def make(**parts) -> RunRecord:
        config = {"method": "fedweave", "seed": 1, "training": {"rounds": 3}, **parts.pop("config", {})}
        manifest = {"source": "sample", "seed": 1, **parts.pop("manifest", {})}
        return RunRecord(Path("runs/x"), from_tree(config), manifest, **parts)

    return make
