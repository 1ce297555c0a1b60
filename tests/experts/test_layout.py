"""The flat layout: views, columns, stacking, initialisation."""

import pytest
import torch

from fedweave.experts.layout import AdapterLayout
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


def test_a_shared_part_has_columns_that_are_no_experts_and_every_adapter_has_it():
    layout = AdapterLayout(("a", "b"), (6, 6), (8, 4), rank=2, experts=3, shared=4)
    theta, owner = random_theta(layout, 1), layout.expert_of_column
    shared = theta[owner == 3]
    assert len(owner) == layout.size and len(shared) == layout.shared_part.size
    assert torch.equal(layout.stack(layout.unstack(theta), shared), theta)
    for m in range(3):
        named = layout.named(theta, m)
        own = layout.with_experts(1).views(layout.unstack(theta)[m])[1]
        common = layout.shared_part.views(shared)[1]
        assert torch.equal(named["base_model.model.b.lora_A.weight"], torch.cat([own["A"], common["A"]]))
        assert torch.equal(named["base_model.model.b.lora_B.weight"], torch.cat([own["B"], common["B"] / 2]).T)


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
