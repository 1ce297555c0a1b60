"""The products of ``kernels/products.py`` as Triton kernels: a block is a tile of one lane's tokens."""

from __future__ import annotations

import torch

from fedweave.kernels import power_of_two, tl, triton
from fedweave.kernels.lanes import TILE, Setting

# What a block holds, and with how many warps and stages of loads; ``benchmarks/kernels.py`` tries others.
BLOCKS: dict[str, dict[str, int]] = {
    "reduce": {"COLUMNS": 64, "num_warps": 4, "num_stages": 3},
    "expand": {"COLUMNS": 64, "num_warps": 4, "num_stages": 3},
    "outer": {"TOKENS": 64, "COLUMNS": 64, "num_warps": 4, "num_stages": 3},
}


def _rows(count: int) -> int:
    return max(16, power_of_two(count))  # a tensor core's smallest side is 16


def _keys(setting: Setting, like: torch.Tensor, index: int | None) -> tuple[torch.Tensor, int, int, float, bool]:
    """Token keys, layer, threshold, 1 / (1 - rate) and whether anything is dropped at all."""
    keys = setting.dropout
    if keys is None or index is None:
        return like, 0, 0, 1.0, False
    return keys.tokens, index, keys.threshold, 1 / (1 - keys.rate), True


def launch_reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    setting: Setting,
    index: int,
    gates: torch.Tensor | None,
    gated: torch.Tensor,
) -> None:
    tokens, layer, threshold, inflate, drop = _keys(setting, out, index)
    _reduce_kernel[(len(setting.lanes.tiles),)](
        x, w, out, gated, out, gates if gates is not None else out, out, tokens, setting.lanes.tiles,
        layer, threshold, inflate, setting.scale, x.stride(0), w.stride(0), w.shape[2], w.shape[1],
        gates.shape[1] if gates is not None else 1, setting.rank,
        DROP=drop, BACK=False, GATED=gates is not None, R=_rows(w.shape[1]), TOKENS=TILE, **BLOCKS["reduce"],
    )  # fmt: skip


def launch_reduce_back(
    dy: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    setting: Setting,
    u: torch.Tensor,
    gates: torch.Tensor | None,
    dgates: torch.Tensor | None,
) -> None:
    tiles = setting.lanes.tiles
    _reduce_kernel[(len(tiles),)](
        dy, w, out, out, u, gates if gates is not None else out, dgates if dgates is not None else out, out, tiles,
        0, 0, 1.0, setting.scale, dy.stride(0), w.stride(0), w.shape[2], w.shape[1],
        gates.shape[1] if gates is not None else 1, setting.rank,
        DROP=False, BACK=True, GATED=gates is not None, R=_rows(w.shape[1]), TOKENS=TILE, **BLOCKS["reduce"],
    )  # fmt: skip


def launch_expand(
    y: torch.Tensor, u: torch.Tensor, w: torch.Tensor, setting: Setting, scale: float, index: int | None, add: bool
) -> None:
    tokens, layer, threshold, inflate, drop = _keys(setting, u, index)
    tiles, block = setting.lanes.tiles, BLOCKS["expand"]
    _expand_kernel[(len(tiles), -(-w.shape[2] // block["COLUMNS"]))](
        y, u, w, tokens, tiles, layer, threshold, inflate, scale, y.stride(0), w.stride(0), w.shape[2], w.shape[1],
        DROP=drop, ADD=add, R=_rows(w.shape[1]), TOKENS=TILE, **block,
    )  # fmt: skip


def launch_outer(
    du: torch.Tensor,
    x: torch.Tensor,
    da: torch.Tensor,
    gu: torch.Tensor,
    dy: torch.Tensor,
    db: torch.Tensor,
    setting: Setting,
    index: int,
    add: bool,
) -> None:
    """Both factors' gradients in one launch: either alone has too few blocks to keep a GPU busy."""
    tokens, layer, threshold, inflate, drop = _keys(setting, du, index)
    block = BLOCKS["outer"]
    first, second = (-(-out.shape[2] // block["COLUMNS"]) for out in (da, db))
    _outer_kernel[(len(da), first + second)](
        du, x, da, gu, dy, db, tokens, setting.lanes.spans, layer, threshold, inflate, setting.scale, first,
        x.stride(0), dy.stride(0), da.stride(0), db.stride(0), da.shape[2], db.shape[2], da.shape[1],
        DROP=drop, ADD=add, R=_rows(da.shape[1]), **block,
    )  # fmt: skip


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
