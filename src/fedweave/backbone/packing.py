"""Padding-free batches: many sequences in one row of tokens, attention only within each sequence.

    tokens     | a a a | b b | c c c c |      one row, [1, T]
    positions  | 0 1 2 | 0 1 | 0 1 2 3 |
    lanes      |   0   |  0  |    1    |      sequences of one lane (client) stand side by side

Everything but attention treats tokens alone, so a packed row costs what its real tokens cost. Attention is
reached through transformers' attention interface under the name ``fedweave_packed``: on CUDA one
variable-length flash kernel, elsewhere a gather into a right-padded block where causality alone keeps the
padding out of sight.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

_varlen: Any = None  # torch >= 2.10: a flash kernel for packed sequences, CUDA only
try:
    from torch.nn.attention import varlen as _varlen_module

    _varlen = _varlen_module.varlen_attn
except ImportError:  # pragma: no cover - older torch
    pass
_VARLEN_ARGUMENTS = set(inspect.signature(_varlen).parameters) if _varlen else set()

ATTENTION = "fedweave_packed"


@dataclass
class Packed:
    """Token rows and the bookkeeping that attention and experts need; S sequences, T tokens, K lanes."""

    ids: torch.Tensor  # [1, T]
    positions: torch.Tensor  # [1, T]
    sequence: torch.Tensor  # [T] which sequence a token belongs to
    boundaries: torch.Tensor  # [S + 1] int32, cumulative lengths
    longest: int
    lane_ends: torch.Tensor  # [K] int32, where each lane's tokens end
    lane_lengths: list[int]  # the same on the host, as lengths
    lane_of_sequence: list[int]

    @property
    def tokens(self) -> int:
        return self.ids.shape[1]

    @property
    def starts(self) -> torch.Tensor:  # [S]
        return self.boundaries[:-1]


def pack(lanes: Sequence[Sequence[np.ndarray]], device: torch.device) -> Packed:
    """Lay the sequences of every lane end to end. A lane is a client (or a bucket) with its own adapters."""
    rows = [row for lane in lanes for row in lane]
    lengths = np.array([len(row) for row in rows])
    ends = np.cumsum(lengths)
    lane_lengths = [int(sum(len(row) for row in lane)) for lane in lanes]
    sequence = np.repeat(np.arange(len(rows)), lengths)
    positions = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)

    def to(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array)).to(dtype)
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

    return Packed(
        ids=to(np.concatenate(rows), torch.long)[None],
        positions=to(positions, torch.long)[None],
        sequence=to(sequence, torch.long),
        boundaries=to(np.concatenate([[0], ends]), torch.int32),
        longest=int(lengths.max()),
        lane_ends=to(np.cumsum(lane_lengths), torch.int32),
        lane_lengths=lane_lengths,
        lane_of_sequence=[k for k, lane in enumerate(lanes) for _ in lane],
    )


def token_budget_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Group indices by similar length into batches of at most ``budget`` tokens; longest first."""
    batches: list[list[int]] = []
    room = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not batches or lengths[index] > room:
            batches.append([])
            room = budget
        batches[-1].append(index)
        room -= lengths[index]
    return batches


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, T, D]
    key: torch.Tensor,  # [1, kv_heads, T, D]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    packed: Packed | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each packed sequence; returns [1, T, heads, D]."""
    if packed is None:
        raise RuntimeError("this decoder does not hand the packing on to its attention layers")
    window = sliding_window if sliding_window and sliding_window < packed.longest else None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
    scale = scaling if scaling is not None else q.shape[-1] ** -0.5
    if q.is_cuda and _varlen is not None and softcap is None and q.dtype != torch.float32:
        return _flash(q, k, v, packed, scale, window)[None], None
    return _padded(q, k, v, packed, scale, window, softcap)[None], None


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: Packed, scale: float, window: int | None
) -> torch.Tensor:
    options: dict[str, Any] = {"scale": scale}
    if "window_size" in _VARLEN_ARGUMENTS:
        options["window_size"] = (window - 1 if window else -1, 0)
    else:  # pragma: no cover - torch 2.10
        options["is_causal"] = True
    if "enable_gqa" in _VARLEN_ARGUMENTS:
        options["enable_gqa"] = k.shape[1] != q.shape[1]
    elif k.shape[1] != q.shape[1]:  # pragma: no cover
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    cu = packed.boundaries
    return _varlen(q, k.contiguous(), v.contiguous(), cu, cu, packed.longest, packed.longest, **options)


def _padded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    packed: Packed,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    length = packed.longest
    steps = torch.arange(length, device=q.device)
    # Past a sequence's end the index runs into its neighbour: garbage keys, but later than every real query.
    index = (packed.starts[:, None] + steps).clamp_(max=packed.tokens - 1).flatten()  # [S·L]
    q, k, v = (x.index_select(0, index).unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))
    if window is None and softcap is None:  # q, k, v [S, heads, L, D]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    else:
        out = _explicit(q, k, v, steps, scale, window, softcap)
    real = packed.sequence * length + packed.positions[0]  # [T]
    return out.transpose(1, 2).flatten(0, 1).index_select(0, real)  # [T, heads, D]


def _explicit(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    steps: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Scores written out, for the soft-cap and the sliding window that fused kernels ignore."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)).float() * scale  # [S, heads, L, L]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = steps[:, None] - steps[None, :]
    hidden = distance < 0
    if window is not None:
        hidden = hidden | (distance >= window)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1).to(q.dtype) @ v


def register() -> None:
    """Make ``fedweave_packed`` known to transformers. Without a mask function of that name no mask is built."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, packed_attention)
