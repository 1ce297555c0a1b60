"""Federated methods by name: the module and class of each. Nothing is imported until a run needs it."""

from __future__ import annotations

METHODS = {
    "fedweave": "fedweave.methods.fedweave:FedWeave",
    "fedit": "fedweave.methods.single:FedIT",
    "ffa-lora": "fedweave.methods.single:FFALoRA",
    "fedsa-lora": "fedweave.methods.single:FedSALoRA",
    "fedlease": "fedweave.methods.fedlease:FedLEASE",
    "without-prototype-expert": "fedweave.methods.ablations:WithoutPrototypeExpert",
    "without-client-router": "fedweave.methods.ablations:WithoutClientRouter",
    "oracle": "fedweave.methods.oracle:Oracle",
    "local-only": "fedweave.methods.single:LocalOnly",
}
