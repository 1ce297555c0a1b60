"""Dropout whose mask is a pure function of who, when and where.

The mask bit of a number is a hash of (seed, client, round, step, layer, token, channel). It needs no random
state, so a resumed run repeats it, and it does not know how clients were grouped, so K clients in lockstep
drop exactly what each would drop alone. An ordinary generator can promise neither.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch

_MULTIPLY_1, _MULTIPLY_2 = (
    0x7FEB352D,
    -2073319277,
)  # 32-bit avalanche constants (the second is 0x846CA68B, signed)


def stream_key(*parts: int | str) -> int:
    """A 63-bit seed for one purpose, from the names of that purpose."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass
class DropoutKeys:
    """What one step needs: the rate and a 32-bit key per token."""

    rate: float
    tokens: torch.Tensor  # [T] int32

    @classmethod
    def of(cls, rate: float, lane_keys: list[int], lane_lengths: list[int], device: torch.device) -> DropoutKeys:
        """``lane_keys`` name client, round and step; tokens are numbered within their lane."""
        keys = [
            np.random.Philox(key=key).random_raw(length).astype(np.uint32).view(np.int32)
            for key, length in zip(lane_keys, lane_lengths, strict=True)
        ]
        return cls(rate, torch.from_numpy(np.concatenate(keys)).to(device, non_blocking=True))


def _avalanche(x: torch.Tensor) -> torch.Tensor:
    """Mix 32-bit integers in place. It ends with a multiplication, so the high bits, which the comparison with a
    threshold reads, depend on every input bit."""
    x ^= x >> 16
    x *= _MULTIPLY_1
    x ^= x >> 15
    x *= _MULTIPLY_2
    return x


def keyed_dropout(x: torch.Tensor, keys: DropoutKeys, layer: int) -> torch.Tensor:
    """Inverted dropout on x [T, n]."""
    channel = torch.arange(x.shape[1], dtype=torch.int32, device=x.device) * 2 + 1
    channel = _avalanche(channel + (layer + 1) * 40_503)
    mixed = _avalanche(keys.tokens[:, None] ^ channel)  # [T, n]
    threshold = int(-(2**31) + keys.rate * 2**32)
    return x * (mixed >= threshold) / (1 - keys.rate)
