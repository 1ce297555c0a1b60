"""The stacked mixture against a plain loop over experts, and against PEFT's own LoRA."""

import copy

import numpy as np
import pytest
import torch

from fedweave.backbone.packing import pack
from fedweave.experts.layout import AdapterLayout
from fedweave.experts.mixture import Mixture
from tests.helpers import TARGETS, random_theta


def random_rows(backbone, lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(4, len(backbone.tokenizer), n).astype(np.int32) for n in lengths]


@pytest.mark.parametrize("experts", [1, 3])
def test_stacked_layer_equals_a_loop_over_experts(experts):
    torch.manual_seed(0)
    linear = torch.nn.Linear(16, 24)
    layout = AdapterLayout.of({"q": linear}, rank=4, experts=experts)
    theta = random_theta(layout, 1, 0.3)
    x, gates = torch.randn(1, 7, 16), torch.rand(1, 7, experts).softmax(-1)
    expected = linear(x)
    for m in range(experts):
        named = layout.named(theta, m)
        a, b = named["base_model.model.q.lora_A.weight"], named["base_model.model.q.lora_B.weight"]
        expected = expected + gates[..., m : m + 1] * (16 / 4) * (x @ a.T @ b.T)
    mixture = Mixture({"q": linear}, layout, alpha=16)
    theta.requires_grad_()
    weights = layout.views(theta[None])
    with torch.no_grad(), mixture.active(weights, gates):
        torch.testing.assert_close(linear(x), expected)
        with torch.enable_grad():  # whether a gradient is wanted is asked where the layer runs
            again = linear(x)
    torch.testing.assert_close(again, expected)
    assert torch.autograd.grad(again.sum(), theta)[0].any()
    mixture.detach()


@pytest.mark.parametrize("experts", [1, 3])
def test_what_experts_share_is_one_adapter_of_its_own_rank_and_scale_for_every_prompt(experts):
    torch.manual_seed(0)
    linear = torch.nn.Linear(16, 24)
    layout = AdapterLayout.of({"q": linear}, rank=4, experts=experts, shared=8)
    theta = random_theta(layout, 1, 0.3)
    x, gates = torch.randn(1, 7, 16), torch.rand(1, 7, experts).softmax(-1)
    plain, owner = layout.with_experts(experts), layout.expert_of_column
    shared = layout.shared_part.views(theta[owner == experts])[0]
    expected = linear(x) + (16 / 8) * (x @ shared["A"].T @ shared["B"])
    for m in range(experts):
        own = plain.with_experts(1).views(layout.unstack(theta)[m])[0]
        expected = expected + gates[..., m : m + 1] * (16 / 4) * (x @ own["A"].T @ own["B"])
    mixture, weights = Mixture({"q": linear}, layout, alpha=16), layout.views(theta[None])
    with torch.no_grad(), mixture.active(weights, gates):
        torch.testing.assert_close(linear(x), expected)
        with torch.enable_grad():
            torch.testing.assert_close(linear(x), expected)
    if experts == 1:
        with torch.no_grad(), mixture.active(weights, None):
            torch.testing.assert_close(linear(x), expected)
    mixture.detach()


def test_one_expert_equals_peft_lora(backbone):
    from peft import LoraConfig, get_peft_model

    layout = AdapterLayout.of(backbone.linear_layers(TARGETS), rank=4, experts=1)
    theta = random_theta(layout, 2, 0.2)
    rows = random_rows(backbone, [9, 14])
    mixture = Mixture(backbone.linear_layers(TARGETS), layout, alpha=16)
    with torch.no_grad(), mixture.active(layout.views(theta[None]), None):
        ours = backbone.hidden(pack([rows], backbone.device)).split([9, 14])
    mixture.detach()

    with backbone.decoding():
        peft = get_peft_model(
            copy.deepcopy(backbone.model),
            LoraConfig(r=4, lora_alpha=16, target_modules=list(TARGETS), lora_dropout=0.0, task_type="CAUSAL_LM"),
        ).eval()
    state = peft.state_dict()
    for name, tensor in layout.named(theta, 0).items():
        key = name.replace(".weight", ".default.weight")
        assert state[key].shape == tensor.shape
        state[key].copy_(tensor)
    for row, mine in zip(rows, ours, strict=True):
        with torch.no_grad():
            theirs = peft.base_model.model.base_model(torch.from_numpy(row).long()[None]).last_hidden_state[0]
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4)


def test_detached_mixture_leaves_the_model_untouched(backbone):
    rows = random_rows(backbone, [6])
    packed = pack([rows], backbone.device)
    with torch.no_grad():
        before = backbone.hidden(packed)
        layout = AdapterLayout.of(backbone.linear_layers(TARGETS), 4, 2)
        mixture = Mixture(backbone.linear_layers(TARGETS), layout, 16)
        assert torch.equal(backbone.hidden(packed), before), "attached but inactive experts must change nothing"
        gates = torch.full((1, 6, 2), 0.5)
        with mixture.active(layout.views(random_theta(layout, 0)[None]), gates):
            assert not torch.equal(backbone.hidden(packed), before)
        mixture.detach()
        assert torch.equal(backbone.hidden(packed), before)
