"""Which linear layers of a model carry experts, by the names of ``experts.target_modules``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from fedweave.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALL = "all-linear"  # every linear layer but the output layer


def linear_layers(model: PreTrainedModel, targets: Sequence[str], title: str) -> dict[str, torch.nn.Linear]:
    """The linear layers of ``model`` whose names end as ``targets`` say, in model order."""
    linear = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    if tuple(targets) == (ALL,):
        return {name: module for name, module in linear.items() if module is not model.get_output_embeddings()}
    found = {
        name: module
        for name, module in model.named_modules()
        if any(name == t or name.endswith(f".{t}") for t in targets)
    }
    missing = [t for t in targets if not any(n == t or n.endswith(f".{t}") for n in found)]
    if missing:
        raise UserError(
            f"experts.target_modules: {missing[0]!r} matches no layer of {title}; its linear layers "
            f"are {', '.join(sorted(set(kinds(linear))))}; {ALL} alone stands for all but the output layer."
        )
    for name, module in found.items():
        if module is model.get_output_embeddings():
            raise UserError(f"experts.target_modules: {name!r} is the output layer, which carries no experts.")
        if not isinstance(module, torch.nn.Linear):
            raise UserError(f"experts.target_modules: {name} is a {type(module).__name__}, not a linear layer.")
    return found


def kinds(names: Iterable[str]) -> list[str]:
    """The last parts of layers' names, each once: q_proj, v_proj."""
    return list(dict.fromkeys(name.split(".")[-1] for name in names))


def spelled_out(targets: Sequence[str], names: Iterable[str]) -> list[str]:
    """``targets`` as names that every loader of adapters understands; ``names`` are those of the layers."""
    return kinds(names) if tuple(targets) == (ALL,) else list(targets)
