"""Quantised matrices: worth what the gguf package says, to the last bit, in plain torch and as a Triton kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from fedweave.backbone.blocks import GGUF, kept_bytes, make_nf4, nf4_bits, read_blocks
from fedweave.kernels import INTERPRETED, dequantise, frozen
from fedweave.kernels.dequantise import NF4, Quantised
from fedweave.kernels.frozen import Resident, Scratch, back, linear, times
from tests.kernels.conftest import DEVICE


@pytest.fixture(autouse=True)
def several_pieces(monkeypatch):
    """Of a CPU's work, the last one smaller."""
    monkeypatch.setattr(dequantise, "_IN_CACHE", 1024)


def random_blocks(kind: str, rows: int, columns: int, size: float = 0.1) -> np.ndarray:
    """Any bytes are codes; the float16 numbers among them are made finite."""
    block, length = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    rng = np.random.default_rng(len(kind) + columns)
    data = rng.integers(0, 256, (rows, columns // block, length), dtype=np.uint8)
    at = {"Q6_K": [208]}.get(kind, [0, 2] if kind.endswith(("_1", "4_K", "5_K")) else [0])
    for place in at:
        numbers = rng.normal(0, size, (rows, columns // block, 1)).astype(np.float16)
        data[..., place : place + 2] = numbers.view(np.uint8)
    return data.reshape(rows, -1)


def quantised(kind: str, rows: int, columns: int) -> Quantised:
    if kind.startswith("nf4"):
        weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns))
        return make_nf4(weight, double=kind == "nf4-double").to(DEVICE)
    return read_blocks(kind, torch.from_numpy(random_blocks(kind, rows, columns))).to(DEVICE)


KINDS = [*GGUF, "nf4", "nf4-double"]


@pytest.mark.parametrize("columns", [256, 1792])
@pytest.mark.parametrize("kind", GGUF)
def test_numbers_are_those_of_the_gguf_package_to_the_last_bit(version, kind, columns):
    data = random_blocks(kind, 7, columns)
    expected = torch.from_numpy(dequantize(data, GGMLQuantizationType[kind])).to(DEVICE)
    packed = read_blocks(kind, torch.from_numpy(data)).to(DEVICE)
    assert packed.shape == (7, columns)
    assert torch.equal(packed.dense(torch.float32), expected)
    if not INTERPRETED:  # which cuts a number where a GPU rounds it
        assert torch.equal(packed.dense(torch.bfloat16), expected.bfloat16())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_a_row_may_be_an_odd_number_of_blocks(version, kind):
    data = random_blocks(kind, 5, 96)
    expected = torch.from_numpy(dequantize(data, GGMLQuantizationType[kind])).to(DEVICE)
    assert torch.equal(read_blocks(kind, torch.from_numpy(data)).to(DEVICE).dense(torch.float32), expected)


@pytest.mark.parametrize("double", [False, True])
def test_nf4_takes_the_nearest_of_its_sixteen_values(version, double):
    weight = torch.randn(6, 192, generator=torch.Generator().manual_seed(0))
    weight[2, 64:128] = 0.0
    packed = make_nf4(weight, double).to(DEVICE)
    groups = weight.bfloat16().float().unflatten(1, (3, 64))
    scale = groups.abs().amax(-1, keepdim=True)
    if double:  # one of 255 steps up to the row's largest
        top = scale.amax(1, keepdim=True) / 255
        scale = top * (scale / top).round()
    candidates = scale[..., None] * torch.tensor(NF4)  # [6, 3, 1, 16]
    nearest = (groups[..., None] - candidates).abs().amin(-1)
    found = packed.dense(torch.float32).cpu().unflatten(1, (3, 64))
    torch.testing.assert_close((found - groups).abs(), nearest, atol=1e-6, rtol=1e-5)
    assert not found[2, 1].any()
    assert packed.bytes * 8 / weight.numel() == pytest.approx(nf4_bits(192, double))


def test_nf4_is_the_same_of_a_checkpoint_in_float32_and_in_bfloat16():
    weight = torch.randn(4, 128, generator=torch.Generator().manual_seed(1))
    for one, other in zip(make_nf4(weight).arrays(), make_nf4(weight.bfloat16()).arrays(), strict=True):
        assert torch.equal(one[1], other[1])


@pytest.mark.parametrize("kind", KINDS)
def test_any_rows_are_a_matrix_of_their_own(version, kind):
    packed = quantised(kind, 9, 256)
    whole = packed.dense(torch.float32)
    which = torch.tensor([8, 0, 0, 3], device=DEVICE)
    assert torch.equal(packed.rows(which).dense(torch.float32), whole[which])
    assert torch.equal(packed.rows(slice(2, 6)).dense(torch.float32), whole[2:6])


# -------------------------------------------------------------------------------------- groups side by side


@pytest.mark.parametrize("columns", [96, 256])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_groups_side_by_side_are_the_same_numbers_to_the_last_bit(kind, columns):
    """Also the signs of zeros, which a model's fingerprint tells apart."""
    data = torch.from_numpy(random_blocks(kind, 7, columns))
    packed = read_blocks(kind, data).beside()
    assert packed.groups is not None and packed.shape == (7, columns)
    assert packed.bytes == packed.groups.nbytes == kept_bytes(kind, data.nbytes, groups=True)
    expected = torch.from_numpy(dequantize(data.numpy(), GGMLQuantizationType[kind]))
    for found in (packed.dense(torch.float32), packed.write(torch.empty(7, columns))):
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    assert torch.equal(packed.unpacked(torch.float32), expected)
    assert torch.equal(packed.dense(torch.bfloat16), expected.bfloat16())
    which = torch.tensor([6, 0, 0, 3])
    assert torch.equal(packed.rows(which).dense(torch.float32), expected[which])
    assert torch.equal(packed.rows(slice(2, 6)).unpacked(torch.float32), expected[2:6])


def test_only_simple_formats_lie_in_groups():
    for kind in KINDS:
        packed = quantised(kind, 3, 256).to(torch.device("cpu"))
        assert (packed.beside().groups is not None) == (kind in ("Q4_0", "Q4_1", "Q8_0"))
    large = quantised("Q4_0", 3, 64).to(torch.device("cpu"))
    large.scale[1, 1] = 60_000.0  # eight times that is no float16
    assert large.beside() is large


def test_matrices_in_groups_of_one_format_are_joined():
    cpu = torch.device("cpu")
    one, other = (quantised("Q4_1", rows, 64).to(cpu).beside() for rows in (3, 5))
    joint = Quantised.joined([one, other])
    assert joint is not None and joint.shape == (8, 64)
    assert torch.equal(joint.dense(torch.float32), torch.cat([q.dense(torch.float32) for q in (one, other)]))
    assert Quantised.joined([one, quantised("Q8_0", 2, 64).to(cpu).beside()]) is None
    assert Quantised.joined([one, quantised("Q4_1", 2, 64).to(cpu)]) is None


@pytest.mark.parametrize("at_once", [1 << 20, 1024])
def test_products_with_groups_are_those_of_the_plain_weight_and_need_no_scratch(monkeypatch, at_once):
    monkeypatch.setattr(frozen, "AT_ONCE", {"cpu": at_once})
    cpu = torch.device("cpu")
    packed, scratch = quantised("Q4_1", 15, 256).to(cpu).beside(), Scratch(cpu, torch.float32)
    resident, weight = Resident([packed], scratch), packed.dense(torch.float32)
    x, dy = torch.randn(4, 256), torch.randn(4, 15)
    torch.testing.assert_close(times(x, resident), x @ weight.T, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(back(dy, resident), dy @ weight, atol=1e-5, rtol=1e-5)
    assert scratch._memory is None


# -------------------------------------------------------------------------------------- products


@pytest.mark.parametrize("at_once", [1 << 20, 1024])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_the_plain_weight_in_both_directions(version, monkeypatch, at_once, bias):
    """Parts of several formats, one of them plain, at once or a few rows at a time."""
    monkeypatch.setattr(frozen, "AT_ONCE", {"cpu": at_once, "cuda": at_once})
    plain = torch.randn(5, 256, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    parts = [quantised("Q4_K", 7, 256), plain, quantised("Q6_K", 3, 256)]
    resident = Resident(parts, Scratch(DEVICE, torch.float32))
    weight = torch.cat([parts[0].dense(torch.float32), plain, parts[2].dense(torch.float32)])
    generator = torch.Generator().manual_seed(3)
    offset = torch.randn(15, generator=generator).to(DEVICE) if bias else None
    x = torch.randn(2, 4, 256, generator=generator).to(DEVICE).requires_grad_()
    dy = torch.randn(2, 4, 15, generator=generator).to(DEVICE)
    mine, theirs = linear(x, resident, offset), linear(x, weight, offset)
    pairs = [
        (mine, theirs),
        (torch.autograd.grad(mine, x, dy)[0], torch.autograd.grad(theirs, x, dy)[0]),
        (times(x.detach(), resident), times(x.detach(), weight)),
        (back(dy, resident), back(dy, weight)),
    ]
    for found, expected in pairs:
        assert found.shape == expected.shape and (found - expected).norm() < 1e-5 * expected.norm()


def test_weights_take_turns_in_one_memory_that_stays_where_it_is():
    scratch = Scratch(DEVICE, torch.float32)
    small, large = (Resident([quantised("Q8_0", rows, 64)], scratch) for rows in (4, 12))
    x = torch.ones(1, 64, device=DEVICE)
    first = small.times(x)
    place = scratch.take(1, 1).data_ptr()
    large.times(x)
    assert scratch.take(12, 64).data_ptr() == place
    assert torch.equal(small.times(x), first)
