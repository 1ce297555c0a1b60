"""Lanes that hold the experts which their examples use, and no others.

Where gates are given (one expert an example), most of M experts are closed to a client: they get no gradient and
would only take memory and time. A lane without them learns the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from fedweave.experts.layout import AdapterLayout
from fedweave.kernels import power_of_two
from fedweave.training.batch import Lane
from fedweave.training.lockstep import LaneResult


class Narrow:
    """Lanes of one layout as lanes of a narrower one, and their results back again."""

    def __init__(self, layout: AdapterLayout, lanes: Sequence[Lane]):
        self.wide = layout
        opened = [lane.opened for lane in lanes if lane.opened is not None]  # [M] each
        most = max(int(own.sum()) for own in opened)
        # a power of two, so that a trainer and what it has recorded last although rounds differ
        self.layout = layout.narrow(min(layout.experts, power_of_two(max(1, most))))
        self._columns = [self._held(lane, own) for lane, own in zip(lanes, opened, strict=True)]
        self.lanes = [
            replace(
                lane,
                theta=lane.theta[columns],
                gates=lane.gates[:, kept] if lane.gates is not None else None,
                trainable=None if lane.trainable is None else lane.trainable.to(columns.device)[columns],
                opened=None,
            )
            for lane, (kept, columns) in zip(lanes, self._columns, strict=True)
        ]

    def _held(self, lane: Lane, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts [M] and the columns [P] that a lane holds: its own, and others up to the common number."""
        spare = self.layout.experts - int(own.sum())
        kept = own | (~own & ((~own).cumsum(0) <= spare))
        owner = self.wide.owner(lane.theta.device)
        return kept, torch.cat([kept, torch.ones(1, dtype=torch.bool)]).to(owner.device)[owner]

    def widened(self, results: Iterator[LaneResult]) -> Iterator[LaneResult]:
        """What the lanes learned; where they hold nothing they have not moved."""
        for (_, columns), result in zip(self._columns, results, strict=False):
            delta = result.delta_theta.new_zeros(self.wide.size)
            delta[columns.to(delta.device)] = result.delta_theta
            yield replace(result, delta_theta=delta)


def narrowed(layout: AdapterLayout, lanes: Sequence[Lane]) -> Narrow | None:
    """None where nothing can be left out: a router opens every expert, and so may a client's examples."""
    if layout.experts == 1 or any(lane.opened is None for lane in lanes):
        return None
    narrow = Narrow(layout, lanes)
    return narrow if narrow.layout.experts < layout.experts else None
