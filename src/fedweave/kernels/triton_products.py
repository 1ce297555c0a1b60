"""The products of ``kernels/products.py`` as Triton kernels: a block is a tile of one lane's tokens."""

from __future__ import annotations

import torch

from fedweave.kernels import power_of_two
from fedweave.kernels.lanes import TILE, Setting

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

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
    index: int | None,
    u: torch.Tensor | None = None,
    gates: torch.Tensor | None = None,
    dgates: torch.Tensor | None = None,
) -> None:
    tokens, layer, threshold, inflate, drop = _keys(setting, out, index)
    gated, tiles = gates is not None, setting.lanes.tiles
    _reduce_kernel[(len(tiles),)](
        x, w, out, out if u is None else u, gates if gated else out, dgates if gated else out, tokens, tiles,
        layer, threshold, inflate, setting.scale, x.stride(0), w.stride(0), w.shape[2], w.shape[1],
        gates.shape[1] if gates is not None else 1, setting.rank,
        DROP=drop, BACK=u is not None, GATED=gated, R=_rows(w.shape[1]),
        TOKENS=TILE, **BLOCKS["reduce"],
    )  # fmt: skip


def launch_expand(
    y: torch.Tensor,
    u: torch.Tensor,
    w: torch.Tensor,
    setting: Setting,
    gates: torch.Tensor | None,
    scale: float,
    index: int | None,
    add: bool,
) -> None:
    tokens, layer, threshold, inflate, drop = _keys(setting, u, index)
    gated, tiles = gates is not None, setting.lanes.tiles
    block = BLOCKS["expand"]
    _expand_kernel[(len(tiles), -(-w.shape[2] // block["COLUMNS"]))](
        y, u, w, gates if gated else u, tokens, tiles, layer, threshold, inflate, scale,
        y.stride(0), w.stride(0), w.shape[2], w.shape[1], gates.shape[1] if gates is not None else 1, setting.rank,
        DROP=drop, GATED=gated, ADD=add, R=_rows(w.shape[1]), TOKENS=TILE, **block,
    )  # fmt: skip


def launch_outer(
    u: torch.Tensor,
    x: torch.Tensor,
    out: torch.Tensor,
    setting: Setting,
    gates: torch.Tensor | None,
    index: int | None,
    scale: float,
) -> None:
    tokens, layer, threshold, inflate, drop = _keys(setting, u, index)
    gated, block = gates is not None, BLOCKS["outer"]
    _outer_kernel[(len(out), -(-out.shape[2] // block["COLUMNS"]))](
        u, x, out, gates if gated else u, tokens, setting.lanes.spans, layer, threshold, inflate, scale,
        x.stride(0), out.shape[2], out.shape[1], gates.shape[1] if gates is not None else 1, setting.rank,
        DROP=drop, GATED=gated, R=_rows(out.shape[1]), **block,
    )  # fmt: skip


if triton is not None:

    @triton.jit
    def _mix(x):
        """The 32-bit hash of experts/dropout.py."""
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
        x, w, out, u, gates, dgates, keys, tiles, layer, threshold, inflate, scale, x_row, w_lane, N, MR, M, RANK,
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
                if GATED:
                    slope = tl.load(u + at, inside, 0.0).to(tl.float32) * acc
                    for m in range(0, M):  # sums over each expert's r columns
                        own = tl.sum(tl.where((r // RANK == m)[None, :], slope, 0.0), 1)
                        to = dgates + wide_t * M + m
                        tl.store(to, tl.load(to, live, 0.0) + own, live)
                    acc = acc * tl.load(gates + wide_t[:, None] * M + (r // RANK)[None, :], inside, 0.0)
            tl.store(out + at, acc.to(out.dtype.element_ty), inside)

    @triton.jit(do_not_specialize=["layer", "threshold"])
    def _expand_kernel(
        y, u, w, gates, keys, tiles, layer, threshold, inflate, scale, y_row, w_lane, N, MR, M, RANK,
        DROP: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
        R: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
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
            if GATED:
                g = tl.load(gates + wide_t[:, None] * M + (r // RANK)[None, :], inside, 0.0)
                rows = (rows.to(tl.float32) * g).to(rows.dtype)
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

    @triton.jit(do_not_specialize=["layer", "threshold"])
    def _outer_kernel(
        u, x, out, gates, keys, spans, layer, threshold, inflate, scale, x_row, N, MR, M, RANK,
        DROP: tl.constexpr, GATED: tl.constexpr, R: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        lane = tl.program_id(0)
        start, end = tl.load(spans + lane * 2), tl.load(spans + lane * 2 + 1)
        r = tl.arange(0, R)
        c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        acc = tl.zeros([R, COLUMNS], tl.float32)
        for first in range(start, end, TOKENS):
            t = first + tl.arange(0, TOKENS)
            live = t < end
            wide_t = t.to(tl.int64)
            inside = live[None, :] & (r < MR)[:, None]
            left = tl.load(u + wide_t[None, :] * MR + r[:, None], inside, 0.0)  # [R, TOKENS]
            if GATED:
                g = tl.load(gates + wide_t[None, :] * M + (r // RANK)[:, None], inside, 0.0)
                left = (left.to(tl.float32) * g).to(left.dtype)
            right = tl.load(x + wide_t[:, None] * x_row + c[None, :], live[:, None] & (c < N)[None, :], 0.0)
            if DROP:
                kept = _kept(keys, t, live, c, layer, threshold)
                right = tl.where(kept, right.to(tl.float32) * inflate, 0.0).to(right.dtype)
            acc = tl.dot(left, right, acc, input_precision="ieee")
        at = out + (lane.to(tl.int64) * MR + r)[:, None] * N + c[None, :]
        tl.store(at, (acc * scale).to(out.dtype.element_ty), (r < MR)[:, None] & (c < N)[None, :])
