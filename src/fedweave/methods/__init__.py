"""FedWeave, its ablations, and the baselines: each a few steps and rules (:mod:`fedweave.federation.method`)."""

import importlib

from fedweave.config import Config
from fedweave.federation.method import Method
from fedweave.registry import METHODS


def method_class(name: str) -> type[Method]:
    module, cls = METHODS[name].split(":")
    return getattr(importlib.import_module(module), cls)


def build_method(config: Config) -> Method:
    return method_class(config.method)(config)
