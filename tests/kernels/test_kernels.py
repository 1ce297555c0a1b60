"""Every fused operation against autograd on the written-out formula, in plain torch and as a Triton kernel.

The kernels need a GPU, or TRITON_INTERPRET=1 and the triton package on a CPU.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedweave.kernels import again, entropy, experts, fused, gated, layer, product_kernels, rotary, rows
from fedweave.kernels.attention import rotated_attention, sequence_tiles, short_attention
from fedweave.kernels.dropout import DropoutKeys, keep_mask
from fedweave.kernels.experts import add_experts
from fedweave.kernels.lanes import Lanes, Setting, Target
from fedweave.kernels.source import Source
from tests.kernels.conftest import DEVICE


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE).requires_grad_()


def same(mine, theirs, inputs):
    """Equal values, and equal gradients along a random direction."""
    mine, theirs = (x if isinstance(x, tuple) else (x,) for x in (mine, theirs))
    directions = [torch.randn(x.shape, generator=torch.Generator().manual_seed(9)).to(DEVICE) for x in theirs]
    grads = []
    for outputs in (mine, theirs):
        total = sum((x * d).sum() for x, d in zip(outputs, directions, strict=True))
        grads.append(torch.autograd.grad(total, inputs))
    for a, b in zip((*mine, *grads[0]), (*theirs, *grads[1]), strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("width", [48, 130])
def test_add_norm(version, width):
    x, delta, weight = leaf(7, width), leaf(7, width, seed=1), leaf(width, seed=2).detach()

    def written_out(x, delta):
        s = x + delta
        return s, weight * s * torch.rsqrt(s.square().mean(-1, keepdim=True) + 1e-5)

    same(layer.add_norm(x, delta, weight, 1e-5)[:2], written_out(x, delta), [x, delta])
    same(layer.add_norm(x, delta, weight, 1e-5)[1], written_out(x, delta)[1], [x, delta])
    same(layer.add_norm(x, None, weight, 1e-5)[1], written_out(x, 0)[1], [x])


@pytest.mark.parametrize("kind", ["norm", "silu", "gelu"])
def test_an_input_that_is_made_of_what_is_kept(version, kind):
    """The experts' gradients are those of the input itself, which is freed after the forward pass."""
    lengths, tokens, n, rank = [70, 60], 135, 40, 4
    keys = DropoutKeys.of(0.25, [1, 2], lengths, tokens, DEVICE)
    setting = Setting(Lanes.of(lengths, tokens, DEVICE), keys, 2.0, rank)
    targets, direction = [Target(0, 0, 24), Target(1, 24, 8)], leaf(tokens, 32, seed=3).detach()
    weight, factors = leaf(32, n, seed=1).detach(), parts_of_one([n, 24, n, 8], rank, lanes=2)
    stream, scale = leaf(tokens, n if kind == "norm" else 2 * n), leaf(n, seed=2).detach()

    def learned(again: bool):
        if kind == "norm":
            s, x, inverse = layer.add_norm(stream, None, scale, 1e-5)
            source = Source.norm(s, inverse, scale)
        else:
            x, source = gated.gated_unit(stream, kind == "gelu"), Source.gated(stream, kind == "gelu")
        out = add_experts(
            (x @ weight.T).detach(), x, None, targets, factors, setting, weight, source if again else None
        )
        freed = weakref.ref(x.untyped_storage())
        del x
        used = sum(lengths)
        return freed() is None, torch.autograd.grad((out * direction)[:used].sum(), [stream, *factors])

    (freed, mine), (other, theirs) = learned(again=True), learned(again=False)
    assert freed and not other
    for one, two in zip(mine, theirs, strict=True):
        torch.testing.assert_close(
            one[: 130 if len(one) == tokens else None], two[: 130 if len(two) == tokens else None]
        )


def test_a_part_that_runs_again(version):
    """Its gradients, those of a leaf that is no input, and an output that the second run leaves out."""
    x, other, weight = leaf(6, 40), leaf(6, 80, seed=1), leaf(24, 40, seed=2).detach()
    runs = []

    def part(x):
        m = gated.gated_unit(torch.cat([x, x], 1) * other)
        runs.append(torch.is_grad_enabled())
        return again.unread_product(m, weight) if runs[-1] else m @ weight.T

    def plainly(x):
        return gated.gated_unit(torch.cat([x, x], 1) * other) @ weight.T

    direction, grads = leaf(6, 24, seed=3).detach(), []
    for run in (lambda: again.run_again(part, x), lambda: plainly(x)):
        x.grad = other.grad = None
        out = run()
        (out * direction).sum().backward()
        grads.append((out.detach(), x.grad, other.grad))
    assert runs == [False, True]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("gelu", [False, True])
def test_gated_unit(version, gelu):
    both = leaf(5, 2 * 1100)
    gate, up = both[:, :1100], both[:, 1100:]
    activated = F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)
    same(gated.gated_unit(both, gelu), activated * up, [both])


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("turning", [16, 12, 4])
def test_rotate(version, turning, normed):
    """All of a head's columns, or the first of them; with and without norms of heads."""
    qkv, angle = leaf(70, (4 + 2 * 2) * 16), torch.rand(70, turning // 2, device=DEVICE) * 6
    cos, sin = (torch.cat([f(angle)] * 2, 1) for f in (torch.cos, torch.sin))
    weights = leaf(2, 16, seed=1).detach()

    def normal(x, weight):
        return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) if normed else x

    def turned(x):
        a, b = x[..., :turning].chunk(2, -1)
        c, s = cos[:, None, : turning // 2], sin[:, None, : turning // 2]
        return torch.cat([a * c - b * s, b * c + a * s, x[..., turning:]], -1)

    q, k, v = qkv.view(70, 8, 16).split([4, 2, 2], 1)
    expected = (turned(normal(q, weights[0])), turned(normal(k, weights[1])), v)
    same(rotary.rotate(qkv, cos, sin, 4, 2, rotary.HeadNorms(weights, 1e-5) if normed else None), expected, [qkv])


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_entropy_and_slope(version, softcap):
    logits, targets = leaf(6, 5000), torch.tensor([0, 4999, 4096, 17, 4095, 2500], device=DEVICE)
    capped = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    expected = F.cross_entropy(capped, targets, reduction="none")
    (slope,) = torch.autograd.grad(expected.sum(), logits)
    nll, mine = entropy.entropy_and_slope(logits.detach().clone(), targets, softcap, True)
    torch.testing.assert_close(nll, expected.detach(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(mine, slope, atol=1e-5, rtol=1e-4)
    assert entropy.entropy_and_slope(logits.detach().clone(), targets, softcap, False)[1] is None


def parts_of_one(widths: list[int], rows: int, lanes: int = 3) -> list[torch.Tensor]:
    """The lanes' factors as in training: parts of one matrix."""
    whole = leaf(lanes, rows * sum(widths), seed=3).detach()
    return [
        part.unflatten(1, (rows, -1)).requires_grad_()
        for part in whole.split([rows * width for width in widths], 1)
    ]


@pytest.mark.parametrize(
    ("experts", "rate", "layers"), [(3, 0.0, 2), (3, 0.25, 3), (1, 0.25, 1), (0, 0.0, 2), (0, 0.25, 3)]
)
def test_add_experts(version, experts, rate, layers):
    """Three lanes of unequal length with rows of nobody behind them; some targets in one product's columns."""
    lengths, tokens, n, rank = [70, 3, 130], 210, 40, 4
    own = Lanes.of(lengths, tokens, DEVICE)
    rows = max(experts, 1) * rank
    keys = DropoutKeys.of(rate, [1, 2, 3], lengths, tokens, DEVICE) if rate else None
    setting, targets = (
        Setting(own, keys, 2.0, rank),
        [Target(0, 0, 24), Target(5, 30, 72), Target(6, 102, 8)][:layers],
    )
    y, x = leaf(tokens, 110), leaf(tokens, n, seed=1)
    gates = leaf(tokens, experts, seed=2) if experts else None
    factors = parts_of_one([width for target in targets for width in (n, target.width)], rows)
    used = sum(lengths)

    def written_out():
        columns = list(y[:used].split([24, 6, 72, 8], 1))
        for place, target, a, b in zip((0, 2, 3), targets, factors[::2], factors[1::2], strict=False):
            dropped = x * keep_mask(keys, n, target.index) / (1 - rate) if keys else x
            parts = []
            for k, part in enumerate(dropped[:used].split(lengths)):
                u = part @ a[k].T
                if gates is not None:
                    u = u * gates[:used].split(lengths)[k].repeat_interleave(rank, 1)
                parts.append(u @ b[k])
            columns[place] = columns[place] + 2.0 * torch.cat(parts)
        return torch.cat(columns, 1)

    inputs = [x, *factors, *([gates] if gates is not None else [])]
    mine = add_experts(y.clone(), x, gates, targets, factors, setting)[:used]
    expected = written_out()
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    torch.testing.assert_close(mine, expected, atol=1e-3, rtol=1e-3)
    got = torch.autograd.grad((mine * direction).sum(), inputs)
    want = torch.autograd.grad((expected * direction).sum(), inputs)
    for a, b in zip(got, want, strict=True):
        rows_of_lanes = slice(0, used) if a.shape[0] == tokens else slice(None)
        torch.testing.assert_close(a[rows_of_lanes], b[rows_of_lanes], atol=1e-3, rtol=1e-3)


def test_layers_that_read_one_input_share_every_launch(version, monkeypatch):
    """Three layers' experts are five launches, and learn what they learn with launches of their own."""
    if version == "plain":
        pytest.skip("launches are Triton's")
    lengths, tokens, n, rank = [70, 3, 130], 210, 40, 4
    setting = Setting(Lanes.of(lengths, tokens, DEVICE), None, 2.0, rank)
    targets = [Target(0, 0, 24), Target(1, 24, 72), Target(2, 96, 8)]
    x, gates, factors = leaf(tokens, n), leaf(tokens, 2, seed=2), parts_of_one([n, 24, n, 72, n, 8], 2 * rank)
    launches: list[str] = []

    class Counted:
        def __init__(self, name: str, kernel: object):
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid: tuple[int, ...]) -> object:
            launches.append(self.name)
            return self.kernel[grid]

    for name in [name for name in vars(product_kernels) if name.startswith("lane_")]:
        monkeypatch.setattr(product_kernels, name, Counted(name, getattr(product_kernels, name)))

    def learned() -> tuple[int, list[torch.Tensor]]:
        launches.clear()
        y = add_experts(torch.zeros(tokens, 104, device=DEVICE), x, gates, targets, factors, setting)
        grads = torch.autograd.grad(y[: sum(lengths)].square().sum(), [gates, *factors])
        return len(launches), [y[: sum(lengths)].detach(), *grads]

    together, mine = learned()
    monkeypatch.setattr(experts, "TOGETHER", 1)
    apart, theirs = learned()
    assert (together, apart) == (5, 15)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:grad and param")
def test_experts_join_the_gradients_that_are_there(version):
    """With the frozen weight the way back is one sum; a factor that has a gradient already gets its own added."""
    lengths, tokens, n, rank = [70, 60], 130, 40, 4
    setting, targets = Setting(Lanes.of(lengths, tokens, DEVICE), None, 2.0, rank), [Target(0, 8, 24)]
    x, weight = leaf(tokens, n), leaf(32, n, seed=1).detach()
    gates = leaf(tokens, 2, seed=2)
    direction = leaf(tokens, 32, seed=3).detach()

    def gradients(joined: bool) -> list[torch.Tensor]:
        whole = leaf(2, 8 * (n + 24), seed=4).detach()  # both lanes' factors end to end, as in training
        factors = [
            whole[:, : 8 * n].view(2, 8, n).requires_grad_(),
            whole[:, 8 * n :].view(2, 8, 24).requires_grad_(),
        ]
        buffer = torch.ones_like(whole)
        if joined:
            factors[0].grad, factors[1].grad = buffer[:, : 8 * n].view(2, 8, n), buffer[:, 8 * n :].view(2, 8, 24)
        with torch.no_grad() if joined else nullcontext():
            y = x @ weight.T
        out = add_experts(y, x, gates, targets, factors, setting, weight if joined else None)
        x.grad = gates.grad = None
        (out * direction).sum().backward()
        places = [f.grad if joined else f.grad + 1 for f in factors]
        return [x.grad, gates.grad, *places]

    for mine, theirs in zip(gradients(joined=True), gradients(joined=False), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("tokens", "n", "width"), [(1, 40, 24), (19, 600, 100)])
def test_experts_on_a_few_rows(version, tokens, n, width, gated):
    x, a, b = (leaf(*shape, seed=i).detach() for i, shape in enumerate([(tokens, n), (12, n), (12, width)]))
    wide = leaf(tokens, 12, seed=3).detach() if gated else None
    joint = leaf(tokens, width + 10, seed=4).detach()
    expected = joint.clone()
    expected[:, 10:] += ((x @ a.T) * (0.5 if wide is None else wide)) @ b
    rows.add_to_rows(joint[:, 10:], x, a, b, wide, 0.5, rank=4, few=False)
    torch.testing.assert_close(joint, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize(("tokens", "n", "width", "rank"), [(1, 40, 24, 8), (5, 1100, 600, 6)])
def test_many_experts_of_which_a_row_uses_few(version, tokens, n, width, rank, few):
    """None, one, two or three of twenty, some with a negative weight."""
    x, a, b = (leaf(*s, seed=i).detach() for i, s in enumerate([(tokens, n), (20 * rank, n), (20 * rank, width)]))
    gates = torch.zeros(tokens, 20, device=DEVICE)
    for t in range(tokens):
        for i, gate in enumerate((1.0, -0.5, 0.25)[: (t + 1) % 4]):
            gates[t, (7 * t + 3 * i) % 20] = gate
    assert rows.few_experts(gates) and not rows.few_experts(torch.ones(1, 20))
    wide = gates.repeat_interleave(rank, 1)
    joint = leaf(tokens, width + 10, seed=4).detach()
    expected = joint.clone()
    expected[:, 10:] += ((x @ a.T) * wide) @ b
    rows.add_to_rows(joint[:, 10:], x, a, b, wide, 0.5, rank, few)
    torch.testing.assert_close(joint, expected, atol=1e-3, rtol=1e-3)


def attended(q, k, v, lengths, softcap):
    """Attention within sequences, written out: q, k and v [T, heads, D]."""
    heads = q.shape[1]
    outs = []
    for part in zip(*(x.split(lengths.tolist()) for x in (q, k, v)), strict=True):
        a, b, c = (x.repeat_interleave(heads // x.shape[1], 1).transpose(0, 1) for x in part)  # [heads, n, D]
        scores = a @ b.transpose(1, 2) * 0.3
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=DEVICE).triu(1)
        outs.append((scores.masked_fill(hidden, float("-inf")).softmax(-1) @ c).transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 16), (3, 3, 24)])
def test_attention_within_short_sequences(heads, kv_heads, width, softcap):
    """Sequences of every kind: empty, one token, a whole block, several blocks; keys not stored side by side."""
    if not fused(torch.zeros(1, device=DEVICE)):
        pytest.skip("needs a CUDA device (or TRITON_INTERPRET=1 and triton)")
    lengths = np.array([5, 0, 64, 1, 150, 63])
    tokens = int(lengths.sum())
    tiles = torch.from_numpy(sequence_tiles(lengths, tokens)).to(DEVICE)
    q, v = leaf(tokens, heads, width), leaf(tokens, kv_heads, width, seed=2)
    k = leaf(kv_heads, tokens, width, seed=1)
    expected = attended(q, k.transpose(0, 1), v, lengths, softcap)
    same(short_attention(q, k.transpose(0, 1), v, tiles, 0.3, softcap), expected, [q, k, v])


@pytest.mark.parametrize(("softcap", "width"), [(None, 32), (3.0, 16)])
def test_attention_that_rotates(softcap, width):
    """Rotary positions and attention of one joint product, whose gradient is joint as well."""
    if not fused(torch.zeros(1, device=DEVICE)):
        pytest.skip("needs a CUDA device (or TRITON_INTERPRET=1 and triton)")
    lengths = np.array([5, 0, 64, 1, 150, 63])
    tokens = int(lengths.sum())
    tiles = torch.from_numpy(sequence_tiles(lengths, tokens)).to(DEVICE)
    qkv, angle = leaf(tokens, (4 + 2 * 2) * width), torch.rand(tokens, width // 2, device=DEVICE) * 6
    cos, sin = (torch.cat([f(angle)] * 2, 1) for f in (torch.cos, torch.sin))
    with patch.object(rotary, "fused", lambda x: False):
        expected = attended(*rotary.rotate(qkv, cos, sin, 4, 2), lengths, softcap)
    same(rotated_attention(qkv * 1, cos, sin, 2, tiles, 0.3, softcap), expected, [qkv])
