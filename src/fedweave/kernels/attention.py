"""Causal attention within short packed sequences.

Instructions and their answers have about a hundred tokens. Flash kernels are made for thousands: their blocks are
larger than such a sequence, their backward pass adds up dq through memory in no fixed order, and the gradients of
grouped key heads are written for every query head and summed afterwards. Here a block is at most 64 tokens of one
sequence:

    forward    a block of queries, one head            walks over the keys before it
    dq         the same
    dk, dv     a block of keys, one key head           walks over the queries after it, of all heads that share it

Every number is written once by one block, so two runs are alike to the last bit.

Rotary positions belong to it where whole heads rotate and nothing else comes between (:func:`rotated_attention`).
Keys are read by many blocks, so they rotate where they lie, before; a block of queries, which one block of threads
owns, rotates as it is read and is left rotated for the way back; dq and dk rotate back as they are written. So
neither q, k and v nor their gradients are copied between the product with [Wq Wk Wv] and attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedweave.kernels import Context, power_of_two
from fedweave.kernels import attention_kernels as kernels

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
_NUMBERS = 64 * 64  # of a block of keys that rotate, in either half of a head


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


def rotated_attention(
    qkv: Tensor,  # [T, (heads + 2·kv_heads)·D]; its queries and keys are rotated in place
    cos: Tensor,  # [T, D], both halves alike
    sin: Tensor,
    kv_heads: int,
    tiles: Tensor,  # [n, 3] int32
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """[T, heads, D]: rotary positions and attention of a joint product."""
    return _RotatedAttention.apply(qkv, cos, sin, kv_heads, tiles, scale, softcap)


class _Attended(Context, Protocol):
    launch: Launch
    kv_heads: int


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
        q, k, v, *rest = ctx.saved_tensors
        slopes = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
        ctx.launch.back((q, k, v), rest[0], rest[1], grads[0].contiguous(), slopes)
        return *slopes, None, None, None


class _RotatedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Attended,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv_heads: int,
        tiles: Tensor,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        ctx.launch, ctx.kv_heads = Launch(tiles, scale, softcap, (cos, sin)), kv_heads
        q, k, v = _apart(qkv, cos.shape[1], kv_heads)
        ctx.launch.turn_keys(k)
        out, lse = ctx.launch.forward(q, k, v)
        ctx.save_for_backward(qkv, out, lse)
        return out

    @staticmethod
    def backward(ctx: _Attended, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, out, lse = ctx.saved_tensors
        dqkv, width = torch.empty_like(qkv), out.shape[2]
        parts, slopes = (_apart(x, width, ctx.kv_heads) for x in (qkv, dqkv))
        ctx.launch.back(parts, out, lse, grads[0].contiguous(), slopes)
        return dqkv, None, None, None, None, None, None


def _apart(qkv: Tensor, width: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the queries [T, heads, D], keys and values [T, kv_heads, D]."""
    heads = qkv.unflatten(1, (-1, width))
    return heads[:, : -2 * kv_heads], heads[:, -2 * kv_heads : -kv_heads], heads[:, -kv_heads:]


@dataclass(frozen=True)
class Launch:
    """The kernels on one batch's sequences."""

    tiles: Tensor  # [n, 3]
    scale: float
    softcap: float | None
    turn: tuple[Tensor, Tensor] | None = None  # cos and sin [T, D], where queries come as they left their product

    def turn_keys(self, k: Tensor) -> None:
        """Rotate k [T, kv_heads, D] where it lies."""
        assert self.turn is not None
        half = k.shape[2] // 2
        block = max(16, min(64, _NUMBERS // half))
        kernels.turn_keys_kernel[(-(-len(k) // block), k.shape[1])](
            k, *self.turn, len(k), k.stride(0), k.stride(1), TOKENS=block, HALF=half
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out [T, heads, D], and log2 of the softmax's sum [T, heads]."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], device=q.device)
        numbers, options = self._arguments("forward", q, k, v)
        kernels.attend_kernel[(len(self.tiles), q.shape[1])](
            q, k, v, *self._turn(q), self.tiles, out, lse, *numbers, **options
        )
        return out, lse

    def back(self, parts: Sequence[Tensor], out: Tensor, lse: Tensor, do: Tensor, slopes: Sequence[Tensor]) -> None:
        """dq [T, heads, D], dk and dv [T, kv_heads, D] into ``slopes``."""
        delta = self.dq(parts, out, lse, do, slopes[0])
        self.dkv(parts, lse, delta, do, slopes[1], slopes[2])

    def dq(self, parts: Sequence[Tensor], out: Tensor, lse: Tensor, do: Tensor, dq: Tensor) -> Tensor:
        """Writes dq, and returns Σ do · out [T, heads]."""
        q, k, v = parts
        delta = torch.empty_like(lse)
        numbers, options = self._arguments("dq", q, k, v)
        kernels.attend_dq_kernel[(len(self.tiles), q.shape[1])](
            q, k, v, *self._turn(q), self.tiles, out, do, lse, delta, dq, dq.stride(0), dq.stride(1),
            *numbers, **options,
        )  # fmt: skip
        return delta

    def dkv(self, parts: Sequence[Tensor], lse: Tensor, delta: Tensor, do: Tensor, dk: Tensor, dv: Tensor) -> None:
        q, k, v = parts
        numbers, options = self._arguments("dkv", q, k, v)
        kernels.attend_dkv_kernel[(len(self.tiles), k.shape[1])](
            q, k, v, *self._turn(q), self.tiles, do, lse, delta, dk, dv, dk.stride(0), dk.stride(1),
            *numbers, **options,
        )  # fmt: skip

    def _turn(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return self.turn or (q, q)

    def _arguments(
        self, kernel: str, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[tuple[float | int, ...], dict[str, int]]:
        heads, width = q.shape[1], q.shape[2]
        padded = max(16, power_of_two(width))
        numbers = (
            self.scale, self.softcap or 0.0, heads,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        )  # fmt: skip
        return numbers, {
            "GROUP": heads // k.shape[1],
            "CAPPED": self.softcap is not None,
            "TURNED": self.turn is not None,
            "W": width,
            "D": padded,
            "BLOCK": BLOCK,
            **BLOCKS[kernel][max(64, padded)],
        }
