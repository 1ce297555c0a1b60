"""How many lanes march together, and whether layers run again on the way back: the fastest way that fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedweave.backbone.device import processes_on
from fedweave.backbone.load import Backbone
from fedweave.config import TrainingConfig
from fedweave.experts.layout import AdapterLayout
from fedweave.training.batch import Lane
from fedweave.training.memory import Step, StepMemory, in_all
from fedweave.training.pace import Pace

USABLE = 0.92  # of the free memory; the rest is for holes between tensors and what libraries take
_LARGEST_OF_TEN = 1.54  # standard deviations above the mean
_CPU_TOKENS = 4096  # a longer step is no faster on a CPU
_CPU_BYTES = 4e9  # of activations in a step on a CPU
_CPU_BYTES_OF_SMALL = 5e8  # the same where weights stay quantised: who wants that has little memory
_WAYS = {"off": [False], "on": [True], "auto": [False, True]}  # whether layers run again; of equals the first


@dataclass
class Fit:
    """How many lanes march together, and why."""

    lanes: int
    why: str
    checkpointing: bool = False


def cpu_tokens(per_token: float, quantised: bool = False) -> int:
    """Most tokens of a step on a CPU; ``per_token`` are the bytes that each keeps. Where the backbone's weights
    stay ``quantised``, fewer: unpacking them costs no more than a few dozen tokens do."""
    least, room = (256, _CPU_BYTES_OF_SMALL) if quantised else (512, _CPU_BYTES)
    return min(_CPU_TOKENS, max(least, int(room / per_token)))


def cpu_lanes(lanes: int, tokens: float, limit: int) -> int:
    """How many of so many lanes, each with so many ``tokens``, march together where a step has at most ``limit``:
    groups are about equal, for short steps are slow ones."""
    groups = math.ceil(lanes / max(1, int(limit / tokens)))
    return math.ceil(lanes / groups)


def lanes_that_fit(
    backbone: Backbone, layout: AdapterLayout, lanes: Sequence[Lane], training: TrainingConfig
) -> Fit:
    """As many as asked for, or as the memory holds."""
    memory = step_memory(backbone, layout)
    one, ways = one_lane(lanes), _WAYS[training.checkpointing]
    asked = training.clients_per_step
    if backbone.device.type != "cuda":
        again = ways[0] or (len(ways) > 1 and one.tokens * memory.token_bytes() > _CPU_BYTES)
        if asked != "auto":
            return Fit(int(asked), f"training.clients_per_step={asked}", again)
        limit = cpu_tokens(memory.token_bytes(again), backbone.quantised)
        return Fit(cpu_lanes(len(lanes), one.tokens, limit), f"{limit} tokens in a step", again)
    free = torch.cuda.mem_get_info(backbone.device)[0] // processes_on(backbone.device)
    free += torch.cuda.memory_reserved(backbone.device) - torch.cuda.memory_allocated(backbone.device)
    if not backbone.quantised:
        free -= int(memory.rounded(training.fp8))  # which the first step makes
    return choose(memory, pace_of(backbone), one, len(lanes), free, training)


def choose(memory: StepMemory, pace: Pace, one: Step, lanes: int, free: float, training: TrainingConfig) -> Fit:
    """The fastest way to train so many lanes, each with a step like ``one``, in so many free bytes of a GPU."""
    auto, ways = training.clients_per_step == "auto", _WAYS[training.checkpointing]
    asked = lanes if auto else min(int(training.clients_per_step), lanes)
    most = {again: min(asked, most_lanes(memory, one, USABLE * free, again)) for again in ways}

    def seconds(again: bool) -> float:
        """Of one step of all lanes, group by group."""
        groups = math.ceil(lanes / most[again])
        return groups * pace.seconds(one.tokens * lanes / groups, again, training.cuda_graphs)

    fitting = [again for again in ways if most[again] >= (1 if auto else asked)]
    again = min(fitting, key=seconds, default=ways[-1])
    if not auto:
        return Fit(asked, f"training.clients_per_step={asked}", again)
    each = in_all(memory.training(one, again))
    why = f"about {each / 2**30:.2f} GiB each, {free / 2**30:.0f} GiB free"
    return Fit(max(1, most[again]), why + (", layers run twice" if again else ""), again)


def most_lanes(memory: StepMemory, one: Step, room: float, checkpointing: bool) -> int:
    """How many lanes like this one go into so many bytes; what passes by grows up to a block of logits only."""

    def taken(lanes: int) -> float:
        return in_all(memory.training(one.times(lanes), checkpointing))

    low, high = 0, 1
    while taken(high) <= room and high < 1 << 20:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if taken(middle) <= room else (low, middle)
    return low


def step_memory(backbone: Backbone, layout: AdapterLayout) -> StepMemory:
    config = backbone.model.config.get_text_config()
    return StepMemory(config, backbone.decoder is not None, backbone.dtype.itemsize, layout.names, layout.rows)


def pace_of(backbone: Backbone) -> Pace:
    return Pace(backbone.parameters, backbone.model.config.get_text_config().num_hidden_layers)


def one_lane(lanes: Sequence[Lane]) -> Step:
    """The mean of these lanes' steps. Where a batch is of one bucket they differ more than single examples do."""
    lengths = [len(e.ids) for lane in lanes for e in lane.data.examples]
    answers = sum(len(e.ids) - e.answer_start for lane in lanes for e in lane.data.examples)
    mean, batch = float(np.mean(lengths)), max(1, *(len(step) for lane in lanes for step in lane.schedule))
    steps = [sum(len(e.ids) for e in lane.examples(i)) for lane in lanes for i in range(len(lane.schedule))]
    spread = _LARGEST_OF_TEN * float(np.std(steps)) / max(1.0, float(np.mean(steps))) * batch**0.5
    trained = lanes[0].theta.numel() + (lanes[0].phi.numel() if lanes[0].phi is not None else 0)
    trained *= batch if lanes[0].shield is not None else 1  # every example has a gradient of its own
    return Step(1, mean * batch, trained, answers / sum(lengths), max(lengths) / mean, mean, spread)
