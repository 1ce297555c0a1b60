"""Products over lane segments: what the experts' forward and backward passes are made of.

Row t of a packed batch is multiplied by its own lane's matrix; ``kernels/experts.py`` says what for. A block of the
Triton kernels is a tile of one lane's tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedweave.kernels import fused, power_of_two, tl, triton
from fedweave.kernels.dropout import DropoutKeys, keep_mask
from fedweave.kernels.lanes import TILE, Lanes, Setting

# What a block holds, and with how many warps and stages of loads; ``benchmarks/kernels.py`` tries others.
BLOCKS: dict[str, dict[str, int]] = {
    "reduce": {"COLUMNS": 64, "num_warps": 4, "num_stages": 3},
    "expand": {"COLUMNS": 64, "num_warps": 4, "num_stages": 3},
    "outer": {"TOKENS": 64, "COLUMNS": 64, "num_warps": 4, "num_stages": 3},
}


def reduce(x: Tensor, a: Tensor, setting: Setting, index: int, gates: Tensor | None) -> tuple[Tensor, Tensor]:
    """u = dropout(x) Aᵀ and g ⊙ u, both [T, M·r]."""
    if not fused(x):
        u = _by_lane(_dropped(x, setting.dropout, index), a.transpose(1, 2), setting.lanes)
        return u, _gated(u, gates, setting.rank)
    u = x.new_empty(len(x), a.shape[1])
    gu = u if gates is None else torch.empty_like(u)
    tokens, layer, threshold, inflate, drop = _keys(setting, u, index)
    _reduce_kernel[(len(setting.lanes.tiles),)](
        x, a, u, gu, u, gates if gates is not None else u, u, tokens, setting.lanes.tiles,
        layer, threshold, inflate, setting.scale, x.stride(0), a.stride(0), a.shape[2], a.shape[1],
        gates.shape[1] if gates is not None else 1, setting.rank,
        DROP=drop, BACK=False, GATED=gates is not None, R=_rows(a.shape[1]), TOKENS=TILE, **BLOCKS["reduce"],
    )  # fmt: skip
    return u, gu


def reduce_back(
    dy: Tensor, b: Tensor, u: Tensor, setting: Setting, gates: Tensor | None, dgates: Tensor | None
) -> Tensor:
    """du = g ⊙ (scale · dy Bᵀ); adds the gates' gradient to ``dgates``."""
    if fused(dy):
        du, tiles = torch.empty_like(u), setting.lanes.tiles
        _reduce_kernel[(len(tiles),)](
            dy, b, du, du, u, gates if gates is not None else du, dgates if dgates is not None else du, du, tiles,
            0, 0, 1.0, setting.scale, dy.stride(0), b.stride(0), b.shape[2], b.shape[1],
            gates.shape[1] if gates is not None else 1, setting.rank,
            DROP=False, BACK=True, GATED=gates is not None, R=_rows(b.shape[1]), TOKENS=TILE, **BLOCKS["reduce"],
        )  # fmt: skip
        return du
    du = _by_lane(dy, b.transpose(1, 2), setting.lanes) * setting.scale
    if gates is None or dgates is None:
        return du
    per_expert = (len(u), -1, setting.rank)
    dgates += (u * du).view(per_expert).float().sum(-1)
    return _gated(du, gates, setting.rank)


def expand(
    y: Tensor,
    u: Tensor,
    w: Tensor,  # [K, M·r, m]
    setting: Setting,
    scale: float,
    drop: int | None = None,
    add: bool = True,
) -> None:
    """y (+)= dropout(scale · u W)."""
    if fused(y):
        tokens, layer, threshold, inflate, dropped = _keys(setting, u, drop)
        tiles, block = setting.lanes.tiles, BLOCKS["expand"]
        _expand_kernel[(len(tiles), -(-w.shape[2] // block["COLUMNS"]))](
            y, u, w, tokens, tiles, layer, threshold, inflate, scale, y.stride(0), w.stride(0), w.shape[2],
            w.shape[1], DROP=dropped, ADD=add, R=_rows(w.shape[1]), TOKENS=TILE, **block,
        )  # fmt: skip
        return
    delta = _by_lane(u, w, setting.lanes) * scale
    delta = _dropped(delta, setting.dropout if drop is not None else None, drop or 0)
    y.add_(delta) if add else y.copy_(delta)


def outer(
    du: Tensor,
    x: Tensor,
    gu: Tensor,
    dy: Tensor,
    factors: Sequence[Tensor],  # A [K, M·r, n] and B [K, M·r, m]
    places: Sequence[Tensor | None],
    setting: Setting,
    index: int,
) -> tuple[Tensor | None, Tensor | None]:
    """Sums over every lane's tokens, duᵀ dropout(x) and scale · guᵀ dy; ``places``, where given, are added to
    instead: autograd would copy each of many small gradients to its place with a kernel of its own."""
    if not fused(x):
        dropped = _dropped(x, setting.dropout, index)
        return _outer(du, dropped, setting.lanes), _outer(gu, dy, setting.lanes) * setting.scale
    add = all(place is not None for place in places)
    fresh = (torch.empty(f.shape, dtype=f.dtype, device=f.device) for f in factors)
    da, db = (place if add and place is not None else next(fresh) for place in places)
    tokens, layer, threshold, inflate, drop = _keys(setting, du, index)
    block = BLOCKS["outer"]
    # both factors' gradients in one launch: either alone has too few blocks to keep a GPU busy
    first, second = (-(-out.shape[2] // block["COLUMNS"]) for out in (da, db))
    _outer_kernel[(len(da), first + second)](
        du, x, da, gu, dy, db, tokens, setting.lanes.spans, layer, threshold, inflate, setting.scale, first,
        x.stride(0), dy.stride(0), da.stride(0), db.stride(0), da.shape[2], db.shape[2], da.shape[1],
        DROP=drop, ADD=add, R=_rows(da.shape[1]), **block,
    )  # fmt: skip
    return (None, None) if add else (da, db)


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


def _keys(setting: Setting, like: Tensor, index: int | None) -> tuple[Tensor, int, int, float, bool]:
    """Token keys, layer, threshold, 1 / (1 - rate) and whether anything is dropped at all."""
    keys = setting.dropout
    if keys is None or index is None:
        return like, 0, 0, 1.0, False
    return keys.tokens, index, keys.threshold, 1 / (1 - keys.rate), True


if triton is not None:

    @triton.jit
    def _mix(x):
        """The 32-bit hash of kernels/dropout.py."""
        x = x ^ (x >> 16)
        x = x * 0x7FEB352D
        x = x ^ (x >> 15)
        return x * -2073319277

    @triton.jit
    def _kept(keys, t, live, c, layer, threshold):
        """[tokens, channels] what dropout keeps."""
        token = tl.load(keys + t, live, 0)
        channel = _mix(c * 2 + 1 + (layer + 1) * 40503)
        return _mix(token[:, None] ^ channel[None, :]) >= threshold

    @triton.jit(do_not_specialize=["layer", "threshold"])
    def _reduce_kernel(
        x, w, out, gated, u, gates, dgates, keys, tiles,
        layer, threshold, inflate, scale, x_row, w_lane, N, MR, M, RANK,
        DROP: tl.constexpr, BACK: tl.constexpr, GATED: tl.constexpr,
        R: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        tile = tiles + tl.program_id(0) * 3
        start, end, lane = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2).to(tl.int64)
        if start < end:
            t = start + tl.arange(0, TOKENS)
            live = t < end
            wide_t = t.to(tl.int64)
            r = tl.arange(0, R)
            acc = tl.zeros([TOKENS, R], tl.float32)
            for first in range(0, N, COLUMNS):
                c = first + tl.arange(0, COLUMNS)
                rows = tl.load(x + wide_t[:, None] * x_row + c[None, :], live[:, None] & (c < N)[None, :], 0.0)
                if DROP:
                    kept = _kept(keys, t, live, c, layer, threshold)
                    rows = tl.where(kept, rows.to(tl.float32) * inflate, 0.0).to(rows.dtype)
                part = tl.load(
                    w + lane * w_lane + r[None, :] * N + c[:, None], (r < MR)[None, :] & (c < N)[:, None], 0.0
                )  # [COLUMNS, R]
                acc = tl.dot(rows, part, acc, input_precision="ieee")
            at = wide_t[:, None] * MR + r[None, :]
            inside = live[:, None] & (r < MR)[None, :]
            if BACK:
                acc = acc * scale
            rows = acc.to(out.dtype.element_ty)
            if GATED:
                g = tl.load(gates + wide_t[:, None] * M + (r // RANK)[None, :], inside, 0.0)
                if BACK:
                    slope = tl.load(u + at, inside, 0.0).to(tl.float32) * acc
                    for m in range(0, M):  # sums over each expert's r columns
                        own = tl.sum(tl.where((r // RANK == m)[None, :], slope, 0.0), 1)
                        to = dgates + wide_t * M + m
                        tl.store(to, tl.load(to, live, 0.0) + own, live)
                    rows = (acc * g).to(out.dtype.element_ty)
                else:
                    tl.store(gated + at, (rows.to(tl.float32) * g).to(out.dtype.element_ty), inside)
            tl.store(out + at, rows, inside)

    @triton.jit(do_not_specialize=["layer", "threshold"])
    def _expand_kernel(
        y, u, w, keys, tiles, layer, threshold, inflate, scale, y_row, w_lane, N, MR,
        DROP: tl.constexpr, ADD: tl.constexpr, R: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        tile = tiles + tl.program_id(0) * 3
        start, end, lane = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2).to(tl.int64)
        if start < end:
            t = start + tl.arange(0, TOKENS)
            live = t < end
            wide_t = t.to(tl.int64)
            r = tl.arange(0, R)
            c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
            inside = live[:, None] & (r < MR)[None, :]
            rows = tl.load(u + wide_t[:, None] * MR + r[None, :], inside, 0.0)  # [TOKENS, R]
            part = tl.load(
                w + lane * w_lane + r[:, None] * N + c[None, :], (r < MR)[:, None] & (c < N)[None, :], 0.0
            )
            acc = tl.dot(rows, part, input_precision="ieee") * scale
            if DROP:
                acc = tl.where(_kept(keys, t, live, c, layer, threshold), acc * inflate, 0.0)
            to = y + wide_t[:, None] * y_row + c[None, :]
            inner = live[:, None] & (c < N)[None, :]
            if ADD:
                acc += tl.load(to, inner, 0.0).to(tl.float32)
            tl.store(to, acc.to(y.dtype.element_ty), inner)

    @triton.jit
    def _outer_sum(
        left, right, out, keys, start, end, block, layer, threshold, inflate, scale, row, N, MR,
        DROP: tl.constexpr, ADD: tl.constexpr, R: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        """out [MR, N] (+)= scale · leftᵀ dropout(right) over the tokens from start to end, one block of columns."""
        r = tl.arange(0, R)
        c = block * COLUMNS + tl.arange(0, COLUMNS)
        acc = tl.zeros([R, COLUMNS], tl.float32)
        for first in range(start, end, TOKENS):
            t = first + tl.arange(0, TOKENS)
            live = t < end
            wide_t = t.to(tl.int64)
            inside = live[None, :] & (r < MR)[:, None]
            rows = tl.load(left + wide_t[None, :] * MR + r[:, None], inside, 0.0)  # [R, TOKENS]
            columns = tl.load(right + wide_t[:, None] * row + c[None, :], live[:, None] & (c < N)[None, :], 0.0)
            if DROP:
                kept = _kept(keys, t, live, c, layer, threshold)
                columns = tl.where(kept, columns.to(tl.float32) * inflate, 0.0).to(columns.dtype)
            acc = tl.dot(rows, columns, acc, input_precision="ieee")
        at = out + r[:, None] * N + c[None, :]
        inner = (r < MR)[:, None] & (c < N)[None, :]
        acc = acc * scale
        if ADD:
            acc += tl.load(at, inner, 0.0).to(tl.float32)
        tl.store(at, acc.to(out.dtype.element_ty), inner)

    @triton.jit(do_not_specialize=["layer", "threshold"])
    def _outer_kernel(
        du, x, da, gu, dy, db, keys, spans, layer, threshold, inflate, scale, first,
        x_row, dy_row, da_lane, db_lane, N, WIDTH, MR,
        DROP: tl.constexpr, ADD: tl.constexpr, R: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        lane, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
        start, end = tl.load(spans + lane * 2), tl.load(spans + lane * 2 + 1)
        if block < first:
            _outer_sum(du, x, da + lane * da_lane, keys, start, end, block, layer, threshold, inflate,
                       1.0, x_row, N, MR, DROP, ADD, R, TOKENS, COLUMNS)  # fmt: skip
        else:
            _outer_sum(gu, dy, db + lane * db_lane, keys, start, end, block - first, layer, threshold, inflate,
                       scale, dy_row, WIDTH, MR, False, ADD, R, TOKENS, COLUMNS)  # fmt: skip
