"""FedWeave: federated mixture-of-LoRA-experts fine-tuning. Experts need purity, routers need contrast.

model = fedweave.load_model("runs/quickstart")      # a run or an exported bundle
model.answer(["Fix the grammar: Ada go to school."])
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedweave.inference.model import RoutedModel

__version__ = "0.1.0"
__all__ = ["__version__", "load_model"]


def load_model(folder: str | Path, last: bool = False) -> RoutedModel:
    """The model of a bundle, or of a run's best round (``last=True``: its last), ready to route and answer."""
    from fedweave.bundle import is_bundle, load_bundle
    from fedweave.runs.use import load_models

    folder = Path(folder)
    return load_bundle(folder) if is_bundle(folder) else load_models(folder, last)[1][0]
