"""transformers' own decoder layers, where ``backbone/decoder.py`` does not know an architecture.

The library lets a layer's call be replaced by one that keeps less of it. That is used for every call with
gradients: a layer reads gates of its own, and runs again on the way back where that is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from fedweave.experts.mixture import run_layer_again, with_own_gates

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LibraryLayers:
    """The decoder layers of a model that its library runs."""

    def __init__(self, model: PreTrainedModel):
        from transformers.modeling_layers import GradientCheckpointingLayer

        self._layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        self._again = False
        for layer in self._layers:
            linears = [m for m in layer.modules() if isinstance(m, torch.nn.Linear)]
            layer._gradient_checkpointing_func = partial(self._run, linears)

    def _run(
        self, linears: Sequence[torch.nn.Linear], call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
    ) -> torch.Tensor:
        if self._again:
            return run_layer_again(linears, call, x)
        with with_own_gates(linears):
            return call(x)

    @contextmanager
    def running(self, again: bool) -> Iterator[None]:
        """Where gradients are wanted, layers are called through here. The library also asks a layer's own
        ``training`` for it; its parts stay as they are, so nothing is dropped."""
        if not torch.is_grad_enabled():
            yield
            return
        self._again = again
        self._switch(True)
        try:
            yield
        finally:
            self._switch(False)

    def _switch(self, on: bool) -> None:
        for layer in self._layers:
            layer.gradient_checkpointing = layer.training = on
