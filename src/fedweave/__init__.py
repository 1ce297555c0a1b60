"""FedWeave: federated mixture-of-LoRA-experts fine-tuning. Experts need purity, routers need contrast.

model = fedweave.load_model("runs/quickstart")
model.answer(["Fix the grammar: Ada go to school."])
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "load_model"]

if TYPE_CHECKING:
    from fedweave.runs.use import load_model


def __getattr__(name: str) -> Any:
    """Import torch and transformers only when a model is asked for."""
    if name == "load_model":
        from fedweave.runs.use import load_model

        return load_model
    raise AttributeError(f"module 'fedweave' has no attribute {name!r}")
