"""What training takes of a GPU's memory, and how many clients at a time go into cards of usual sizes."""

from __future__ import annotations

from dataclasses import dataclass

from fedweave.analysis.shapes import ModelShape
from fedweave.config import Config
from fedweave.experts.layout import AdapterLayout
from fedweave.training.fit import USABLE, choose, most_lanes
from fedweave.training.memory import Step, StepMemory
from fedweave.training.pace import Pace

CARDS = (8, 16, 24, 48, 80)  # GiB
CONTEXT = 0.7 * 2**30  # bytes that CUDA and compiled kernels take beside all tensors
_GIB = 2**30


@dataclass(frozen=True)
class Card:
    """What fits into one."""

    gib: int
    kept: int  # clients at a time with all activations kept; 0: not one
    again: int  # with layers that run twice
    chosen: str  # what clients_per_step and checkpointing make of it: "kept", "again", or "" where nothing fits


@dataclass(frozen=True)
class Memory:
    """Bytes at the peak with all clients of a round together, by part, and what cards hold."""

    clients: int
    examples: int  # of a client's step
    tokens: float  # of an example
    kept: dict[str, float]  # bytes with all activations kept
    again: dict[str, float]  # with layers that run twice
    cards: list[Card]


def predict_memory(shape: ModelShape, layout: AdapterLayout, trained: int, config: Config, tokens: float) -> Memory:
    """``trained`` numbers of a client, examples of so many tokens."""
    training, element = config.training, 4 if config.backbone.dtype == "float32" else 2
    memory = shape.memory(layout, element)
    backbone = shape.backbone_bytes(config.backbone.weights, memory)
    if config.backbone.weights == "dense":
        backbone += memory.rounded(training.fp8)
    one = Step(1, training.batch_size * tokens, trained, mean=tokens)
    share = training.participation
    clients = max(1, round(share if share > 1 else share * config.data.clients))

    def parts(again: bool) -> dict[str, float]:
        return {"backbone": backbone, **memory.training(one.times(clients), again)}

    pace = Pace(shape.parameters, shape.config.num_hidden_layers)
    cards = [_card(gib, memory, backbone, one, clients, config, pace) for gib in CARDS]
    return Memory(clients, training.batch_size, tokens, parts(False), parts(True), cards)


def _card(
    gib: int, memory: StepMemory, backbone: float, one: Step, clients: int, config: Config, pace: Pace
) -> Card:
    free = gib * _GIB - CONTEXT - backbone
    kept, again = (min(clients, most_lanes(memory, one, USABLE * free, way)) for way in (False, True))
    if max(kept, again) == 0:
        return Card(gib, kept, again, "")
    fit = choose(memory, pace, one, clients, free, config.training)
    return Card(gib, kept, again, "again" if fit.checkpointing else "kept")
