"""Products on a CPU are the same through either library, and few sizes are compiled for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fedweave.kernels import host
from fedweave.kernels.frozen import back, linear, times

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@pytest.fixture(autouse=True)
def sooner(monkeypatch):
    monkeypatch.setattr(host, "_sooner", lambda: True)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("lead", [(8,), (12,), (33,), (256,), (300,), (3, 50)])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_torch_in_both_directions(lead, bias):
    w, offset = random(288, 256, seed=1), random(288, seed=2) if bias else None
    x, dy = random(*lead, 256, seed=3).requires_grad_(), random(*lead, 288, seed=4)
    assert host.suits(x, w) and host.suits(dy, w.T)
    mine, theirs = linear(x, w, offset), F.linear(x, w, offset)
    pairs = [
        (mine, theirs),
        (torch.autograd.grad(mine, x, dy)[0], torch.autograd.grad(theirs, x, dy)[0]),
        (times(x.detach(), w), x.detach() @ w.T),
        (back(dy, w), dy @ w),
    ]
    for found, expected in pairs:
        assert found.shape == expected.shape and found.is_contiguous()
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


def test_a_product_goes_into_columns_of_a_larger_one_or_is_added():
    x, w, out = random(20, 256), random(256, 256, seed=1), torch.ones(20, 300)
    host.times(x, w, None, out[:, 10:266])
    torch.testing.assert_close(out[:, 10:266], x @ w.T, atol=1e-4, rtol=1e-5)
    host.times(x, w, None, out[:, 10:266], add=True)
    torch.testing.assert_close(out[:, 10:266], 2 * x @ w.T, atol=1e-4, rtol=1e-5)
    assert (out[:, :10] == 1).all() and (out[:, 266:] == 1).all()


def test_few_numbers_of_rows_are_compiled_for(monkeypatch):
    """What oneDNN compiles is never given back: half a megabyte for each number of rows that a matrix meets."""
    seen = set()

    def noted(x, w, *rest):
        seen.add(len(x))
        return x @ w.T

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", noted)
    w = random(256, 256)
    for rows in range(8, 1000, 7):
        host.times(random(rows, 256), w)
    assert len(seen) <= 1 + host.BLOCK // 32


@pytest.mark.parametrize(
    ("x", "w"),
    [
        (torch.ones(4, 256), torch.ones(256, 256)),
        (torch.ones(32, 64), torch.ones(64, 64)),
        (torch.ones(32, 256).double(), torch.ones(256, 256).double()),
        (torch.ones(32, 256).bfloat16(), torch.ones(256, 256).bfloat16()),
        (torch.ones(32, 256, device="meta"), torch.ones(256, 256, device="meta")),
    ],
)
def test_few_rows_small_weights_and_other_kinds_of_numbers_stay_with_torch(x, w):
    assert not host.suits(x, w)


@pytest.mark.parametrize(
    ("wide", "maker", "sooner"),
    [("AVX512", "AuthenticAMD", True), ("AVX512", "GenuineIntel", False), ("AVX2", "AuthenticAMD", False)],
)
def test_it_is_used_where_mkl_leaves_instructions_unused(monkeypatch, wide, maker, sooner):
    monkeypatch.undo()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: wide)
    monkeypatch.setattr(host, "_maker", lambda: maker)
    assert host._sooner.__wrapped__() == sooner
