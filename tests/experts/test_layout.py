"""The flat layout: views, columns, stacking, and the paper's parameter counts without any weights."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig

from fedweave.experts.layout import AdapterLayout
from fedweave.router.mlp import RouterLayout
from tests.helpers import random_theta


@pytest.fixture
def layout() -> AdapterLayout:
    return AdapterLayout(("a", "b"), (6, 6), (8, 4), rank=2, experts=3)


def test_views_cover_every_column_once_and_share_memory(layout):
    theta = torch.arange(layout.size, dtype=torch.float)
    seen = torch.cat([t.flatten() for layer in layout.views(theta) for t in layer.values()])
    assert torch.equal(seen.sort().values, theta)
    layout.views(theta)[1]["B"].zero_()
    assert (theta == 0).sum() == 3 * 2 * 4 + 1  # that block and column 0


def test_stack_and_unstack_are_inverse_and_agree_with_columns(layout):
    theta = random_theta(layout, 1)
    singles = layout.unstack(theta)
    assert torch.equal(layout.stack(singles), theta)
    for m, single in enumerate(singles):
        rows = slice(m * 2, m * 2 + 2)
        for whole, one in zip(layout.views(theta), layout.with_experts(1).views(single), strict=True):
            assert torch.equal(whole["A"][rows], one["A"]) and torch.equal(whole["B"][rows], one["B"])


def test_is_b_marks_the_b_factors(layout):
    theta = torch.where(layout.is_b, 1.0, 0.0)
    assert all((layer["B"] == 1).all() and (layer["A"] == 0).all() for layer in layout.views(theta))


def test_initialisation_is_kaiming_uniform_shared_by_all_experts_with_zero_b():
    layout = AdapterLayout(("a",), (400,), (8,), rank=8, experts=2)
    layer = layout.views(layout.initial(3))[0]
    bound = 1 / 400**0.5
    reference = torch.empty(8, 400)
    torch.nn.init.kaiming_uniform_(reference, a=5**0.5)
    assert layer["A"].abs().max() <= bound and abs(layer["A"].std() / reference.std() - 1) < 0.05
    assert torch.equal(layer["A"][:8], layer["A"][8:]) and not layer["B"].any()
    assert torch.equal(layout.initial(3), layout.initial(3)) and not torch.equal(
        layout.initial(3), layout.initial(4)
    )


PAPER = {
    "llama": (
        LlamaConfig(
            vocab_size=16,
            hidden_size=3072,
            num_hidden_layers=28,
            num_attention_heads=24,
            num_key_value_heads=8,
            head_dim=128,
            intermediate_size=16,
        ),
        # FedIT, FFA-LoRA, FedLEASE, FedWeave in millions (Table 5), signature numbers
        (9.18, 3.67, 15.48, 10.75, 917_504),
    ),
    "gemma": (
        Gemma2Config(
            vocab_size=16,
            hidden_size=2304,
            num_hidden_layers=26,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=256,
            intermediate_size=16,
        ),
        (6.39, 2.56, 11.12, 7.57, 8 * 26 * (2048 + 1024)),
    ),
}


@pytest.mark.parametrize("name", PAPER)
def test_trainable_parameters_are_those_of_the_papers_table_5(name):
    config, (fedit, ffa, fedlease, fedweave, signature) = PAPER[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = {n: m for n, m in model.named_modules() if n.endswith(("q_proj", "v_proj"))}
    single = AdapterLayout.of(layers, rank=32, experts=1)
    experts = AdapterLayout.of(layers, rank=8, experts=4)
    router = RouterLayout(config.hidden_size, 512, 4)

    def millions(count: int) -> float:
        return round(count / 1e6, 2)

    assert millions(single.size) == fedit
    assert millions(single.signature_size) == ffa
    assert millions(experts.size + 4 * router.size) == fedlease
    assert millions(experts.size + router.size) == fedweave
    assert experts.signature_size == signature
    if name == "llama":
        assert router.size == 1_575_428
