"""Small federations on a tiny model."""

from __future__ import annotations

import dataclasses

import pytest

from fedweave.backbone.features import compute_features
from fedweave.config import Config, from_tree
from fedweave.console import Console
from fedweave.data import load_data
from fedweave.federation.client import Client
from fedweave.federation.engines.in_process import InProcessEngine
from fedweave.federation.rounds import federate
from fedweave.methods import build_method
from fedweave.settings import to_tree
from fedweave.training.batch import ClientData


@pytest.fixture
def config(model_folder) -> Config:
    return from_tree({
        "backbone": {"model": str(model_folder("llama")), "max_length": 128},
        "data": {"clients": 3, "alpha": 1.0, "train": 10, "validation": 2, "test": 2},
        "experts": {"rank": 4, "dropout": 0.0},
        "discovery": {"warmup_steps": 2, "max_buckets": 3, "restarts": 2},
        "training": {"rounds": 1, "local_steps": 4, "batch_size": 4, "lr": 1e-2},
        "router": {"hidden": 16, "lr": 1e-2, "warm_start": {"rounds": 1, "steps": 3}},
    })  # fmt: skip


def with_method(config: Config, method: str) -> Config:
    return from_tree({**to_tree(config), "method": method})


def make_engine(config: Config, backbone, shuffle_labels: bool = False) -> InProcessEngine:
    data = load_data(config)
    clients = []
    for i, (name, rows) in enumerate(data.clients.items()):
        if shuffle_labels:
            rows = [dataclasses.replace(e, task=f"nonsense {n % 3}") for n, e in enumerate(rows)]
        encoded = backbone.prompts.encode(rows)
        features = compute_features(backbone, [e.prompt for e in encoded])
        clients.append(Client(i, ClientData(name, encoded, features)))
    return InProcessEngine(backbone, clients, config, Console(quiet=True))


def run(config: Config, engine: InProcessEngine):
    method = build_method(config)
    state = method.prepare(engine)
    final = federate(method, engine, state, range(config.training.rounds), lambda state, report: None)
    engine.detach()
    return state, final
