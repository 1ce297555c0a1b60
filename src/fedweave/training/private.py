"""Steps that tell little of any single example (DP-SGD): each example's gradient is clipped, noise is in their sum.

An example is a lane of its own, so that the pass which trains K clients gives every example's gradient, over its
experts and its router together. A client's step is the sum of its examples' clipped gradients, with noise, over the
number of examples that it *expects* to draw: how many it drew is nobody's business. What AdamW makes of it is no
longer about the examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch

from fedweave.streams import stream_key
from fedweave.training.batch import Lane, Shield, build_batch
from fedweave.training.lockstep import LaneGroup, LaneResult, LockstepTrainer, clip_lanes

_TOGETHER = {"cpu": 16, "cuda": 256}  # examples of one client whose gradients are taken at once


class PrivateTrainer(LockstepTrainer):
    """Lanes with a :class:`~fedweave.training.batch.Shield`, in lockstep; nothing of it is recorded."""

    def _train_group(self, lanes: Sequence[Lane], on_step: Callable[[int], None]) -> list[LaneResult]:
        device, rates = self.backbone.device, [self.config.lr, self.router_rate]
        shields = [lane.shield for lane in lanes if lane.shield is not None]
        assert len(shields) == len(lanes)
        rows = [torch.stack([lane.theta for lane in lanes]).to(device, torch.float32)]  # [K, P]
        if self.router is not None:
            rows.append(torch.stack([lane.phi for lane in lanes if lane.phi is not None]).to(device, torch.float32))
        starts = [row.clone() for row in rows]
        mask = None
        if lanes[0].trainable is not None:
            mask = torch.stack([lane.trainable for lane in lanes if lane.trainable is not None]).to(device)
        groups = [{"params": [row], "lr": rate * self.pace} for row, rate in zip(rows, rates, strict=False)]
        optimiser = torch.optim.AdamW(groups, weight_decay=0.0, foreach=False)
        steps, history = [len(lane.schedule) for lane in lanes], []
        deltas: dict[int, list[torch.Tensor]] = {}
        for step in range(max(steps)):
            sums, losses = self._sums(lanes, step, rows, shields[0].clip)
            grads = [noised(part, shields, step, name) for part, name in zip(sums, ("theta", "phi"), strict=False)]
            if mask is not None:
                grads[0] *= mask
            for row, grad, group in zip(rows, grads, optimiser.param_groups, strict=True):
                row.grad = grad
                if decay := group["lr"] * self.config.weight_decay:
                    row.mul_(1 - decay * (mask if mask is not None and row is rows[0] else 1))
            optimiser.step()
            history.append(losses)
            for k, own in enumerate(steps):
                if own == step + 1:
                    deltas[k] = [row[k] - start[k] for row, start in zip(rows, starts, strict=True)]
            on_step(sum(own > step for own in steps))
        table = torch.stack(history, 1).tolist()  # [K, steps]
        tokens = [sum(len(e.ids) for step in range(max(steps)) for e in lane.examples(step)) for lane in lanes]
        return [
            LaneResult(deltas[k][0], deltas[k][1] if len(rows) > 1 else None, table[k][:own], tokens[k])
            for k, own in enumerate(steps)
        ]

    def _sums(
        self, lanes: Sequence[Lane], step: int, rows: Sequence[torch.Tensor], clip: float
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Sums of clipped gradients, [K, …] as ``rows``, and every lane's mean loss [K]; zero where nothing was
        drawn."""
        drawn = [(k, int(i)) for k, lane in enumerate(lanes) for i in lane.indices(step)]
        sums, losses = [torch.zeros_like(row) for row in rows], torch.zeros(len(lanes), device=rows[0].device)
        if not drawn:
            return sums, losses
        grads, found = self._gradients(lanes, drawn, step, rows)
        for grad in grads:
            grad.nan_to_num_(0.0, 0.0, 0.0)  # an example that diverges counts nothing, and nobody hears of it
        clip_lanes(grads, clip)
        owner = torch.tensor([k for k, _ in drawn], device=found.device)
        for total, grad in zip(sums, grads, strict=True):
            total.index_add_(0, owner, grad)
        count = torch.bincount(owner, minlength=len(lanes)).clamp(min=1)
        return sums, losses.index_add_(0, owner, found) / count

    def _gradients(
        self, lanes: Sequence[Lane], drawn: Sequence[tuple[int, int]], step: int, rows: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """(gradients [n, …], losses [n]) of single examples, each a lane of its own: (lane, example) of every one,
        ``rows`` are the lanes' parameters."""
        single = [
            replace(
                lanes[k],
                schedule=[np.array([i])],
                theta=rows[0][k],
                phi=rows[1][k] if len(rows) > 1 else None,
                key=(*lanes[k].key, step, i),
            )
            for k, i in drawn
        ]
        group = LaneGroup(self, len(single), single[0].trainable is not None, single[0].gates is not None)
        group.load(single)
        losses = group.backward(build_batch(single, 0, self.dropout, rows[0].device))
        return [part.collect() for part in group.parts], losses

    def gradients(self, lane: Lane) -> Iterator[torch.Tensor]:
        """Every example's own gradient where the lane starts, in the order of its first batch; [n, P] of some at a
        time."""
        device = self.backbone.device
        start, drawn = [lane.theta[None].to(device)], [(0, int(i)) for i in lane.schedule[0]]
        together = min(_TOGETHER[device.type], self._most or len(drawn))
        while drawn:
            rows = None
            with suppress(torch.OutOfMemoryError):  # room is made once no traceback holds what it was tried with
                rows = self._gradients([lane], drawn[:together], 0, start)[0][0]
            if rows is None:
                self._make_room(together)
                together = self._most or together
                continue
            yield rows
            drawn = drawn[together:]


def noised(sums: torch.Tensor, shields: Sequence[Shield], step: int, name: str) -> torch.Tensor:
    """[K, n] sums of clipped gradients with their noise, over the examples that each lane expects to draw."""
    rows = []
    for row, shield in zip(sums, shields, strict=True):
        noise = normal(row, shield.noise * shield.clip, "step", shield.key, step, name)
        rows.append((row + noise) / shield.expected)
    return torch.stack(rows)


def normal(like: torch.Tensor, deviation: float, *key: int | str) -> torch.Tensor:
    """Gaussian noise of this tensor's shape, from a key that is secret wherever somebody is to be protected."""
    generator = torch.Generator(like.device).manual_seed(stream_key("noise", *key))
    return torch.randn(like.shape, generator=generator, device=like.device) * deviation
