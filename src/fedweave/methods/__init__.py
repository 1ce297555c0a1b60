"""Federated methods by name. A value is the module and class; nothing is imported until a run needs it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedweave.config import Config
    from fedweave.methods.base import Method

METHODS = {
    "fedweave": "fedweave.methods.fedweave:FedWeave",
    "fedit": "fedweave.methods.single:FedIT",
    "ffa-lora": "fedweave.methods.single:FFALoRA",
    "fedsa-lora": "fedweave.methods.single:FedSALoRA",
    "fedlease": "fedweave.methods.fedlease:FedLEASE",
    "without-prototype-expert": "fedweave.methods.ablations:WithoutPrototypeExpert",
    "without-client-router": "fedweave.methods.ablations:WithoutClientRouter",
    "oracle": "fedweave.methods.ablations:Oracle",
    "local-only": "fedweave.methods.single:LocalOnly",
}


def method_class(name: str) -> type[Method]:
    module, cls = METHODS[name].split(":")
    return getattr(importlib.import_module(module), cls)


def build_method(config: Config) -> Method:
    return method_class(config.method)(config)
