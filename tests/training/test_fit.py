"""How many lanes march together, and when layers run twice instead."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from fedweave.backbone.prompts import Encoded, EncodedPrompt
from fedweave.config import TrainingConfig
from fedweave.experts.layout import AdapterLayout
from fedweave.router.mlp import RouterLayout
from fedweave.training.batch import ClientData, Lane
from fedweave.training.fit import choose, cpu_tokens, lanes_that_fit, most_lanes, one_lane
from fedweave.training.memory import Step, StepMemory
from fedweave.training.pace import Pace
from tests.helpers import TARGETS, make_lanes

SMALL = LlamaConfig(
    hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
    intermediate_size=1536, vocab_size=49152,
)  # fmt: skip
LARGE = LlamaConfig(
    hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    intermediate_size=14336, vocab_size=128256,
)  # fmt: skip
ONE = Step(1, 920, 2_000_000)
GIB = 2**30


def fit(config: LlamaConfig, parameters: float, gib: float, lanes: int = 20, **training: str | int | bool):
    memory, pace = StepMemory(config, True, 2, (), 0), Pace(int(parameters), config.num_hidden_layers)
    return choose(memory, pace, ONE, lanes, gib * GIB, TrainingConfig(**training))


def test_on_a_cpu_a_step_has_so_many_tokens(backbone):
    layout = AdapterLayout.of(backbone.linear_layers(TARGETS), 4, 3)
    lanes = make_lanes(backbone, layout, RouterLayout(backbone.width, 16, 3), clients=3)
    assert lanes_that_fit(backbone, layout, lanes, TrainingConfig(clients_per_step=7)).lanes == 7
    roomy = lanes_that_fit(backbone, layout, lanes, TrainingConfig())
    assert roomy.lanes == 3 and "4096 tokens" in roomy.why and not roomy.checkpointing
    mean = np.mean([len(e.ids) for lane in lanes for e in lane.data.examples])
    many = lanes * 20  # 60 lanes in as few groups as there must be, of about the same size
    groups = -(-60 // int(4096 / (mean * 4)))
    assert groups > 1 and lanes_that_fit(backbone, layout, many, TrainingConfig()).lanes == -(-60 // groups)
    assert lanes_that_fit(backbone, layout, lanes, TrainingConfig(checkpointing="on")).checkpointing


def test_on_a_cpu_steps_are_short_where_weights_stay_quantised():
    small, large = (StepMemory(config, True, 4, (), 0).token_bytes() for config in (SMALL, LARGE))
    assert cpu_tokens(small) == 4096 and 700 < cpu_tokens(small, quantised=True) < 800
    assert cpu_tokens(large, quantised=True) == 256 and cpu_tokens(large) > 512


def test_nothing_runs_twice_where_everything_fits():
    found = fit(LARGE, 8e9, gib=130)
    assert (found.lanes, found.checkpointing) == (20, False)


def test_a_large_model_is_split_before_its_layers_run_twice():
    found = fit(LARGE, 8e9, gib=30)
    assert 1 < found.lanes < 20 and not found.checkpointing
    assert fit(LARGE, 8e9, gib=30, checkpointing="on").lanes > found.lanes


def test_a_small_model_runs_its_layers_twice_before_it_is_split_into_many_groups():
    found = fit(SMALL, 1.3e8, gib=2.8)
    assert (found.lanes, found.checkpointing) == (20, True) and "layers run twice" in found.why
    assert fit(SMALL, 1.3e8, gib=2.8, checkpointing="off").lanes < 7
    assert not fit(SMALL, 1.3e8, gib=6).checkpointing, "two groups cost less"


def test_what_does_not_fit_at_all_otherwise_runs_its_layers_twice():
    found = fit(LARGE, 8e9, gib=2.5)
    assert found.checkpointing and found.lanes >= 1
    assert fit(LARGE, 8e9, gib=2.5, checkpointing="off").lanes == 1  # running out of memory says the rest


@pytest.mark.parametrize(("asked", "again"), [(2, False), (20, True)])
def test_a_number_that_was_asked_for_stays(asked, again):
    found = fit(LARGE, 8e9, gib=30, clients_per_step=asked)
    assert (found.lanes, found.checkpointing) == (asked, again)


@pytest.mark.parametrize("again", [False, True])
def test_most_lanes_is_the_largest_that_fits(again):
    memory = StepMemory(LARGE, True, 2, (), 0)
    most = most_lanes(memory, ONE, 40 * GIB, again)
    takes = [sum(memory.training(ONE.times(n), again).values()) for n in (most, most + 1)]
    assert takes[0] <= 40 * GIB < takes[1]
    assert most_lanes(memory, ONE, 1.0, again) == 0


def test_steps_of_one_kind_each_differ_more():
    """The same lengths, mixed in every step or one kind a step."""

    def lane(steps: list[list[int]]) -> Lane:
        lengths = [n for step in steps for n in step]
        examples = [Encoded(EncodedPrompt(np.zeros(4), (0, 4), False), np.zeros(n), 4) for n in lengths]
        schedule = [np.arange(4) + 4 * i for i in range(len(steps))]
        return Lane(ClientData("one", examples, torch.zeros(len(lengths), 1)), schedule, torch.zeros(7), None, (0,))

    mixed, apart = one_lane([lane([[20, 220] * 2] * 4)]), one_lane([lane([[20] * 4, [220] * 4] * 2)])
    assert mixed.tokens == apart.tokens == 480 and mixed.spread == 0
    assert apart.most_tokens == pytest.approx(480 * (1 + 1.54 * 100 / 120))
    assert apart.times(100).most_tokens == pytest.approx(48_000 * (1 + 0.154 * 100 / 120))
