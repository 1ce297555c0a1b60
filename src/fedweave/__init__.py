"""FedWeave: federated mixture-of-LoRA-experts fine-tuning. Experts need purity, routers need contrast.

from fedweave import FedWeaveModel

model = FedWeaveModel.from_pretrained("runs/quickstart")      # a run or an exported bundle
model.generate(["Fix the grammar: Ada go to school."])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedweave.inference.model import FedWeaveModel

__version__ = "0.1.0"
__all__ = ["FedWeaveModel", "__version__"]


def __getattr__(name: str) -> Any:
    """The model is imported when it is asked for: `fedweave --version` must not wait for torch."""
    if name == "FedWeaveModel":
        from fedweave.inference.model import FedWeaveModel

        return FedWeaveModel
    raise AttributeError(f"module 'fedweave' has no attribute {name!r}")
