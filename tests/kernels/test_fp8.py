"""Frozen weights in 8 bits: what is rounded, and what training makes of it."""

import pytest
import torch

from fedweave.errors import UserError
from fedweave.experts.layout import AdapterLayout
from fedweave.kernels import INTERPRETED
from fedweave.kernels.fp8 import LARGEST, EightBit, round_rows
from fedweave.kernels.frozen import back, linear
from tests.helpers import TARGETS, make_lanes, make_trainer

pytestmark = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter rounds to 8 bits in a way of its own")


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_row_is_rounded_by_its_own_largest_number():
    x = numbers(5, 32) * torch.tensor([1e-6, 1.0, 1e4, 0.0, 3.0])[:, None]
    rounded, scale = round_rows(x)
    assert rounded.dtype == torch.float8_e4m3fn and scale.shape == (5, 1)
    assert rounded.float().abs().amax(1).tolist() == [LARGEST, LARGEST, LARGEST, 0.0, LARGEST]
    again = rounded.float() * scale
    assert (again - x).abs().max() <= x.abs().amax(1, keepdim=True).max() / 16  # three bits of mantissa
    for row in (0, 1, 2, 4):
        assert relative(again[row], x[row]) < 0.04


@pytest.mark.parametrize("both", [True, False])
def test_products_and_gradients_are_nearly_those_of_the_weight(both):
    weight, bias = numbers(48, 32, seed=1), numbers(48, seed=2)
    x, dy = numbers(7, 32, seed=3).requires_grad_(), numbers(7, 48, seed=4)
    kept = EightBit(weight, both)
    y = linear(x, kept, bias)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert 0 < relative(y, x @ weight.T + bias) < 0.06
    if both:
        assert 0 < relative(dx, dy @ weight) < 0.06
    else:
        assert torch.equal(dx, back(dy, weight))


def test_a_token_feels_no_other():
    kept, x = EightBit(numbers(16, 16), True), numbers(6, 16, seed=5)
    assert torch.equal(kept.times(torch.cat([x, 1e6 * x]))[:6], kept.times(x))


def test_weights_of_odd_sides_stay_as_they_are():
    assert EightBit.fits(numbers(32, 48)) and not EightBit.fits(numbers(32, 40))


@pytest.mark.parametrize("fp8", ["forward", "both"])
def test_training_in_8_bits_goes_nearly_the_same_way_and_measures_in_full(backbone, fp8):
    layout = AdapterLayout.of(backbone.linear_layers(TARGETS), 4, 1)
    deltas, losses = {}, {}
    for way, checkpointing in (("off", "off"), (fp8, "off"), (fp8, "on")):
        lanes = make_lanes(backbone, layout, None, clients=2)
        trainer, mixture = make_trainer(backbone, layout, None, fp8=way, checkpointing=checkpointing)
        results = list(trainer.train(lanes, 2))
        mixture.detach()
        deltas[way, checkpointing] = torch.stack([result.delta_theta for result in results])
        losses[way] = torch.tensor([result.losses for result in results])
    assert torch.equal(deltas[fp8, "off"], deltas[fp8, "on"]), "a layer that runs twice rounds the same way twice"
    assert 0 < (losses[fp8] - losses["off"]).abs().max() < 0.2
    alike = torch.cosine_similarity(deltas[fp8, "off"], deltas["off", "off"])
    assert (alike > 0.5).all() and not torch.equal(deltas[fp8, "off"], deltas["off", "off"])


def test_where_it_cannot_be_it_is_one_sentence(backbone):
    with pytest.raises(UserError, match="fp8=both needs a GPU of NVIDIA's Ada"):
        backbone.check_fp8("both")
    backbone.check_fp8("off")
