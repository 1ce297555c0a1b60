"""Warmup signatures: one short LoRA per bucket, all from the same start; its B factors are the signature.

A signature can travel whole, or as a *sketch*: every B block is multiplied by a fixed random sign matrix, the same
for all clients, and shrinks to k numbers. Cosines survive (Johnson and Lindenstrauss): the distance of two
signatures of L blocks with cosine ρ is off by about (1 - ρ²)/√(kL), so that what is close stays close, with a bias
below 0.2/k. For 60 blocks and k = 64 that is 0.016 at worst, and a signature is 8 kB.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F

from fedweave.experts.layout import AdapterLayout
from fedweave.streams import stream_key


@dataclass(frozen=True)
class Signatures:
    """How adapters of one expert become signatures s(i,c), [D] each; client and server agree on it beforehand."""

    layout: AdapterLayout
    sketch: int  # k, numbers per block; 0: whole blocks
    seed: int

    @property
    def widths(self) -> list[int]:
        """Numbers that every block sends; a block no longer than a sketch of it goes whole."""
        whole = [self.layout.rank * out for out in self.layout.outputs]
        return [min(width, self.sketch) if self.sketch else width for width in whole]

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16 if self.sketch else torch.float32

    def of(self, adapters: torch.Tensor) -> torch.Tensor:
        """adapters [..., P of one expert] to their signatures [..., D], on the CPU."""
        blocks = self.layout.b_blocks(adapters.float())
        if not self.sketch:
            return torch.cat(blocks, -1).cpu()
        # Unit length, so that half precision holds them whatever the learning rate was; a zero block stays zero.
        sent = [
            F.normalize(block @ signs.to(block) if signs is not None else block, dim=-1)
            for block, signs in zip(blocks, self._signs, strict=True)
        ]
        return torch.cat(sent, -1).half().cpu()

    @cached_property
    def _signs(self) -> list[torch.Tensor | None]:
        """The sign matrix of every block, [size, k] int8; raw Philox bits are the same on every machine."""
        made: list[torch.Tensor | None] = []
        for index, (width, out) in enumerate(zip(self.widths, self.layout.outputs, strict=True)):
            size = self.layout.rank * out
            words = np.random.Philox(key=stream_key("sketch", self.seed, index)).random_raw(-(-size * width // 64))
            bits = np.unpackbits(words.astype("<u8").view(np.uint8))[: size * width].reshape(size, width)
            made.append(torch.from_numpy(bits.astype(np.int8) * 2 - 1) if width < size else None)
        return made

    def blocks(self, signatures: Sequence[torch.Tensor]) -> list[np.ndarray]:
        """Per block one float32 matrix over all prototypes, [prototypes, width]."""
        stacked = torch.stack(list(signatures)).float().numpy()
        return np.split(stacked, np.cumsum(self.widths)[:-1], axis=1)
