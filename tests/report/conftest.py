"""A finished tiny run for the tests of this folder, and records made of nothing but dictionaries."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from fedweave.config import from_tree
from fedweave.runs.reading import RunRecord
from tests.helpers import read_json

COMPARED = "evaluation.compare_routings=true"  # what a page shows of everything


@pytest.fixture
def finished(tiny_copy) -> Path:
    """A copy that a test may spoil."""
    return tiny_copy(COMPARED)


@pytest.fixture
def grid(tiny_run, tmp_path) -> Path:
    """A comparison's folder: two α with two seeds each; the figures are one run's but for the macro loss."""
    for alpha in (0.1, 0.5):
        for seed in (1, 2):
            folder = shutil.copytree(tiny_run(COMPARED), tmp_path / "grid" / "cells" / f"alpha-{alpha}-seed-{seed}")
            config = yaml.safe_load((folder / "config.yaml").read_text())
            config["data"]["alpha"], config["seed"] = alpha, seed
            (folder / "config.yaml").write_text(yaml.safe_dump(config))
            summary = read_json(folder / "summary.json")
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
