"""The key-value cache of a batch whose rows come and go.

    row 0  | p p p p a a . . . . |      prompts and answers start at column 0: no row is padded on the left
    row 1  | p p a a a . . . . . |
    row 2  | p p p p p p a . . . |

It stands in for transformers' own cache and knows two kinds of passes: reading packed prompts into chosen rows,
and one more token for each of the first rows.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch

from fedweave.backbone.packing import Packed

_COLUMNS = 64  # attention looks at a whole number of such blocks of columns


class RowCache:
    """Keys and values, [rows, kv_heads, length, D] per layer; memory is taken when the first prompt is read."""

    def __init__(self, rows: int, length: int):
        self.rows, self.length = rows, length
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._packed: Packed | None = None
        self._slots = self._positions = torch.empty(0)
        self._columns = length

    def read(self, packed: Packed, slots: torch.Tensor | None = None) -> RowCache:
        """The next pass reads prompts; sequence s goes to row ``slots[s]``, or to row s."""
        self._packed = packed
        self._slots = packed.sequence if slots is None else slots[packed.sequence]  # [T]
        return self

    def extend(self, positions: torch.Tensor, columns: int | None = None) -> RowCache:
        """The next passes add one token to each of the first rows, at its position [rows]. ``columns`` bounds how
        far attention looks, where that is known on the host."""
        self._packed, self._positions = None, positions
        self._columns = self.length if columns is None else min(self.length, -(-columns // _COLUMNS) * _COLUMNS)
        return self

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by every attention layer: keep the new keys and values, hand on those to look at."""
        if layer not in self.layers:
            shape = (self.rows, key.shape[1], self.length, key.shape[3])
            self.layers[layer] = (_zeros(key, shape), _zeros(value, shape))
        keys, values = self.layers[layer]
        if self._packed is not None:  # prompts: keep them by row, hand the packed ones on
            column = self._packed.positions[0]
            keys[self._slots, :, column] = key[0].transpose(0, 1)
            values[self._slots, :, column] = value[0].transpose(0, 1)
            return key, value
        count = len(self._positions)
        row = torch.arange(count, device=key.device)
        keys[row, :, self._positions] = key[:, :, 0]
        values[row, :, self._positions] = value[:, :, 0]
        return keys[:count, :, : self._columns], values[:count, :, : self._columns]

    def grow(self, length: int, used: Sequence[int]) -> None:
        """Rows of a greater length; ``used`` are the columns in use of the first rows."""
        self.length = length
        for layer, pair in self.layers.items():
            grown = []
            for old in pair:
                new = _zeros(old, (self.rows, old.shape[1], length, old.shape[3]))
                for row, count in enumerate(used):
                    new[row, :, :count] = old[row, :, :count]
                grown.append(new)
            self.layers[layer] = (grown[0], grown[1])

    def move(self, source: int, target: int, length: int) -> None:
        """Row ``source``, of which ``length`` columns are in use, takes the place of row ``target``."""
        for keys, values in self.layers.values():
            keys[target, :, :length] = keys[source, :, :length]
            values[target, :, :length] = values[source, :, :length]

    def get_seq_length(self, layer: int = 0) -> int:
        return 0  # positions are always given explicitly


def _zeros(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Zeros, for a masked weight of 0 times garbage may be NaN. On a CPU the system hands the pages out as they are
    first written, so that a cache for long answers costs little while answers are short; and no huge pages, of
    which every row and head would touch one."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    size = math.prod(shape) * like.element_size()
    if not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return torch.from_numpy(np.zeros(size, np.uint8)).view(like.dtype).view(shape)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=like.dtype).view(shape)
