"""About how long a training step takes on a GPU: what decides between ways to run it, not a forecast.

A step needs time for its arithmetic, 4 FLOP for every parameter and token (forward 2, backward through frozen
weights 2), and time that does not depend on its tokens: kernels that are too short to fill the GPU, and, unless the
step was recorded, a host that launches them one by one. So clients in G groups cost G times the latter. At 3B that
is nothing beside the arithmetic; at 135M a second group costs 17 % where steps are recorded (H200: 5
clients 13 ms a step, 10 clients 20 ms, 20 clients 35 ms), and as much as the first where they are not.

Layers that run again cost a forward pass without their last product, which nobody reads: a quarter of the
parameters. That is 0.75 · 2 of 4 FLOP, whatever the size.
"""

from dataclasses import dataclass

_RATE = 4e14  # FLOP/s that a step reaches on a large GPU
_LAUNCHES = 3e-3  # seconds that a host needs to launch one layer's kernels, forward and backward
_SHORT = 2e-4  # seconds of one layer's recorded kernels beside their arithmetic
_OVERLAP = 1.4  # launching and running hide each other only in part where they take equally long
AGAIN = 1.4  # time with layers that run again, as a multiple: a little more than 1 + 0.75 / 2


@dataclass(frozen=True)
class Pace:
    """Of one model."""

    parameters: int
    layers: int

    def recording_pays(self, tokens: float) -> bool:
        """Whether a step waits for its kernels to be launched. A recorded step has the shape of the largest, so
        where running takes much longer it only adds work (H200, 3B: 4.8 s a round against 4.3 s)."""
        return self._running(tokens) < _OVERLAP * _LAUNCHES * self.layers

    def seconds(self, tokens: float, again: bool, graphs: bool) -> float:
        """One step of so many tokens; ``graphs``: it may be recorded."""
        running = self._running(tokens) + _SHORT * self.layers
        if not (graphs and self.recording_pays(tokens)):
            running = max(running, _LAUNCHES * self.layers)
        return running * (AGAIN if again else 1.0)

    def _running(self, tokens: float) -> float:
        return 4 * self.parameters * tokens / _RATE
