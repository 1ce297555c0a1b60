"""Where a product's input comes from, so that nobody keeps it for the way back.

The experts' gradients read their layers' input once more. Norms and gated units are quickly computed, from what the
way back keeps anyway: so whoever reads them there computes them as it reads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedweave.kernels.gated import gated

PLAIN, NORM, SILU, GELU = range(4)


class Source(NamedTuple):
    """What to read of an input [T, n], and how to make it of that."""

    kind: int
    kept: tuple[Tensor, ...]

    @staticmethod
    def plain(x: Tensor) -> Source:
        return Source(PLAIN, (x,))

    @staticmethod
    def norm(s: Tensor, inverse: Tensor, weight: Tensor) -> Source:
        """w · s / rms(s): s [T, n], 1 / rms(s) [T], w [n]."""
        return Source(NORM, (s.detach(), inverse, weight))

    @staticmethod
    def gated(both: Tensor, gelu: bool) -> Source:
        """act(g) · u of [g u] [T, 2·n]."""
        return Source(GELU if gelu else SILU, (both.detach(),))

    @property
    def width(self) -> int:
        return self.kept[0].shape[1] // (2 if self.kind in (SILU, GELU) else 1)

    @torch.no_grad()
    def computed(self) -> Tensor:
        """The input itself, [T, n]."""
        if self.kind == PLAIN:
            return self.kept[0]
        if self.kind == NORM:
            s, inverse, weight = self.kept
            return (weight * (s.float() * inverse[:, None]).to(weight.dtype)).to(s.dtype)
        return gated(self.kept[0], self.kind == GELU)
