"""CUDA graphs of whole training steps.

At a small backbone's size the host needs several times longer to launch a step's thousands of kernels than the
GPU needs to run them. So a step (forward, backward, clipping, optimiser) is recorded once and replayed; a new
batch is copied into the recorded one's memory. A recording's shapes are fixed by a ``Capacity``, and spare room
costs as much as tokens do. Steps differ, since sums have longer answers than labels: so a few capacities are
recorded, and every step is replayed in the smallest that holds it. Recording takes as long as a round or two, so it
looks ahead: later rounds have other examples, and may pair the clients' batches anew, and groups of clients that
take turns have longer ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce

import torch

from fedweave.training.batch import Capacity, Lane, StepBatch, build_batch

_TRIALS = 2  # eager steps before recording: libraries and allocator settle
_SHARES = (0.4, 0.85, 1.0)  # of the steps seen and foreseen that each recording holds
_FORESEEN = 300  # steps of later rounds
_HEADROOM = 1.06  # of the largest once a round needed more all the same: even larger steps may follow


@lru_cache(maxsize=1)
def _recording_stream() -> torch.cuda.Stream:
    """One stream for all recordings: every stream that multiplies keeps a workspace of tens of MiB for good."""
    return torch.cuda.Stream()


def _released(batch: StepBatch) -> torch.Tensor:
    raise RuntimeError("this recording has been released")


def levels(needs: Sequence[Capacity]) -> list[Capacity]:
    """A few capacities for steps of these needs, the largest first: others find room in its memory."""
    order = sorted(needs, key=lambda need: need.tokens)
    cuts = (max(1, round(share * len(order))) for share in _SHARES)
    found = {reduce(Capacity.joined, order[:cut]) for cut in cuts}
    return sorted(found, key=lambda capacity: -capacity.tokens)


@dataclass
class Recording:
    """One recorded step and the memory it reads from and writes to."""

    graph: torch.cuda.CUDAGraph
    batch: StepBatch
    losses: torch.Tensor  # [K]


class GraphedSteps:
    """Recordings of one step, by capacity. They share memory, since only one runs at a time."""

    def __init__(self, step: Callable[[StepBatch], torch.Tensor]):
        self._step = step
        self._seen: list[Capacity] = []  # needs of all rounds that led to a recording, and what they foresaw
        self._recordings: dict[Capacity, Recording] = {}

    def prepare(
        self, lanes: Sequence[Lane], dropout: float, device: torch.device, turns: Sequence[Sequence[Lane]] = ()
    ) -> list[Capacity]:
        """The capacity for every step of ``lanes``. Recording disturbs the parameters: load them afterwards.
        ``turns`` are all groups that are to be replayed one after another, these lanes among them."""
        needs = Capacity.of_steps(lanes)
        if any(self._smallest(need) is None for need in needs):
            self._recordings = {}  # their memory serves the new ones
            first = not self._seen
            groups = turns or [lanes]
            for group in groups:
                self._seen += Capacity.of_steps(group) + Capacity.foreseen(group, -(-_FORESEEN // len(groups)))
            largest, *others = levels(self._seen)
            if not first:
                largest = largest.roomier(_HEADROOM)
            batches = {}
            for capacity in (largest, *others):
                step = next((i for i, need in enumerate(needs) if capacity.holds(need)), None)
                if step is not None:  # a small one may hold none of this round's steps
                    batches[capacity] = build_batch(lanes, step, dropout, device, capacity)
            self._record(batches)
        return [capacity for capacity in map(self._smallest, needs) if capacity is not None]

    def _smallest(self, need: Capacity) -> Capacity | None:
        fitting = [capacity for capacity in self._recordings if capacity.holds(need)]
        return min(fitting, key=lambda capacity: capacity.tokens, default=None)

    def release(self) -> None:
        """Give the recordings' memory back. The step refers to this object's owner, so nobody else would."""
        self._recordings = {}
        self._step = _released

    def _record(self, batches: dict[Capacity, StepBatch]) -> None:
        side = _recording_stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for batch in batches.values():
                for _ in range(_TRIALS):
                    self._step(batch)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.empty_cache()  # recordings allocate from a pool of their own
        pool = torch.cuda.graph_pool_handle()
        for capacity, batch in batches.items():
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=side):
                losses = self._step(batch)
            self._recordings[capacity] = Recording(graph, batch, losses)

    def run(self, batch: StepBatch, capacity: Capacity) -> torch.Tensor:
        """Replay on a batch of this capacity; returns the lanes' losses, [K]."""
        recording = self._recordings[capacity]
        recording.batch.load(batch)
        recording.graph.replay()
        return recording.losses.clone()
