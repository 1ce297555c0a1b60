"""The router r(x; φ): Linear(d, h) → GELU → Linear(h, M) → softmax, on the cached prompt feature.

Like the experts it is a flat vector, so that K clients' routers are one [K, Q] matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from fedweave.errors import UserError


@dataclass(frozen=True)
class RouterLayout:
    width: int  # d
    hidden: int  # h
    experts: int  # M
    scale: str = "raw"  # how a feature is scaled before it enters

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        d, h, m = self.width, self.hidden, self.experts
        return {"linear1.weight": (h, d), "linear1.bias": (h,), "linear2.weight": (m, h), "linear2.bias": (m,)}

    @property
    def size(self) -> int:
        """Q: the number of router parameters."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def views(self, phi: torch.Tensor) -> dict[str, torch.Tensor]:
        """Named tensors that share phi's memory; phi [..., Q]."""
        named, offset = {}, 0
        for name, shape in self.shapes.items():
            count = math.prod(shape)
            named[name] = phi[..., offset : offset + count].unflatten(-1, shape)
            offset += count
        return named

    def initial(self, seed: int) -> torch.Tensor:
        """The default initialisation of two nn.Linear layers."""
        generator = torch.Generator().manual_seed(seed)
        phi = torch.empty(self.size)
        views = self.views(phi)
        for layer, fan_in in (("linear1", self.width), ("linear2", self.hidden)):
            bound = 1 / math.sqrt(fan_in)
            for part in ("weight", "bias"):
                views[f"{layer}.{part}"].uniform_(-bound, bound, generator=generator)
        return phi

    def narrowed(self, phi: torch.Tensor, kept: Sequence[int]) -> tuple[RouterLayout, torch.Tensor]:
        """The same router without the outputs of all other experts: what they had goes to the rest. phi [Q]."""
        narrow = replace(self, experts=len(kept))
        parts = {
            name: view[list(kept)] if name.startswith("linear2") else view for name, view in self.views(phi).items()
        }
        return narrow, torch.cat([part.flatten() for part in parts.values()])

    def inputs(self, features: torch.Tensor) -> torch.Tensor:
        """Bring features to the scale that this router reads."""
        if self.scale == "unit":
            return F.normalize(features, dim=-1) * math.sqrt(self.width)
        return features

    def logits(self, views: dict[str, torch.Tensor], features: torch.Tensor) -> torch.Tensor:
        """K routers on their own features: [K, S, d] to [K, S, M]."""
        w1, b1, w2, b2 = views.values()
        hidden = F.gelu(torch.baddbmm(b1[:, None], self.inputs(features), w1.transpose(1, 2)))  # [K, S, h]
        return torch.baddbmm(b2[:, None], hidden, w2.transpose(1, 2))

    def route(self, phi: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """One router's weights: phi [Q], features [n, d] to [n, M]."""
        return self.logits(self.views(phi[None]), features[None])[0].softmax(-1)


def active_experts(routing: str) -> int | None:
    """How many experts a routing leaves active: sparse is 1, top3 is 3, soft is None for all."""
    if routing in ("soft", "sparse"):
        return None if routing == "soft" else 1
    count = routing.removeprefix("top")
    if not routing.startswith("top") or not count.isdecimal() or int(count) < 1:
        raise UserError(f"routing={routing!r} is unknown; use sparse, soft, or topK as in top2.")
    return int(count)


def sparsify(weights: torch.Tensor, routing: str) -> torch.Tensor:
    """Soft weights [n, M] as they are, or the largest of each row, renormalised."""
    keep = active_experts(routing)
    if keep is None:
        return weights
    top = weights.topk(min(keep, weights.shape[1]), dim=1)
    kept = torch.zeros_like(weights).scatter(1, top.indices, top.values)
    return kept / kept.sum(1, keepdim=True)
