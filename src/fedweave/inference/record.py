"""A decoding step as a CUDA graph: recorded once, replayed with other numbers in the same memory. At this size
launching kernels costs more than running them."""

from collections.abc import Callable, Sequence

import torch


def captured(step: Callable[[], None], state: Sequence[torch.Tensor] = ()) -> Callable[[], None]:
    """Record ``step``. Capturing needs a trial run, whose effect on ``state`` is undone."""
    before = [tensor.clone() for tensor in state]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    for tensor, old in zip(state, before, strict=True):
        tensor.copy_(old)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


class RecordedStep:
    """One step of up to ``size`` rows: newest tokens, their positions and gates in, logits out. Spare rows run
    along at position 0 of rows that nobody uses."""

    def __init__(
        self,
        size: int,
        experts: int,
        device: torch.device,
        run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    ):
        self.newest = torch.zeros(size, dtype=torch.long, device=device)
        self.positions = torch.zeros(size, dtype=torch.long, device=device)
        self.gates = torch.zeros(size, experts, device=device)
        self.logits = torch.empty(0)
        self._run = run
        self._replay: Callable[[], None] | None = None

    def __call__(self, newest: torch.Tensor, positions: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Logits of the rows given, [rows, V]; valid until the next call."""
        count = len(newest)
        for own, given in ((self.newest, newest), (self.positions, positions), (self.gates, gates)):
            own[:count].copy_(given, non_blocking=True)
            own[count:].zero_()
        if self._replay is None:  # the trial run writes what the step itself will write: nothing to undo
            self._replay = captured(self._step)
        self._replay()
        return self.logits[:count]

    def _step(self) -> None:
        self.logits = self._run(self.newest, self.positions, self.gates)
