"""Cells that are quick."""

import pytest


@pytest.fixture
def quick(small) -> list[str]:
    """Cells that take a fraction of a second each."""
    return [*small, "data.train=6", "training.rounds=1", "training.local_steps=1", "experts.single_rank=8"]
