"""Padding-free batches: many sequences in one row of tokens, attention only within each sequence.

    tokens     | a a a | b b | c c c c |      one row, [1, T]
    positions  | 0 1 2 | 0 1 | 0 1 2 3 |
    lanes      |   0   |  0  |    1    |      sequences of one lane (client) stand side by side

Everything but attention treats tokens alone, so a packed row costs what its real tokens cost. Attention is
reached through transformers' attention interface under the name ``fedweave_packed``: on CUDA one kernel for
sequences of any lengths (our own for short ones, torch's flash kernel for long ones), elsewhere a gather into
right-padded blocks of similar length where causality alone keeps the padding out of sight. The same function
serves decoding, where one new token per row looks at a key-value cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedweave.kernels import power_of_two, to_device, triton
from fedweave.kernels.attention import LONGEST, WIDEST, rotated_attention, sequence_tiles, short_attention
from fedweave.kernels.lanes import Lanes
from fedweave.kernels.rotary import HeadNorms, rotate

ATTENTION = "fedweave_packed"
JOINT = True  # rotary positions within our own kernel, where it can; off for measurements
_REPEATING = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass
class Blocks:
    """Sequences side by side for attention, right-padded to one length in every block."""

    parts: list[tuple[Tensor, int]]  # of each block the tokens [S·L] and L
    real: Tensor  # [T] where every token stands among all blocks' positions


@dataclass
class Packed:
    """Token rows and the bookkeeping that attention and experts need; S sequences, T tokens, K lanes."""

    ids: Tensor  # [1, T]
    positions: Tensor  # [1, T]
    sequence: Tensor  # [T] which sequence a token belongs to
    boundaries: Tensor  # [S + 1] int32, cumulative lengths
    longest: int
    lanes: Lanes
    similar: Blocks | None = None  # where shapes may differ from batch to batch: on a CPU
    tiles: Tensor | None = None  # [n, 3] int32, where the kernel for short sequences attends: on CUDA

    @property
    def tokens(self) -> int:
        return self.ids.shape[1]

    @property
    def starts(self) -> Tensor:  # [S]
        return self.boundaries[:-1]

    @property
    def ends(self) -> Tensor:
        """[T] whether a token is the last of its sequence."""
        following = self.sequence[1:] != self.sequence[:-1]
        return torch.cat([following, following.new_ones(1)])

    @classmethod
    def of(
        cls,
        ids: np.ndarray,  # [T] sequences end to end, lane by lane
        lengths: np.ndarray,  # [S]
        lane_lengths: list[int],
        device: torch.device,
        longest: int | None = None,  # an upper bound, where shapes must not change
    ) -> Packed:
        ends = np.cumsum(lengths)
        sequence = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(len(ids)) - np.repeat(ends - lengths, lengths)
        longest = longest or int(lengths.max())
        short = device.type == "cuda" and triton is not None and longest <= LONGEST
        return cls(
            ids=to_device(ids, device)[None],
            positions=to_device(positions, device)[None],
            sequence=to_device(sequence, device),
            boundaries=to_device(np.concatenate([[0], ends]), device, torch.int32),
            longest=longest,
            lanes=Lanes.of(lane_lengths, len(ids), device),
            similar=_similar(lengths, ends) if device.type == "cpu" else None,
            tiles=to_device(sequence_tiles(lengths, len(ids)), device, torch.int32) if short else None,
        )

    @property
    def blocks(self) -> Blocks:
        """Of similar length, or one that pads all to the longest. The latter is computed from tensors and never
        kept, for a recorded step must compute it anew."""
        if self.similar is not None:
            return self.similar
        steps = torch.arange(self.longest, device=self.ids.device)
        # Past its end a sequence's last token stands again: keys later than every real query, not a neighbour's,
        # whose NaN would be its own
        last = (self.boundaries[1:, None] - 1).clamp_(min=0)
        index = (self.starts[:, None] + steps).minimum(last).flatten()  # [S·L]
        return Blocks([(index, self.longest)], self.sequence * self.longest + self.positions[0])


def _similar(lengths: np.ndarray, ends: np.ndarray) -> Blocks:
    """Attention costs the square of the padded length, so a sequence is padded little: to the next of a few lengths
    that depend on nothing else, so that who is packed with it changes nothing."""
    parts, place, real = [], 0, np.empty(ends[-1], int)
    padded = _EDGES[np.searchsorted(_EDGES, lengths)]
    for length in np.unique(padded[lengths > 0]).tolist():
        members = np.flatnonzero(padded == length)
        firsts = ends[members] - lengths[members]
        index = np.minimum(firsts[:, None] + np.arange(length), ends[members, None] - 1)  # [S, L]
        for row, (first, n) in enumerate(zip(firsts, lengths[members], strict=True)):
            real[first : first + n] = place + row * length + np.arange(n)
        parts.append((torch.from_numpy(index.ravel()), length))
        place += index.size
    return Blocks(parts, torch.from_numpy(real))


def _edges(most: int) -> np.ndarray:
    """8, 16, 24, … and, once that is less, a quarter more each time."""
    edges = [8]
    while edges[-1] < most:
        edges.append(-(-max(edges[-1] + 8, edges[-1] * 5 // 4) // 8) * 8)
    return np.array(edges)


_EDGES = _edges(2**24)


def pack(lanes: Sequence[Sequence[np.ndarray]], device: torch.device) -> Packed:
    """Lay the sequences of every lane end to end. A lane is a client (or a bucket) with its own adapters."""
    rows = [row for lane in lanes for row in lane]
    lane_lengths = [int(sum(len(row) for row in lane)) for lane in lanes]
    return Packed.of(np.concatenate(rows), np.array([len(row) for row in rows]), lane_lengths, device)


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
    query: Tensor,  # [1, heads, T, D]
    key: Tensor,  # [1, kv_heads, T, D]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    packed: Packed | None = None,
    last: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence; returns [1, T, heads, D].

    With ``last`` [rows], the position of each row's newest token, it is one step of decoding instead: query
    [rows, heads, 1, D] against a cache [rows, kv_heads, L, D].
    """
    if last is not None:
        return _decode(query, key, value, last, scaling, sliding_window, softcap).transpose(1, 2), None
    if packed is None:
        raise RuntimeError("this decoder does not hand the packing on to its attention layers")
    # squeeze, not [0]: the gradient of an index is a zeroed copy
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
    return attend(q, k, v, packed, scaling, sliding_window, softcap).unsqueeze(0), None


def attend(
    q: Tensor,  # [T, heads, D]
    k: Tensor,  # [T, kv_heads, D]
    v: Tensor,
    packed: Packed,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention within each sequence, [T, heads, D]."""
    window = sliding_window if sliding_window and sliding_window < packed.longest else None
    scale = scaling if scaling is not None else q.shape[-1] ** -0.5
    if packed.tiles is not None and _short(q, q.shape[2], packed, sliding_window):
        return short_attention(q, k, v, packed.tiles, scale, softcap)
    if q.is_cuda and softcap is None and q.dtype != torch.float32 and (flash := varlen()) is not None:
        return _flash(*flash, q, k, v, packed, scale, window)
    return _padded(q, k, v, packed, scale, window, softcap)


def attend_rotated(
    qkv: Tensor,  # [T, (heads + 2·kv_heads)·D], which may be changed
    turn: tuple[Tensor, Tensor],  # cos and sin [T, R], of every head's first R columns
    heads: int,
    kv_heads: int,
    packed: Packed,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None = None,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Rotary positions, after norms of heads where a model has them, and attention within each sequence,
    [T, heads, D]; in one where the kernel for short sequences can."""
    width = qkv.shape[1] // (heads + 2 * kv_heads)
    whole = norms is None and turn[0].shape[1] == width == max(16, power_of_two(width))
    if JOINT and whole and packed.tiles is not None and _short(qkv, width, packed, sliding_window):
        return rotated_attention(qkv, *turn, kv_heads, packed.tiles, scaling, softcap)
    q, k, v = rotate(qkv, *turn, heads, kv_heads, norms)  # [T, heads, D]
    return attend(q, k, v, packed, scaling, sliding_window, softcap)


def _short(x: Tensor, width: int, packed: Packed, sliding_window: int | None) -> bool:
    """Whether heads of this width attend by our own kernel."""
    windowed = sliding_window and sliding_window < packed.longest
    return packed.tiles is not None and not windowed and width <= WIDEST and x.dtype != torch.float32


@cache
def varlen() -> tuple[Callable[..., Tensor], set[str]] | None:
    """torch's flash kernel for packed sequences (CUDA, torch >= 2.10) and the names of its arguments. Importing it
    takes seconds, so only those who use it do."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # pragma: no cover - older torch
        return None
    return cast("Callable[..., Tensor]", varlen_attn), set(inspect.signature(varlen_attn).parameters)


def _flash(
    kernel: Callable[..., Tensor],
    known: set[str],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: Packed,
    scale: float,
    window: int | None,
) -> Tensor:
    options: dict[str, float | bool | tuple[int, int]] = {"scale": scale}
    if "window_size" in known:
        options["window_size"] = (window - 1 if window else -1, 0)
    else:  # pragma: no cover - torch 2.10
        options["is_causal"] = True
    if "enable_gqa" in known:  # before torch 2.12 fewer key heads than query heads need no permission
        options["enable_gqa"] = k.shape[1] != q.shape[1]
    cu = packed.boundaries
    return kernel(q, k.contiguous(), v.contiguous(), cu, cu, packed.longest, packed.longest, **options)


def _padded(
    q: Tensor, k: Tensor, v: Tensor, packed: Packed, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    blocks, outs = packed.blocks, []
    for index, length in blocks.parts:
        # [S, heads, L, D]
        part = [x.index_select(0, index).unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v)]
        outs.append(_causal(part[0], part[1], part[2], scale, window, softcap).transpose(1, 2).flatten(0, 1))
    return torch.cat(outs).index_select(0, blocks.real)  # [T, heads, D]


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
    if window is None and softcap is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    steps = torch.arange(q.shape[2], device=q.device)
    distance = steps[:, None] - steps[None, :]
    return _capped(q, k, v, (distance < 0) | (distance >= (window or q.shape[2])), scale, softcap)


def _capped(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Scores written out, for the soft-cap that fused kernels ignore; ``hidden`` marks keys out of sight."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)).float() * scale  # [S, heads, queries, keys]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1).to(q.dtype) @ v


def _decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    last: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    distance = last[:, None] - torch.arange(key.shape[2], device=key.device)  # [rows, L]
    seen = distance >= 0
    if window:
        seen = seen & (distance < window)
    seen = seen[:, None, None]  # [rows, 1, 1, L]
    if softcap is None:
        # Not cuDNN's kernel, torch's first choice on a Hopper GPU, which rounds differently from call to call.
        # The others would copy keys for each query head, so a key head's query heads are its queries.
        queries = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])  # [rows, kv_heads, group, D]
        with sdpa_kernel(_REPEATING) if query.is_cuda else nullcontext():
            return F.scaled_dot_product_attention(queries, key, value, seen, scale=scaling).reshape(query.shape)
    return _capped(query, key, value, ~seen, scaling or query.shape[-1] ** -0.5, softcap)


def register() -> None:
    """Make ``fedweave_packed`` known to transformers. Without a mask function of that name no mask is built."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, packed_attention)
