"""Small federations on a tiny model."""

from __future__ import annotations

import dataclasses
from typing import Any

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


def changed(config: Config, **sections: Any) -> Config:
    """The config with other values: ``changed(config, method="fedit", training={"rounds": 2})``."""
    tree = to_tree(config)
    for name, value in sections.items():
        tree[name] = {**tree[name], **value} if isinstance(value, dict) else value
    return from_tree(tree)


def with_method(config: Config, method: str) -> Config:
    return changed(config, method=method)


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
    """(state before the rounds, state after them)"""
    method = build_method(config)
    state = method.prepare(engine)
    final = federate(method, engine, state, range(config.training.rounds), lambda state, report: None)
    engine.detach()
    return state, final
