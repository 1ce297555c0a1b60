"""Kernels that write the 8-bit twin of what they compute: the same numbers as rounding in a pass of its own."""

from __future__ import annotations

import pytest
import torch

from fedweave.kernels import fp8, fused
from fedweave.kernels.fp8 import EightBit, carried, room_for, round_rows
from fedweave.kernels.frozen import Rounded, linear
from fedweave.kernels.gated import gated, gated_product, gated_unit
from fedweave.kernels.layer import add_norm
from tests.kernels.conftest import DEVICE

pytestmark = pytest.mark.skipif(
    not fused(torch.zeros(1, device=DEVICE)), reason="needs a CUDA device (or TRITON_INTERPRET=1 and triton)"
)
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32  # the interpreter knows no bfloat16


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPE)


def alike(one: Rounded | None, other: Rounded) -> None:
    assert one is not None
    assert torch.equal(one.numbers.view(torch.uint8), other.numbers.view(torch.uint8))
    assert torch.equal(one.scale, other.scale)


def test_what_norms_write():
    x, delta, weight = numbers(7, 48), numbers(7, 48, seed=1), numbers(48, seed=2)
    for other in (delta, None):
        twin, alone = room_for((7, 48), DEVICE), room_for((7, 48), DEVICE)
        alike(twin, round_rows(add_norm(x, other, weight, 1e-5, twin)[1]))
        add_norm(x, other, weight, 1e-5, alone, plain=False)
        alike(alone, twin)


@pytest.mark.parametrize("gelu", [False, True])
def test_what_a_gated_unit_writes(gelu):
    both = numbers(5, 2 * 1100)
    twin, alone = room_for((5, 1100), DEVICE), room_for((5, 1100), DEVICE)
    alike(twin, round_rows(gated(both, gelu, twin)))
    gated_unit(both.requires_grad_(), gelu, alone, plain=False)
    alike(alone, twin)


@pytest.mark.parametrize("both", [True, False])
def test_products_and_gradients_are_those_of_passes_of_their_own(both, monkeypatch):
    """Out product, norm, gated unit: with twins nothing is rounded in between, and the gradient is the same."""
    before, wide = EightBit(numbers(32, 48), both), EightBit(numbers(128, 32, seed=1), both)
    down, weight = EightBit(numbers(32, 64, seed=2), both), numbers(32, seed=3)
    x, s, direction = numbers(9, 48, seed=4).requires_grad_(), numbers(9, 32, seed=5), numbers(9, 32, seed=6)

    def apart() -> torch.Tensor:
        _, h, _ = add_norm(s, linear(x, before, None), weight, 1e-5)
        return linear(gated_unit(linear(h, wide, None)), down, None)

    def within() -> torch.Tensor:
        twin, to_down = room_for((9, 32), DEVICE), room_for((9, 64), DEVICE)
        _, h, _ = add_norm(s, linear(x, before, None), weight, 1e-5, twin, plain=False, slope=both)
        _, m = gated_product(h, wide, None, False, twin, to_down, plain=False)
        return linear(m, down, None, to_down)

    rounded: list[int] = []

    def counted(x: torch.Tensor) -> Rounded:
        rounded.append(len(x))
        return round_rows(x)

    monkeypatch.setattr(fp8, "round_rows", counted)
    found = []
    for way in (apart, within):
        rounded.clear()
        out = way()
        found.append((out.detach(), *torch.autograd.grad(out, x, direction), len(rounded)))
    assert all(torch.equal(one, other) for one, other in zip(found[0][:2], found[1][:2], strict=True))
    # x, h, m and their gradients; with twins x, and the gradient that comes from outside
    assert (found[0][2], found[1][2]) == ((6, 2) if both else (3, 1))


def test_a_gradient_carries_its_twin_to_the_product_before():
    x, delta, weight = numbers(7, 48), numbers(7, 48, seed=1).requires_grad_(), numbers(48, seed=2)
    seen: list[torch.Tensor] = []
    doubled = delta * 1
    doubled.register_hook(seen.append)
    _, h, _ = add_norm(x, doubled, weight, 1e-5, slope=True)
    h.sum().backward()
    alike(carried(seen[0]), round_rows(seen[0]))
