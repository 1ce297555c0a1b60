"""The soft mixture of stacked experts, attached to a frozen model.

Every adapted layer adds  scale · B (g ⊙ (A dropout(x)))  to its output: through a hook where transformers runs
the layer, directly where ``backbone/decoder.py`` does. The same code serves three callers:

- lockstep training: x [1, T, in] holds K clients' tokens side by side, each multiplied by its own A and B;
- evaluation: the same with K = 1;
- generation: x [batch, length, in], one state, one gate per row.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from fedweave.experts.layout import AdapterLayout
from fedweave.kernels import fused
from fedweave.kernels.again import run_again
from fedweave.kernels.dropout import DropoutKeys
from fedweave.kernels.experts import add_experts
from fedweave.kernels.frozen import Weight
from fedweave.kernels.lanes import Lanes, Rows, Setting, Target, one_lane
from fedweave.kernels.rows import MOST_ROWS, add_to_rows
from fedweave.kernels.source import Source


class Mixture:
    """Experts on a model's layers. Off until :meth:`active` says which weights and gates are in force."""

    def __init__(self, layers: dict[str, torch.nn.Linear], layout: AdapterLayout, alpha: float, span: str = "all"):
        self.layout = layout
        self.span = span  # experts.span
        self.scale = alpha / layout.rank
        self.state: State | None = None
        self._layers = list(layers.values())
        for index, layer in enumerate(self._layers):
            layer.experts = [*_slots(layer), Slot(self, index)]  # type: ignore[assignment]
        self._handles = [layer.register_forward_hook(self._hook) for layer in self._layers]

    def detach(self) -> None:
        """Take the experts off; the model is exactly as it was."""
        for layer, handle in zip(self._layers, self._handles, strict=True):
            handle.remove()
            layer.experts = [slot for slot in _slots(layer) if slot.mixture is not self]  # type: ignore[assignment]
        self._layers, self._handles = [], []

    @contextmanager
    def active(
        self,
        weights: Sequence[dict[str, torch.Tensor]],  # per layer A [K, M·r + R, in], B [K, M·r + R, out]
        gates: torch.Tensor | None,  # broadcastable to x: [1, T, M] packed, [batch, 1, M] in generation
        lanes: Lanes | None = None,
        dropout: DropoutKeys | None = None,
        spoken: torch.Tensor | None = None,  # [T] whether packed tokens are a prompt's last or an answer's
        few: bool = False,  # whether each row is known to use few experts (kernels/rows.py)
    ) -> Iterator[None]:
        """Run the model with these experts; ``gates=None`` means one expert with weight 1. What they share is in
        force unless the gates speak of it (AdapterLayout.all_gates). With ``spoken`` experts whose span is the
        answer stay off other tokens."""
        if self.state is not None:
            raise RuntimeError("the mixture is already in use")
        apart = spoken is not None and self.span == "answer"
        if gates is None and (self.layout.shared or apart):
            gates = torch.ones(1, 1, device=weights[0]["A"].device)
        gates = None if gates is None else self.layout.all_gates(gates.float())
        if gates is not None and spoken is not None and apart:
            gates = gates * spoken[None, :, None]  # [1, T, M + R/r]
        with self.using(State(weights, gates, lanes, dropout, few)):
            yield

    @contextmanager
    def using(self, state: "State") -> Iterator[None]:
        """Run the model, or a part of it, in this very state."""
        before, self.state = self.state, state
        try:
            yield
        finally:
            self.state = before

    def _hook(self, layer: torch.nn.Linear, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        return output if self.state is None else with_experts(output, args[0], [layer])


@dataclass
class State:
    """What a mixture runs with at the moment."""

    weights: Sequence[dict[str, torch.Tensor]]
    gates: torch.Tensor | None  # [..., M], or [..., M + R/r] with a shared part (AdapterLayout.all_gates)
    lanes: Lanes | None
    dropout: DropoutKeys | None
    few: bool = False
    _spread: tuple[torch.Size, torch.Tensor | None] | None = None
    _wide: tuple[torch.Size, torch.Tensor | None] | None = None

    @property
    def plain(self) -> bool:
        """One lane, no dropout and no gradient, asked where a layer runs."""
        return self.lanes is None and self.dropout is None and not torch.is_grad_enabled()

    def row_gates(self, lead: torch.Size) -> torch.Tensor | None:
        """[rows, M] for an input of this leading shape: [T], [1, T] or [batch, length]. All layers ask the same."""
        if self._spread is None or self._spread[0] != lead:
            gates = self.gates
            if gates is not None:
                gates = gates if gates.shape[:-1].numel() == lead.numel() else gates.expand(*lead, -1)
                gates = gates.reshape(lead.numel(), -1)
            self._spread = (lead, gates)
        return self._spread[1]

    def wide_gates(self, lead: torch.Size, rank: int, scale: float) -> torch.Tensor | None:
        """[rows, M·r]: every gate times ``scale``, for each of its expert's r columns."""
        if self._wide is None or self._wide[0] != lead:
            gates = self.row_gates(lead)
            self._wide = (lead, None if gates is None else (gates * scale).repeat_interleave(rank, 1))
        return self._wide[1]


@dataclass
class Slot:
    """What an adapted layer carries for every mixture: whose it is, and which of that mixture's layers."""

    mixture: Mixture
    index: int


def _slots(layer: torch.nn.Linear) -> list[Slot]:
    return getattr(layer, "experts", None) or []


def _in_force(layer: torch.nn.Linear) -> Slot | None:
    """The layer's experts, where they are to be added now; one mixture at a time is."""
    return next((slot for slot in _slots(layer) if slot.mixture.state is not None), None)


def _first_in_force(layers: Sequence[torch.nn.Linear]) -> Slot | None:
    return next((slot for layer in layers if (slot := _in_force(layer)) is not None), None)


def carries_experts(layers: Sequence[torch.nn.Linear]) -> bool:
    return _first_in_force(layers) is not None


# A decoder layer's parts of the gates' gradient are added up before other layers' join them. So a layer that runs
# again on the way back, which knows its own parts alone, adds in the order of one that does not: to the same bit.


@contextmanager
def with_own_gates(layers: Sequence[torch.nn.Linear]) -> Iterator[None]:
    """In here these layers, those of one decoder layer, read the gates through a view of their own."""
    slot = _first_in_force(layers)
    if slot is None or (state := slot.mixture.state) is None or state.gates is None or state.plain:
        yield
        return
    with slot.mixture.using(replace(state, gates=state.gates.view_as(state.gates), _spread=None, _wide=None)):
        yield


@contextmanager
def reading(layers: Sequence[torch.nn.Linear], rows: Rows | None) -> Iterator[None]:
    """In here these layers see some rows of the packed batch, and no others; None: all."""
    slot = _first_in_force(layers)
    if rows is None or slot is None or (state := slot.mixture.state) is None:
        yield
        return
    keys = state.dropout and replace(state.dropout, tokens=rows.of(state.dropout.tokens))
    gates = state.gates
    if gates is not None and gates.shape[:-1].numel() > 1:  # every token has its own
        gates = gates.index_select(-2, rows.index)
    with slot.mixture.using(replace(state, gates=gates, lanes=rows.lanes, dropout=keys, _spread=None, _wide=None)):
        yield


def run_layer_again(
    layers: Sequence[torch.nn.Linear], run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    """``run(x)``, a decoder layer with these linear ones, of which x and the gates are kept. It runs a second time
    when the mixture is no longer active, so it brings the state along."""
    slot = _first_in_force(layers)
    if slot is None or (state := slot.mixture.state) is None:
        return run_again(run, x)
    mixture, seen = slot.mixture, state

    def with_gates(x: torch.Tensor, gates: torch.Tensor | None = None) -> torch.Tensor:
        with mixture.using(replace(seen, gates=gates, _spread=None, _wide=None)):
            return run(x)

    return run_again(with_gates, x, *([] if state.gates is None else [state.gates]))


def with_experts(
    y: torch.Tensor,
    x: torch.Tensor,
    layers: Sequence[torch.nn.Linear],
    weight: Weight | None = None,
    source: Source | None = None,
) -> torch.Tensor:
    """y = the outputs of ``layers`` on x, side by side; returns y with the experts of those that carry any. With
    ``weight``, the layers' own, y was computed without gradient, and with ``source``, of x, x is not kept
    (``kernels/experts.py`` says why)."""
    targets: list[Target] = []
    start, mixture = 0, None
    for layer in layers:
        slot = _in_force(layer)
        if slot is not None:
            mixture = slot.mixture
            targets.append(Target(slot.index, start, layer.out_features))
        start += layer.out_features
    if mixture is None or mixture.state is None:
        return y
    state, rank, scale = mixture.state, mixture.layout.rank, mixture.scale
    rows = x.reshape(-1, x.shape[-1])
    factors = [state.weights[t.index][name] for t in targets for name in ("A", "B")]
    if state.plain and (len(rows) <= MOST_ROWS or not fused(x)):
        wide, out = state.wide_gates(x.shape[:-1], rank, scale), y.view(-1, y.shape[-1])
        for target, a, b in zip(targets, factors[::2], factors[1::2], strict=True):
            add_to_rows(out.narrow(1, target.start, target.width), rows, a[0], b[0], wide, scale, rank, state.few)
        return y
    setting = Setting(state.lanes or one_lane(len(rows), x.device), state.dropout, scale, rank)
    return add_experts(y, rows, state.row_gates(x.shape[:-1]), targets, factors, setting, weight, source)
