"""Products over lane segments: what the experts' forward and backward passes are made of.

Row t of a packed batch is multiplied by its own lane's matrix; ``kernels/experts.py`` says what for.
"""

from __future__ import annotations

import torch

from fedweave.experts.dropout import DropoutKeys, keep_mask
from fedweave.kernels import fused
from fedweave.kernels.lanes import Lanes, Setting
from fedweave.kernels.triton_products import launch_expand, launch_outer, launch_reduce


def reduce(x: torch.Tensor, a: torch.Tensor, setting: Setting, index: int) -> torch.Tensor:
    """u = dropout(x) Aᵀ, [T, M·r]."""
    if fused(x):
        u = x.new_empty(len(x), a.shape[1])
        launch_reduce(x, a, u, setting, index)
        return u
    return _by_lane(_dropped(x, setting.dropout, index), a.transpose(1, 2), setting.lanes)


def reduce_back(
    dy: torch.Tensor,
    b: torch.Tensor,
    u: torch.Tensor,
    setting: Setting,
    gates: torch.Tensor | None,
    dgates: torch.Tensor | None,
) -> torch.Tensor:
    """du = g ⊙ (scale · dy Bᵀ); adds the gates' gradient to ``dgates``."""
    if fused(dy):
        du = torch.empty_like(u)
        launch_reduce(dy, b, du, setting, None, u, gates, dgates)
        return du
    du = _by_lane(dy, b.transpose(1, 2), setting.lanes) * setting.scale
    if gates is None or dgates is None:
        return du
    per_expert = (len(u), -1, setting.rank)
    dgates += (u * du).view(per_expert).float().sum(-1)
    return _gated(du, gates, setting.rank)


def expand(
    y: torch.Tensor,
    u: torch.Tensor,
    w: torch.Tensor,  # [K, M·r, m]
    setting: Setting,
    gates: torch.Tensor | None,
    scale: float,
    drop: int | None = None,
    add: bool = True,
) -> None:
    """y (+)= dropout(scale · (g ⊙ u) W)."""
    if fused(y):
        launch_expand(y, u, w, setting, gates, scale, drop, add)
        return
    delta = _by_lane(_gated(u, gates, setting.rank), w, setting.lanes) * scale
    delta = _dropped(delta, setting.dropout if drop is not None else None, drop or 0)
    y.add_(delta) if add else y.copy_(delta)


def outer(
    u: torch.Tensor,
    x: torch.Tensor,
    like: torch.Tensor,  # [K, M·r, n]
    setting: Setting,
    gates: torch.Tensor | None,
    drop: int | None,
    scale: float,
) -> torch.Tensor:
    """scale · Σ over a lane's tokens of (g ⊙ u)ᵀ dropout(x), [K, M·r, n]."""
    if fused(x):
        out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        launch_outer(u, x, out, setting, gates, drop, scale)
        return out
    u = _gated(u, gates, setting.rank)
    x = _dropped(x, setting.dropout if drop is not None else None, drop or 0)
    lengths = setting.lanes.lengths
    used = sum(lengths)
    parts = zip(u[:used].split(lengths), x[:used].split(lengths), strict=True)
    return torch.stack([left.T @ right for left, right in parts]) * scale


def _by_lane(x: torch.Tensor, w: torch.Tensor, lanes: Lanes) -> torch.Tensor:
    """Row t of x times its own lane's matrix."""
    if len(w) == 1:
        return x @ w[0]
    used = sum(lanes.lengths)
    parts = [part @ m for part, m in zip(x[:used].split(lanes.lengths), w, strict=True)]
    return torch.cat([*parts, x.new_zeros(len(x) - used, w.shape[2])])


def _gated(u: torch.Tensor, gates: torch.Tensor | None, rank: int) -> torch.Tensor:
    return u if gates is None else (u * gates.to(u.dtype).repeat_interleave(rank, 1))


def _dropped(x: torch.Tensor, keys: DropoutKeys | None, index: int) -> torch.Tensor:
    return x if keys is None else x * keep_mask(keys, x.shape[1], index) / (1 - keys.rate)
