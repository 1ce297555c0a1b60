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
    sure: bool = False  # a kept expert counts as much as the router is sure of it, not fully
    axes: int = 0  # k: directions that familiar prompts span; 0: every prompt is familiar

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        d, h, m = self.width, self.hidden, self.experts
        layers = {"linear1.weight": (h, d), "linear1.bias": (h,), "linear2.weight": (m, h), "linear2.bias": (m,)}
        known = {"familiar.mean": (d,), "familiar.scale": (d,), "familiar.axes": (self.axes, d)}
        return layers | (known | {"familiar.limit": (1,)} if self.axes else {})

    @property
    def size(self) -> int:
        """Q: the number of router parameters, and of what it knows of familiar prompts."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def first_layer(self) -> int:
        """The columns that all experts share are as many, and the first."""
        return self.hidden * (self.width + 1)

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

    def grown(self, phi: torch.Tensor, more: int) -> tuple[RouterLayout, torch.Tensor]:
        """The same router with so many more outputs, which prefer nothing yet; the old ones stay. phi [Q]."""
        wide, parts = replace(self, experts=self.experts + more), dict(self.views(phi))
        for name in ("linear2.weight", "linear2.bias"):
            parts[name] = torch.cat([parts[name], parts[name].new_zeros(more, *parts[name].shape[1:])])
        return wide, torch.cat([part.flatten() for part in parts.values()])

    def outputs(self, first: int, end: int | None = None) -> torch.Tensor:
        """[n] the columns of φ that belong to the outputs of experts ``first``, ``first`` + 1, … before ``end``"""
        views = self.views(torch.arange(self.size))
        return torch.cat([views["linear2.weight"][first:end].flatten(), views["linear2.bias"][first:end]])

    @property
    def trained(self) -> RouterLayout:
        """What training moves of it: this router, to which every prompt is familiar. Its φ is the beginning."""
        return replace(self, axes=0)

    def forgetting(self, phi: torch.Tensor) -> torch.Tensor:
        """φ of :attr:`trained`; phi [..., Q]."""
        return phi[..., : self.trained.size]

    def inputs(self, features: torch.Tensor) -> torch.Tensor:
        """Bring features to the scale that this router reads."""
        if self.scale == "unit":
            return F.normalize(features, dim=-1) * math.sqrt(self.width)
        return features

    def logits(self, views: dict[str, torch.Tensor], features: torch.Tensor) -> torch.Tensor:
        """K routers on their own features: [K, S, d] to [K, S, M]."""
        w1, b1, w2, b2 = list(views.values())[:4]
        hidden = F.gelu(torch.baddbmm(b1[:, None], self.inputs(features), w1.transpose(1, 2)))  # [K, S, h]
        return torch.baddbmm(b2[:, None], hidden, w2.transpose(1, 2))

    def gradient_norms(
        self, views: dict[str, torch.Tensor], features: torch.Tensor, errors: torch.Tensor
    ) -> torch.Tensor:
        """Length of every example's own gradient, [K, S]; errors [K, S, M] are its loss's slopes by its logits. A
        layer's gradient is an outer product of what went in and the slope of what came out."""
        w1, b1, w2, _ = list(views.values())[:4]
        x = self.inputs(features)
        before = torch.baddbmm(b1[:, None], x, w1.transpose(1, 2))  # [K, S, h]
        slope = torch.special.ndtr(before) + before * torch.exp(-before.square() / 2) / math.sqrt(2 * math.pi)
        inner = (errors @ w2) * slope
        squares = errors.square().sum(-1) * (F.gelu(before).square().sum(-1) + 1)
        return (squares + inner.square().sum(-1) * (x.square().sum(-1) + 1)).sqrt()

    def route(self, phi: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """One router's weights: phi [Q], features [n, d] to [n, M]; a row of zeros is a prompt like none before."""
        weights = self.logits(self.views(phi[None]), features[None])[0].softmax(-1)
        if not self.axes:
            return weights
        return weights * (self.strangeness(phi, features) <= self.views(phi)["familiar.limit"])[:, None]

    def choose(self, phi: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """The expert of every prompt, familiar or not: phi [Q], features [n, d] to [n]."""
        return self.logits(self.views(phi[None]), features[None])[0].argmax(-1)

    def odds(
        self, phi: torch.Tensor, features: torch.Tensor, among: torch.Tensor, temperature: float
    ) -> torch.Tensor:
        """How likely each expert ``among`` these, [M] bool, is drawn: phi [Q], features [n, d] to [n, M]."""
        logits = self.logits(self.views(phi[None]), features[None])[0] / temperature
        return logits.masked_fill(~among.to(logits.device), float("-inf")).softmax(-1)

    # ---------------------------------------------------------------------------------- familiar prompts

    def knowing(
        self, phi: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor, axes: torch.Tensor, limit: float
    ) -> tuple[RouterLayout, torch.Tensor]:
        """This router, told what familiar prompts are like: mean and scale [d] standardise a feature, axes [k, d]
        are what familiar ones span, limit is how far out they lie. phi [Q]."""
        more = [mean, scale, axes.flatten(), mean.new_tensor([limit])]
        return replace(self, axes=len(axes)), torch.cat([phi, *(part.to(phi) for part in more)])

    def strangeness(self, phi: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """How far prompts lie outside of what familiar ones span: features [n, d] to [n]."""
        views = self.views(phi)
        return outside(features, views["familiar.mean"], views["familiar.scale"], views["familiar.axes"])


def outside(features: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor, axes: torch.Tensor) -> torch.Tensor:
    """How far features [n, d], standardised by mean and scale [d], lie outside of axes [k, d]: their squared length
    outside over their whole length, [n]. What lies far out along the axes alone is more of the known."""
    z = (features - mean) * scale  # [n, d]
    whole = z.square().sum(-1)
    return (whole - (z @ axes.T).square().sum(-1)) / whole.clamp(min=torch.finfo(z.dtype).tiny).sqrt()


def active_experts(routing: str) -> int | None:
    """How many experts a routing leaves active: sparse is 1, top3 is 3, soft is None for all."""
    if routing in ("soft", "sparse"):
        return None if routing == "soft" else 1
    count = routing.removeprefix("top")
    if not routing.startswith("top") or not count.isdecimal() or len(count) > 9 or int(count) < 1:
        raise UserError(f"routing={routing[:40]!r} is unknown; use sparse, soft, or topK as in top2.")
    return int(count)


def sparsify(weights: torch.Tensor, routing: str, sure: bool = False) -> torch.Tensor:
    """Soft weights [n, M] as they are, or the largest of each row: renormalised, or with ``sure`` as they are, so
    that a part which all experts share carries the rest. A row of zeros stays one."""
    keep = active_experts(routing)
    if keep is None:
        return weights
    top = weights.topk(min(keep, weights.shape[1]), dim=1)
    kept = torch.zeros_like(weights).scatter(1, top.indices, top.values)
    return kept if sure else kept / kept.sum(1, keepdim=True).clamp(min=torch.finfo(kept.dtype).tiny)
