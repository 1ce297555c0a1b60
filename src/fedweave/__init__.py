"""FedWeave: federated mixture-of-LoRA-experts fine-tuning. Experts need purity, routers need contrast.

import fedweave

model = fedweave.load("runs/quickstart")      # a run or an exported bundle
model.generate(["Fix the grammar: Ada go to school."])
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedweave.inference.model import FedWeaveModel
    from fedweave.runs.use import load

__version__ = "0.1.0"
__all__ = ["FedWeaveModel", "__version__", "load"]


def __getattr__(name: str) -> object:
    """Imported when asked for: `fedweave --version` must not wait for torch."""
    places = {"FedWeaveModel": "fedweave.inference.model", "load": "fedweave.runs.use"}
    if name in places:
        return getattr(import_module(places[name]), name)
    raise AttributeError(f"module 'fedweave' has no attribute {name!r}")
