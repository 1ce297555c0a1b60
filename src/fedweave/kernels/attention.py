"""Causal attention within short packed sequences.

Instructions and their answers have about a hundred tokens. Flash kernels are made for thousands: their blocks are
larger than such a sequence, their backward pass adds up dq through memory in no fixed order, and the gradients of
grouped key heads are written for every query head and summed afterwards. Here a block is at most 64 tokens of one
sequence:

    forward    a block of queries, one head            walks over the keys before it
    dq         the same
    dk, dv     a block of keys, one key head           walks over the queries after it, of all heads that share it

Every number is written once by one block, so two runs are alike to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedweave.kernels import Context, power_of_two, tl, triton

BLOCK = 64  # tokens of a sequence that one block of threads owns
# Tokens that it looks at in a step, warps, and stages of loads, for heads of up to 64 and up to 128: the fastest of
# what ``python -m benchmarks.kernels --try`` tried on an H200.
BLOCKS: dict[str, dict[int, dict[str, int]]] = {
    "forward": {
        64: {"STEP": 32, "num_warps": 4, "num_stages": 3},
        128: {"STEP": 32, "num_warps": 4, "num_stages": 3},
    },
    "dq": {64: {"STEP": 32, "num_warps": 4, "num_stages": 3}, 128: {"STEP": 32, "num_warps": 4, "num_stages": 2}},
    "dkv": {64: {"STEP": 32, "num_warps": 4, "num_stages": 1}, 128: {"STEP": 16, "num_warps": 4, "num_stages": 3}},
}
LONGEST, WIDEST = 512, 128  # tokens and head width; beyond, flash kernels are faster


def sequence_tiles(lengths: np.ndarray, tokens: int) -> np.ndarray:
    """[n, 3] first token of every block, and start and end of its sequence; as many as so many sequences of so many
    tokens may need, the spare ones empty."""
    ends = np.cumsum(lengths)
    blocks = -(-lengths // BLOCK)
    sequence = np.repeat(np.arange(len(lengths)), blocks)
    inner = np.arange(len(sequence)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    starts = (ends - lengths)[sequence]
    tiles = np.zeros((tokens // BLOCK + len(lengths), 3), dtype=np.int32)
    tiles[: len(sequence)] = np.stack([starts + inner * BLOCK, starts, ends[sequence]], 1)
    return tiles


def short_attention(
    q: Tensor,  # [T, heads, D]
    k: Tensor,  # [T, kv_heads, D]
    v: Tensor,
    tiles: Tensor,  # [n, 3] int32
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """[T, heads, D]."""
    return _ShortAttention.apply(q, k, v, tiles, scale, softcap)


class _Attended(Context, Protocol):
    launch: Launch


class _ShortAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Attended, q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, scale: float, softcap: float | None
    ) -> Tensor:
        q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
        ctx.launch = Launch(tiles, scale, softcap)
        out, lse = ctx.launch.forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: _Attended, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        do = grads[0].contiguous()
        dq, delta = ctx.launch.dq(q, k, v, out, lse, do)
        dk, dv = ctx.launch.dkv(q, k, v, lse, delta, do)
        return dq, dk, dv, None, None, None


@dataclass(frozen=True)
class Launch:
    """The three kernels on one batch's sequences."""

    tiles: Tensor  # [n, 3]
    scale: float
    softcap: float | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out [T, heads, D], and log2 of the softmax's sum [T, heads]."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], device=q.device)
        numbers, options = self._arguments("forward", q, k, v)
        _attend_kernel[(len(self.tiles), q.shape[1])](q, k, v, self.tiles, out, lse, *numbers, **options)
        return out, lse

    def dq(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, do: Tensor) -> tuple[Tensor, Tensor]:
        """dq [T, heads, D], and Σ do · out [T, heads]."""
        dq, delta = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty_like(lse)
        numbers, options = self._arguments("dq", q, k, v)
        _attend_dq_kernel[(len(self.tiles), q.shape[1])](
            q, k, v, self.tiles, out, do, lse, delta, dq, *numbers, **options
        )
        return dq, delta

    def dkv(self, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, do: Tensor) -> tuple[Tensor, Tensor]:
        """dk and dv [T, kv_heads, D]."""
        dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
        numbers, options = self._arguments("dkv", q, k, v)
        _attend_dkv_kernel[(len(self.tiles), k.shape[1])](
            q, k, v, self.tiles, do, lse, delta, dk, dv, *numbers, **options
        )
        return dk, dv

    def _arguments(
        self, kernel: str, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[tuple[float | int, ...], dict[str, int]]:
        heads, kv_heads, width = q.shape[1], k.shape[1], q.shape[2]
        padded = max(16, power_of_two(width))
        numbers = (
            self.scale, self.softcap or 0.0, heads, kv_heads,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        )  # fmt: skip
        return numbers, {
            "GROUP": heads // kv_heads,
            "CAPPED": self.softcap is not None,
            "W": width,
            "D": padded,
            "BLOCK": BLOCK,
            **BLOCKS[kernel][max(64, padded)],
        }


if triton is not None:

    @triton.jit
    def _inside(live, c, W: tl.constexpr, D: tl.constexpr):
        """[tokens, D] what exists: rows that are live, and columns where D is more than the head's width."""
        if W == D:
            return live[:, None]
        else:
            return live[:, None] & (c < W)[None, :]

    @triton.jit
    def _rows(x, t, head, row, head_row, c, live, W: tl.constexpr, D: tl.constexpr):
        """[tokens, D] of one head."""
        at = x + t.to(tl.int64)[:, None] * row + head * head_row + c[None, :]
        return tl.load(at, _inside(live, c, W, D), 0.0)

    @triton.jit
    def _pairs(
        k, v, begin, end, kv, k_row, k_head, v_row, v_head, c,
        COUNT: tl.constexpr, W: tl.constexpr, D: tl.constexpr,
    ):  # fmt: skip
        """COUNT tokens from ``begin``, which of them exist, and their keys and values [COUNT, D] of one head."""
        j = begin + tl.arange(0, COUNT)
        near = j < end
        keys = _rows(k, j, kv, k_row, k_head, c, near, W, D)
        return j, near, keys, _rows(v, j, kv, v_row, v_head, c, near, W, D)

    @triton.jit
    def _scores(a, b, scale, softcap, CAPPED: tl.constexpr):
        """Scaled scores [A, B] of rows a and b, capped where the model caps them."""
        s = tl.dot(a, tl.trans(b), input_precision="ieee") * scale
        if CAPPED:
            s = softcap * (
                1 - 2 / (tl.exp2(s * (2 * 1.4426950408889634 / softcap)) + 1)
            )  # softcap · tanh(s / softcap)
        return s

    @triton.jit
    def _attend_kernel(
        q, k, v, tiles, out, lse, scale, softcap, HEADS, KV, q_row, q_head, k_row, k_head, v_row, v_head,
        GROUP: tl.constexpr, CAPPED: tl.constexpr, W: tl.constexpr, D: tl.constexpr,
        BLOCK: tl.constexpr, STEP: tl.constexpr,
    ):  # fmt: skip
        tile, head = tiles + tl.program_id(0) * 3, tl.program_id(1)
        first, start, end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
        if first < end:
            t, c = first + tl.arange(0, BLOCK), tl.arange(0, D)
            live = t < end
            mine = _rows(q, t, head, q_row, q_head, c, live, W, D)
            most = tl.full([BLOCK], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK], tl.float32)
            acc = tl.zeros([BLOCK, D], tl.float32)
            for begin in range(start, tl.minimum(first + BLOCK, end), STEP):
                j, near, keys, values = _pairs(
                    k, v, begin, end, head // GROUP, k_row, k_head, v_row, v_head, c, STEP, W, D
                )
                s = _scores(mine, keys, scale, softcap, CAPPED) * 1.4426950408889634
                s = tl.where((j[None, :] <= t[:, None]) & near[None, :], s, float("-inf"))
                above = tl.maximum(most, tl.max(s, 1))
                shrink = tl.exp2(most - above)
                p = tl.exp2(s - above[:, None])
                total = total * shrink + tl.sum(p, 1)
                acc = acc * shrink[:, None] + tl.dot(p.to(values.dtype), values, input_precision="ieee")
                most = above
            wide = t.to(tl.int64) * HEADS + head
            inside = _inside(live, c, W, D)
            tl.store(out + wide[:, None] * W + c[None, :], (acc / total[:, None]).to(out.dtype.element_ty), inside)
            tl.store(lse + wide, most + tl.log2(total), live)

    @triton.jit
    def _slopes(s, p, dp, delta, softcap, CAPPED: tl.constexpr):
        """Gradient of the scaled scores before the cap: p (dp - delta), times 1 - tanh²."""
        ds = p * (dp - delta)
        if CAPPED:
            ds = ds * (1 - (s / softcap) * (s / softcap))
        return ds

    @triton.jit
    def _attend_dq_kernel(
        q, k, v, tiles, out, do, lse, delta, dq,
        scale, softcap, HEADS, KV, q_row, q_head, k_row, k_head, v_row, v_head,
        GROUP: tl.constexpr, CAPPED: tl.constexpr, W: tl.constexpr, D: tl.constexpr,
        BLOCK: tl.constexpr, STEP: tl.constexpr,
    ):  # fmt: skip
        tile, head = tiles + tl.program_id(0) * 3, tl.program_id(1)
        first, start, end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
        if first < end:
            t, c = first + tl.arange(0, BLOCK), tl.arange(0, D)
            live = t < end
            mine = _rows(q, t, head, q_row, q_head, c, live, W, D)
            slope = _rows(do, t, head, HEADS * W, W, c, live, W, D)
            wide = t.to(tl.int64) * HEADS + head
            answer = _rows(out, t, head, HEADS * W, W, c, live, W, D)
            across = tl.sum(slope.to(tl.float32) * answer.to(tl.float32), 1)
            tl.store(delta + wide, across, live)
            norm = tl.load(lse + wide, live, 0.0)
            acc = tl.zeros([BLOCK, D], tl.float32)
            for begin in range(start, tl.minimum(first + BLOCK, end), STEP):
                j, near, keys, values = _pairs(
                    k, v, begin, end, head // GROUP, k_row, k_head, v_row, v_head, c, STEP, W, D
                )
                s = _scores(mine, keys, scale, softcap, CAPPED)
                seen = (j[None, :] <= t[:, None]) & near[None, :]
                p = tl.where(seen, tl.exp2(s * 1.4426950408889634 - norm[:, None]), 0.0)
                dp = tl.dot(slope, tl.trans(values), input_precision="ieee")
                ds = _slopes(s, p, dp, across[:, None], softcap, CAPPED)
                acc += tl.dot(ds.to(keys.dtype), keys, input_precision="ieee")
            inside = _inside(live, c, W, D)
            tl.store(dq + wide[:, None] * W + c[None, :], (acc * scale).to(dq.dtype.element_ty), inside)

    @triton.jit
    def _attend_dkv_kernel(
        q, k, v, tiles, do, lse, delta, dk, dv,
        scale, softcap, HEADS, KV, q_row, q_head, k_row, k_head, v_row, v_head,
        GROUP: tl.constexpr, CAPPED: tl.constexpr, W: tl.constexpr, D: tl.constexpr,
        BLOCK: tl.constexpr, STEP: tl.constexpr,
    ):  # fmt: skip
        tile, kv = tiles + tl.program_id(0) * 3, tl.program_id(1)
        first, end = tl.load(tile), tl.load(tile + 2)
        if first < end:
            c = tl.arange(0, D)
            j, near, keys, values = _pairs(k, v, first, end, kv, k_row, k_head, v_row, v_head, c, BLOCK, W, D)
            to_k = tl.zeros([BLOCK, D], tl.float32)
            to_v = tl.zeros([BLOCK, D], tl.float32)
            for head in range(kv * GROUP, (kv + 1) * GROUP):
                for begin in range(first, end, STEP):
                    t = begin + tl.arange(0, STEP)
                    live = t < end
                    theirs = _rows(q, t, head, q_row, q_head, c, live, W, D)
                    slope = _rows(do, t, head, HEADS * W, W, c, live, W, D)
                    wide = t.to(tl.int64) * HEADS + head
                    norm, across = tl.load(lse + wide, live, 0.0), tl.load(delta + wide, live, 0.0)
                    s = _scores(keys, theirs, scale, softcap, CAPPED)  # [keys, queries]
                    seen = (j[:, None] <= t[None, :]) & near[:, None] & live[None, :]
                    p = tl.where(seen, tl.exp2(s * 1.4426950408889634 - norm[None, :]), 0.0)
                    to_v += tl.dot(p.to(slope.dtype), slope, input_precision="ieee")
                    dp = tl.dot(values, tl.trans(slope), input_precision="ieee")
                    ds = _slopes(s, p, dp, across[None, :], softcap, CAPPED)
                    to_k += tl.dot(ds.to(theirs.dtype), theirs, input_precision="ieee")
            at = (j.to(tl.int64) * KV + kv)[:, None] * W + c[None, :]
            inside = _inside(near, c, W, D)
            tl.store(dk + at, (to_k * scale).to(dk.dtype.element_ty), inside)
            tl.store(dv + at, to_v.to(dv.dtype.element_ty), inside)
