"""Products over lane segments: what the experts' forward and backward passes are made of.

Row t of a packed batch is multiplied by its own lane's matrix; ``kernels/experts.py`` says what for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedweave.kernels import fused
from fedweave.kernels.dropout import DropoutKeys, keep_mask
from fedweave.kernels.lanes import Lanes, Setting
from fedweave.kernels.triton_products import launch_expand, launch_outer, launch_reduce, launch_reduce_back


def reduce(
    x: torch.Tensor, a: torch.Tensor, setting: Setting, index: int, gates: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """u = dropout(x) Aᵀ and g ⊙ u, both [T, M·r]."""
    if fused(x):
        u = x.new_empty(len(x), a.shape[1])
        gu = u if gates is None else torch.empty_like(u)
        launch_reduce(x, a, u, setting, index, gates, gu)
        return u, gu
    u = _by_lane(_dropped(x, setting.dropout, index), a.transpose(1, 2), setting.lanes)
    return u, _gated(u, gates, setting.rank)


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
        launch_reduce_back(dy, b, du, setting, u, gates, dgates)
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
    scale: float,
    drop: int | None = None,
    add: bool = True,
) -> None:
    """y (+)= dropout(scale · u W)."""
    if fused(y):
        launch_expand(y, u, w, setting, scale, drop, add)
        return
    delta = _by_lane(u, w, setting.lanes) * scale
    delta = _dropped(delta, setting.dropout if drop is not None else None, drop or 0)
    y.add_(delta) if add else y.copy_(delta)


def outer(
    du: torch.Tensor,
    x: torch.Tensor,
    gu: torch.Tensor,
    dy: torch.Tensor,
    factors: Sequence[torch.Tensor],  # A [K, M·r, n] and B [K, M·r, m]
    places: Sequence[torch.Tensor | None],
    setting: Setting,
    index: int,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Sums over every lane's tokens, duᵀ dropout(x) and scale · guᵀ dy; ``places``, where given, are added to
    instead: autograd would copy each of many small gradients to its place with a kernel of its own."""
    if fused(x):
        da, db = places
        if da is not None and db is not None:
            launch_outer(du, x, da, gu, dy, db, setting, index, add=True)
            return None, None
        da, db = (torch.empty(f.shape, dtype=f.dtype, device=f.device) for f in factors)
        launch_outer(du, x, da, gu, dy, db, setting, index, add=False)
        return da, db
    dropped = _dropped(x, setting.dropout, index)
    return _outer(du, dropped, setting.lanes), _outer(gu, dy, setting.lanes) * setting.scale


def _outer(left: torch.Tensor, right: torch.Tensor, lanes: Lanes) -> torch.Tensor:
    used = sum(lanes.lengths)
    parts = zip(left[:used].split(lanes.lengths), right[:used].split(lanes.lengths), strict=True)
    return torch.stack([one.T @ other for one, other in parts])


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
