"""Dropout whose mask is a pure function of who, when and where.

The mask bit of a number is a hash of (seed, client, round, step, layer, token, channel). It needs no random
state, so a resumed run repeats it, and it does not know how clients were grouped, so K clients in lockstep
drop exactly what each would drop alone. An ordinary generator can promise neither.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fedweave.kernels import to_device

_MULTIPLY_1, _MULTIPLY_2 = 0x7FEB352D, -2073319277  # 32-bit avalanche constants; the second is 0x846CA68B, signed


@dataclass
class DropoutKeys:
    """What one step needs: the rate and a 32-bit key per token."""

    rate: float
    tokens: torch.Tensor  # [T] int32

    @property
    def threshold(self) -> int:
        """A hash below it is dropped."""
        return int(-(2**31) + self.rate * 2**32)

    @classmethod
    def of(
        cls, rate: float, lane_keys: list[int], lane_lengths: list[int], tokens: int, device: torch.device
    ) -> DropoutKeys:
        """``lane_keys`` name client, round and step; tokens are numbered within their lane."""
        keys = np.zeros(tokens, dtype=np.int32)  # rows of no lane keep 0
        end = 0
        for key, length in zip(lane_keys, lane_lengths, strict=True):
            start, end = end, end + length
            keys[start:end] = np.random.Philox(key=key).random_raw(length).astype(np.uint32).view(np.int32)
        return cls(rate, to_device(keys, device, torch.int32))


def _avalanche(x: torch.Tensor) -> torch.Tensor:
    """Mix 32-bit integers in place. It ends with a multiplication, so the high bits, which the comparison with a
    threshold reads, depend on every input bit."""
    x ^= x >> 16
    x *= _MULTIPLY_1
    x ^= x >> 15
    x *= _MULTIPLY_2
    return x


def keep_mask(keys: DropoutKeys, channels: int, layer: int) -> torch.Tensor:
    """[T, channels] True on the numbers that stay; they are then divided by 1 - rate."""
    channel = torch.arange(channels, dtype=torch.int32, device=keys.tokens.device) * 2 + 1
    channel = _avalanche(channel + (layer + 1) * 40_503)
    return _avalanche(keys.tokens[:, None] ^ channel) >= keys.threshold
