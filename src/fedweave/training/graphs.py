"""CUDA graphs of whole training steps.

At a small backbone's size the host needs several times longer to launch a step's thousands of kernels than the
GPU needs to run them. So a step (forward, backward, clipping, optimiser) is recorded once and replayed; a new
batch is copied into the recorded one's memory. Shapes are fixed by a ``Capacity`` that holds every step of the
schedule; a later round that needs more is recorded anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from fedweave.training.batch import Capacity, Lane, StepBatch, build_batch

_TRIALS = 2  # eager steps before recording: libraries and allocator settle


@lru_cache(maxsize=1)
def _recording_stream() -> torch.cuda.Stream:
    """One stream for all recordings: every stream that multiplies keeps a workspace of tens of MiB for good."""
    return torch.cuda.Stream()


def _released(batch: StepBatch) -> torch.Tensor:
    raise RuntimeError("this recording has been released")


class GraphedSteps:
    """One recorded step and the memory it reads from and writes to."""

    def __init__(self, step: Callable[[StepBatch], torch.Tensor]):
        self._step = step
        self._capacity: Capacity | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: StepBatch | None = None
        self._losses = torch.empty(0)

    def prepare(self, lanes: Sequence[Lane], dropout: float, device: torch.device) -> Capacity:
        """Make sure that a recording fits ``lanes``. Recording disturbs the parameters: load them afterwards."""
        need = Capacity.of(lanes)
        if self._capacity is None or not self._capacity.holds(need):
            self._capacity = need if self._capacity is None else self._capacity.joined(need)
            self._graph, self._batch = None, build_batch(lanes, 0, dropout, device, self._capacity)
            self._record(self._batch)
        return self._capacity

    def release(self) -> None:
        """Give the recording's memory back. The step refers to this object's owner, so nobody else would."""
        self._graph = self._batch = self._capacity = None
        self._losses = torch.empty(0)  # it lies in the recording's pool
        self._step = _released

    def _record(self, batch: StepBatch) -> None:
        side = _recording_stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_TRIALS):
                self._step(batch)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.empty_cache()  # the recording allocates from a pool of its own
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=side):
            self._losses = self._step(batch)

    def run(self, batch: StepBatch) -> torch.Tensor:
        """Replay on another batch; returns the lanes' losses, [K]."""
        assert self._graph is not None and self._batch is not None
        self._batch.load(batch)
        self._graph.replay()
        return self._losses.clone()
