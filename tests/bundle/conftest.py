"""Fresh bundles of one trained run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def bundle(exported, tmp_path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(exported, tmp_path / "bundle"))
