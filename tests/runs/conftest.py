"""A complete run on a tiny model takes about two seconds."""

from __future__ import annotations

import pytest

SMALL = [
    "data.clients=3", "data.train=12", "data.validation=2", "data.test=2", "data.alpha=1.0",
    "experts.rank=4", "experts.dropout=0.1", "discovery.max_buckets=4", "discovery.warmup_steps=2",
    "discovery.restarts=2", "training.rounds=3", "training.local_steps=3", "training.batch_size=4",
    "training.participation=1.0", "router.hidden=16", "router.warm_start.rounds=2", "router.warm_start.steps=5",
    "evaluation.max_new_tokens=4", "backbone.device=cpu", "backbone.max_length=128",
]  # fmt: skip


@pytest.fixture
def small(model_folder) -> list[str]:
    """Overrides that make the quickstart recipe tiny."""
    return [f"backbone.model={model_folder('llama')}", *SMALL]
