"""Products over lane segments: what the experts' forward and backward passes are made of.

Row t of a packed batch is multiplied by its own lane's matrix; ``kernels/experts.py`` says what for. A block of the
Triton kernels (``kernels/product_kernels.py``) is a tile of one lane's tokens. Adapted layers that read the same
input, up to three (q, k and v), share every launch: one layer's blocks alone are too few to keep a GPU busy.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from fedweave.kernels import fused, power_of_two
from fedweave.kernels import product_kernels as kernels
from fedweave.kernels.dropout import DropoutKeys, keep_mask
from fedweave.kernels.lanes import TILE, Lanes, Setting, Target
from fedweave.kernels.source import Source

Part = TypeVar("Part")

# What a block holds, and with how many warps and stages of loads; ``benchmarks/kernels.py`` tries others.
BLOCKS: dict[str, dict[str, int]] = {
    "reduce": {"COLUMNS": 64, "num_warps": 4, "num_stages": 3},
    "expand": {"COLUMNS": 64, "num_warps": 4, "num_stages": 3},
    "outer": {"TOKENS": 64, "COLUMNS": 64, "num_warps": 4, "num_stages": 3},
}


def reduce(
    x: Tensor,  # [T, n]
    a: Sequence[Tensor],  # of every target [K, M·r, n], with one distance between lanes
    targets: Sequence[Target],
    setting: Setting,
    gates: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Of every target u = dropout(x) Aᵀ and g ⊙ u, both [targets, T, M·r]."""
    if not fused(x):
        reduced = [
            _by_lane(_dropped(x, setting.dropout, target.index), one.transpose(1, 2), setting.lanes)
            for target, one in zip(targets, a, strict=True)
        ]
        u = torch.stack(reduced)
        return u, _gated(u, gates, setting.rank)
    u = x.new_empty(len(targets), len(x), a[0].shape[1])
    gu = u if gates is None else torch.empty_like(u)
    tokens, threshold, inflate, drop = _keys(setting, u)
    kernels.lane_reduce_kernel[(len(targets), len(setting.lanes.tiles))](
        x, *_three(a), u, gu, u, gates if gates is not None else u, u, tokens, setting.lanes.tiles,
        *_three([t.index for t in targets]), 0, 0, 0, *[a[0].shape[2]] * 3,
        threshold, inflate, setting.scale, x.stride(0), a[0].stride(0), len(x), a[0].shape[1],
        gates.shape[1] if gates is not None else 1, setting.rank,
        DROP=drop, BACK=False, GATED=gates is not None, SLOPE=False, R=_rows(a[0].shape[1]), TOKENS=TILE,
        **BLOCKS["reduce"],
    )  # fmt: skip
    return u, gu


def reduce_back(
    dy: Tensor,  # [T, columns]
    b: Sequence[Tensor],  # of every target [K, M·r, width]
    u: Tensor,
    targets: Sequence[Target],
    setting: Setting,
    gates: Tensor | None,
    slope: bool,
) -> tuple[Tensor, Tensor | None]:
    """Of every target du = g ⊙ (scale · dy Bᵀ), [targets, T, M·r]; with ``slope`` the gates' gradient, over all."""
    if not fused(dy):
        reduced = [
            _by_lane(_columns(dy, target), one.transpose(1, 2), setting.lanes)
            for target, one in zip(targets, b, strict=True)
        ]
        du = torch.stack(reduced) * setting.scale
        if gates is None:
            return du, None
        dgates = (u * du).unflatten(2, (-1, setting.rank)).float().sum((0, 3)) if slope else None
        return _gated(du, gates, setting.rank), dgates
    du, tiles = torch.empty_like(u), setting.lanes.tiles
    # zeros for rows of nobody; a target's part is its own, and they are added up in a fixed order
    dgates = gates.new_zeros(len(targets), *gates.shape) if gates is not None and slope else None
    kernels.lane_reduce_kernel[(len(targets), len(tiles))](
        dy, *_three(b), du, du, u, gates if gates is not None else du, dgates if dgates is not None else du, du,
        tiles, 0, 0, 0, *_starts(targets),
        0, 1.0, setting.scale, dy.stride(0), b[0].stride(0), len(dy), b[0].shape[1],
        gates.shape[1] if gates is not None else 1, setting.rank,
        DROP=False, BACK=True, GATED=gates is not None, SLOPE=dgates is not None, R=_rows(b[0].shape[1]),
        TOKENS=TILE, **BLOCKS["reduce"],
    )  # fmt: skip
    if dgates is None:
        return du, None
    return du, dgates.sum(0) if len(targets) > 1 else dgates[0]


def expand(y: Tensor, gu: Tensor, b: Sequence[Tensor], targets: Sequence[Target], setting: Setting) -> None:
    """y += scale · (g ⊙ u) B in every target's columns."""
    if fused(y):
        block = BLOCKS["expand"]
        ends = _ends([t.width for t in targets], block["COLUMNS"])
        kernels.lane_expand_kernel[(len(setting.lanes.tiles), ends[-1])](
            y, gu, *_three(b), setting.lanes.tiles,
            *_starts(targets), *_three(ends)[:2],
            setting.scale, y.stride(0), b[0].stride(0), len(y), b[0].shape[1],
            R=_rows(b[0].shape[1]), TOKENS=TILE, **block,
        )  # fmt: skip
        return
    for target, one, u in zip(targets, b, gu, strict=True):
        _columns(y, target).add_(_by_lane(u, one, setting.lanes) * setting.scale)


def expand_back(
    dx: Tensor, du: Tensor, a: Sequence[Tensor], targets: Sequence[Target], setting: Setting, add: bool
) -> None:
    """dx (+)= Σ dropout(du A) over the targets."""
    if fused(dx):
        tokens, threshold, inflate, drop = _keys(setting, du)
        tiles, block, width = setting.lanes.tiles, BLOCKS["expand"], a[0].shape[2]
        kernels.lane_expand_back_kernel[(len(tiles), -(-width // block["COLUMNS"]))](
            dx, du, *_three(a), tokens, tiles, *_three([t.index for t in targets]), threshold, inflate,
            dx.stride(0), a[0].stride(0), len(dx), width, a[0].shape[1],
            COUNT=len(targets), DROP=drop, ADD=add, R=_rows(a[0].shape[1]), TOKENS=TILE, **block,
        )  # fmt: skip
        return
    for target, one, u in zip(targets, a, du, strict=True):
        delta = _dropped(_by_lane(u, one, setting.lanes), setting.dropout, target.index)
        dx.add_(delta) if add or target is not targets[0] else dx.copy_(delta)


def outer(
    du: Tensor,
    source: Source,  # of x
    gu: Tensor,
    dy: Tensor,
    factors: Sequence[Tensor],  # A [K, M·r, n] and B [K, M·r, width] of every target in turn
    places: Sequence[Tensor | None],
    targets: Sequence[Target],
    setting: Setting,
) -> list[Tensor | None]:
    """Of every target sums over each lane's tokens, duᵀ dropout(x) and scale · guᵀ dy; ``places``, where given, are
    added to instead: autograd would copy each of many small gradients to its place with a kernel of its own."""
    if not fused(dy):
        x = source.computed()
        found: list[Tensor | None] = []
        for target, left, right in zip(targets, du, gu, strict=True):
            found.append(_outer(left, _dropped(x, setting.dropout, target.index), setting.lanes))
            found.append(_outer(right, _columns(dy, target), setting.lanes) * setting.scale)
        return found
    add = all(place is not None for place in places)
    out = [place for place in places if place is not None] if add else _fresh(factors)
    tokens, threshold, inflate, drop = _keys(setting, du)
    block = BLOCKS["outer"]
    x, inverse, norm = (*source.kept, du, du)[:3]
    first = -(-source.width // block["COLUMNS"])
    ends = _ends([t.width for t in targets], block["COLUMNS"])
    # all factors' gradients in one launch, A's and then B's: either alone has too few blocks to keep a GPU busy
    kernels.lane_outer_kernel[(len(out[0]), len(targets) * first + ends[-1])](
        du, x, inverse, norm, gu, dy, *_three(out[::2]), *_three(out[1::2]), tokens, setting.lanes.spans,
        *_three([t.index for t in targets]), *_starts(targets),
        threshold, inflate, setting.scale, first, len(targets) * first, *_three(ends)[:2],
        x.stride(0), dy.stride(0), out[0].stride(0), len(x), source.width, out[0].shape[1],
        SOURCE=source.kind, DROP=drop, ADD=add, R=_rows(out[0].shape[1]), **block,
    )  # fmt: skip
    return [None] * len(out) if add else [*out]


def _three(parts: Sequence[Part]) -> list[Part]:
    """Kernels take three of everything, and read as many as there are targets."""
    return [*parts, *[parts[-1]] * (3 - len(parts))]


def _starts(targets: Sequence[Target]) -> list[int]:
    """Of three targets where their columns start, and how many they are."""
    return [*_three([t.start for t in targets]), *_three([t.width for t in targets])]


def _ends(widths: Sequence[int], columns: int) -> list[int]:
    """Where each target's blocks of so many columns end, if they stand in a row."""
    return list(accumulate(-(-width // columns) for width in widths))


def _columns(x: Tensor, target: Target) -> Tensor:
    return x[:, target.start : target.start + target.width]


def _fresh(factors: Sequence[Tensor]) -> list[Tensor]:
    """Room for gradients, with one distance between lanes as the factors have it."""
    sizes = [factor[0].numel() for factor in factors]
    joint = factors[0].new_empty(len(factors[0]), sum(sizes))
    return [part.unflatten(1, f.shape[1:]) for part, f in zip(joint.split(sizes, 1), factors, strict=True)]


def _outer(left: Tensor, right: Tensor, lanes: Lanes) -> Tensor:
    used = sum(lanes.lengths)
    parts = zip(left[:used].split(lanes.lengths), right[:used].split(lanes.lengths), strict=True)
    return torch.stack([one.T @ other for one, other in parts])


def _by_lane(x: Tensor, w: Tensor, lanes: Lanes) -> Tensor:
    """Row t of x times its own lane's matrix."""
    if len(w) == 1:
        return x @ w[0]
    used = sum(lanes.lengths)
    parts = [part @ m for part, m in zip(x[:used].split(lanes.lengths), w, strict=True)]
    return torch.cat([*parts, x.new_zeros(len(x) - used, w.shape[2])])


def _gated(u: Tensor, gates: Tensor | None, rank: int) -> Tensor:
    return u if gates is None else (u * gates.to(u.dtype).repeat_interleave(rank, 1))


def _dropped(x: Tensor, keys: DropoutKeys | None, index: int) -> Tensor:
    return x if keys is None else x * keep_mask(keys, x.shape[1], index) / (1 - keys.rate)


def _rows(count: int) -> int:
    return max(16, power_of_two(count))  # a tensor core's smallest side is 16


def _keys(setting: Setting, like: Tensor) -> tuple[Tensor, int, float, bool]:
    """Token keys, threshold, 1 / (1 - rate) and whether anything is dropped at all."""
    keys = setting.dropout
    if keys is None:
        return like, 0, 1.0, False
    return keys.tokens, keys.threshold, 1 / (1 - keys.rate), True
