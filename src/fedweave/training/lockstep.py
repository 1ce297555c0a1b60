"""K clients in one forward and backward pass.

Lanes share the frozen backbone and nothing else: every lane has its own loss (the mean over its own answer
tokens), its own gradient norm and its own optimiser state, so a lane's result does not depend on its
neighbours. ``lanes_per_step`` bounds memory; it never changes results beyond float rounding. A lane with fewer
steps than others is done when its own are; what its row computes after that is nobody's.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from fedweave.backbone.load import Backbone
from fedweave.config import TrainingConfig
from fedweave.errors import UserError
from fedweave.experts.mixture import Mixture
from fedweave.kernels.entropy import token_nll
from fedweave.kernels.lanes import spread
from fedweave.router.mlp import RouterLayout
from fedweave.training.batch import Lane, StepBatch, build_batch
from fedweave.training.fit import Fit, pace_of
from fedweave.training.graphs import GraphedSteps


@dataclass
class LaneResult:
    delta_theta: torch.Tensor  # [P]
    delta_phi: torch.Tensor | None  # [Q]
    losses: list[float]  # of every step
    tokens: int


class Trainable:
    """K rows of parameters as leaves that autograd fills in place.

    ``master`` [K, P] is float32 and belongs to the optimiser. ``leaves`` are views of it, or of a copy in the
    backbone's dtype, whose gradients land in one buffer; clipping and stepping are a few whole-matrix operations.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        device: torch.device,
        dtype: torch.dtype,
        views: Callable,
        mask: torch.Tensor | None = None,  # [K, P], 1 on what trains; None: everything does
    ):
        self.mask = mask
        self.master = torch.zeros(shape, device=device).requires_grad_()
        self.grad = self.master.grad = torch.zeros(shape, device=device)
        same = dtype == torch.float32
        self.copy = self.master.detach() if same else self.master.detach().to(dtype)
        self.copy_grad = self.grad if same else torch.zeros_like(self.copy)
        self.leaves: list[dict[str, torch.Tensor]] = views(self.copy)
        for leaf, grad in zip(_tensors(self.leaves), _tensors(views(self.copy_grad)), strict=True):
            leaf.requires_grad_()
            leaf.grad = grad

    @torch.no_grad()
    def load(self, rows: Sequence[torch.Tensor]) -> None:
        self.start = torch.stack(list(rows)).to(self.master)
        self.master.copy_(self.start)
        self.refresh()

    @torch.no_grad()
    def masked(self) -> torch.Tensor:
        """Gradients of the last backward pass as they are; zero where nothing trains."""
        return self.copy_grad if self.mask is None else self.copy_grad.mul_(self.mask)

    @torch.no_grad()
    def collect(self, factor: torch.Tensor | None = None) -> torch.Tensor:
        """The same in float32, every lane's times its ``factor`` [K]."""
        grad = self.masked()
        if factor is not None:
            return torch.mul(grad, factor[:, None], out=self.grad)
        return self.grad if grad is self.grad else self.grad.copy_(grad)

    @torch.no_grad()
    def decay(self, amount: float) -> None:
        """Shrink what trains by this share, as AdamW does before it steps; its own decay knows no mask."""
        self.master.mul_(1 - amount if self.mask is None else 1 - amount * self.mask)

    @torch.no_grad()
    def refresh(self) -> None:
        """After an optimiser step: bring the copy up to date and clear the gradients."""
        if self.copy_grad is not self.grad:
            self.copy.copy_(self.master)
        self.copy_grad.zero_()

    def delta(self, lane: int) -> torch.Tensor:
        return self.master.detach()[lane] - self.start[lane]


def _tensors(layers: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    return [tensor for layer in layers for tensor in layer.values()]


class LaneGroup:
    """Parameters and optimiser state of K lanes, kept in place so that a captured step can be replayed."""

    def __init__(
        self, trainer: LockstepTrainer, lanes: int, masked: bool, gated: bool = False, recorded: bool = False
    ):
        self.trainer, self.size, self.gated = trainer, lanes, gated
        device, config = trainer.backbone.device, trainer.config
        layout, router = trainer.mixture.layout, trainer.router
        mask = torch.zeros(lanes, layout.size, dtype=torch.bool, device=device) if masked else None
        self.experts = Trainable((lanes, layout.size), device, trainer.backbone.dtype, layout.views, mask)
        self.parts = [self.experts]
        groups = [{"params": [self.experts.master], "lr": config.lr}]
        self.routers = None
        if router is not None:
            shape = (lanes, router.size)
            self.routers = Trainable(shape, device, torch.float32, lambda phi: [router.views(phi)])
            self.parts.append(self.routers)
            groups.append({"params": [self.routers.master], "lr": trainer.router_rate})
        on_gpu = device.type == "cuda"
        varies = config.schedule != "constant" or config.patience > 0
        if on_gpu and varies:  # a recorded step reads the rate of its round from here
            for group in groups:
                group["lr"] = torch.tensor(group["lr"], device=device)
        self.optimiser = torch.optim.AdamW(groups, weight_decay=0.0, fused=on_gpu, capturable=on_gpu, foreach=False)
        self.graphs = GraphedSteps(self.step) if recorded else None

    def set_pace(self, pace: float) -> None:
        """All rates at this share of theirs."""
        rates = [self.trainer.config.lr, self.trainer.router_rate][: len(self.parts)]
        for group, rate in zip(self.optimiser.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate * pace)
            else:
                group["lr"] = rate * pace

    def load(self, lanes: Sequence[Lane]) -> None:
        """Start afresh: every lane's own parameters, and an optimiser without memory."""
        self.experts.load([lane.theta for lane in lanes])
        if self.routers is not None:
            self.routers.load([lane.phi for lane in lanes if lane.phi is not None])
        if self.experts.mask is not None:
            self.experts.mask.copy_(torch.stack([lane.trainable for lane in lanes if lane.trainable is not None]))
        for state in self.optimiser.state.values():
            for tensor in state.values():
                tensor.zero_()

    def deltas(self, lane: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """How far a lane has come: its experts and its router."""
        return self.experts.delta(lane), self.routers.delta(lane) if self.routers is not None else None

    def backward(self, batch: StepBatch) -> torch.Tensor:
        """Every lane's loss, [K]; their gradients are there to collect."""
        losses = self.trainer.lane_losses(batch, self.experts, self.routers, self.size, self.gated)
        with warnings.catch_warnings():  # rows of a matrix are no dense tensors, and need not be
            warnings.filterwarnings("ignore", message="grad and param do not obey the gradient layout")
            losses.sum().backward()
        return losses.detach()

    def step(self, batch: StepBatch) -> torch.Tensor:
        """One optimiser step of every lane; returns their losses, [K]."""
        losses, config = self.backward(batch), self.trainer.config
        _, factor = clipping([part.masked() for part in self.parts], config.clip)
        for part in self.parts:
            part.collect(factor)
        if config.weight_decay:
            for part, group in zip(self.parts, self.optimiser.param_groups, strict=True):
                part.decay(group["lr"] * config.weight_decay)
        self.optimiser.step()
        for part in self.parts:
            part.refresh()
        return losses


class LockstepTrainer:
    def __init__(
        self,
        backbone: Backbone,
        mixture: Mixture,
        router: RouterLayout | None,
        config: TrainingConfig,
        dropout: float,
        router_rate: float,
    ):
        self.backbone, self.mixture, self.router = backbone, mixture, router
        self.config, self.dropout, self.router_rate = config, dropout, router_rate
        # by size, whether columns are masked, whether gates are given, and whether layers run again
        self._groups: dict[tuple[int, bool, bool, bool], LaneGroup] = {}
        self.pace = 1.0  # share of the learning rates
        self.checkpointing = config.checkpointing == "on"  # auto: whoever counts memory says so
        self._most: int | None = None  # lanes that went into memory, where not all did
        self._turns: list[Sequence[Lane]] = []  # groups that march one after another
        self.fits: dict[int, Fit] = {}  # how many of so many lanes march together
        self.warn: Callable[[str], None] = lambda sentence: None

    def train(
        self, lanes: Sequence[Lane], lanes_per_step: int, on_step: Callable[[int], None] = lambda lanes: None
    ) -> Iterator[LaneResult]:
        """Results in the order of ``lanes``. Running out of memory halves the group and goes on; where a single
        lane is too much its layers run again, unless that is switched off."""
        start, lanes_per_step = 0, min(lanes_per_step, self._most or lanes_per_step)
        while start < len(lanes):
            self._turns = [lanes[i : i + lanes_per_step] for i in range(start, len(lanes), lanes_per_step)]
            group = self._turns[0]
            finished = self._attempt(group, on_step)
            self._turns = []  # whoever keeps the trainer keeps no lanes
            if finished is None:
                self._make_room(min(lanes_per_step, len(lanes)))
                lanes_per_step = self._most or lanes_per_step
                continue
            start += len(group)
            while finished:  # no result is held while the next group trains
                yield finished.pop(0)

    def _attempt(self, group: Sequence[Lane], on_step: Callable[[int], None]) -> list[LaneResult] | None:
        """What a group has learned; None where it ran out of memory, once nothing of the attempt is held any more:
        a traceback would keep all of it while room is made."""
        steps: list[int] = []

        def count(lanes: int) -> None:
            steps.append(lanes)
            on_step(lanes)

        try:
            return self._train_group(group, count)
        except torch.OutOfMemoryError:
            on_step(-sum(steps))  # they come again
            return None

    def _make_room(self, lanes: int) -> None:
        """After so many lanes did not fit; what trains next is not what ran out of memory."""
        if lanes > 1:
            self._most = (lanes + 1) // 2
            self.warn(f"out of memory: {self._most} at a time from now on.")
        elif self.config.checkpointing == "auto" and not self.checkpointing:
            self.checkpointing = True
            for fit in self.fits.values():
                fit.checkpointing = True
            self.warn("out of memory: layers run twice from now on (training.checkpointing).")
        else:
            raise UserError(
                "out of memory with one client at a time"
                + ("" if self.checkpointing else " and training.checkpointing=off")
                + "; set a smaller training.batch_size or backbone.max_length, a smaller backbone.model, or fewer "
                "experts.target_modules."
            )
        self.release()

    def _train_group(self, lanes: Sequence[Lane], on_step: Callable[[int], None]) -> list[LaneResult]:
        group, device = self._group_for(lanes), self.backbone.device
        alike = [turn for turn in self._turns if len(turn) == len(lanes)]
        capacities = group.graphs.prepare(lanes, self.dropout, device, alike) if group.graphs else None
        group.load(lanes)
        group.set_pace(self.pace)
        losses: list[torch.Tensor] = []
        deltas: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        steps = [len(lane.schedule) for lane in lanes]
        for step in range(max(steps)):
            capacity = capacities[step] if capacities else None
            batch = build_batch(lanes, step, self.dropout, device, capacity)
            losses.append(group.graphs.run(batch, capacity) if group.graphs and capacity else group.step(batch))
            deltas |= {k: group.deltas(k) for k, own in enumerate(steps) if own == step + 1}
            on_step(sum(own > step for own in steps))
        history = torch.stack(losses, 1).tolist()  # [K, steps]
        tokens = [sum(len(e.ids) for step in range(max(steps)) for e in lane.examples(step)) for lane in lanes]
        return [LaneResult(*deltas[k], history[k][:own], tokens[k]) for k, own in enumerate(steps)]

    def _group_for(self, lanes: Sequence[Lane]) -> LaneGroup:
        """A group of this kind, kept with what it has recorded. Two kinds can take turns: full groups and the rest,
        or a method's two ways of training; a third drives both out."""
        kind = (len(lanes), lanes[0].trainable is not None, lanes[0].gates is not None, self.checkpointing)
        if kind not in self._groups:
            if len(self._groups) == 2:
                self.release()
            self._groups[kind] = LaneGroup(self, *kind[:3], self._recording_pays(lanes))
        return self._groups[kind]

    def _recording_pays(self, lanes: Sequence[Lane]) -> bool:
        if self.backbone.device.type != "cuda" or not self.config.cuda_graphs:
            return False
        tokens = sum(len(lane.data.examples[i].ids) for lane in lanes for i in lane.schedule[0])
        return pace_of(self.backbone).recording_pays(tokens)

    def release(self) -> None:
        """Free parameters, optimiser state and recordings of all groups."""
        for group in self._groups.values():
            if group.graphs is not None:
                group.graphs.release()
        self._groups = {}
        if self.backbone.device.type == "cuda":
            gc.collect()  # modules and hooks refer to each other
            torch.cuda.empty_cache()

    def lane_losses(
        self, batch: StepBatch, experts: Trainable, routers: Trainable | None, lanes: int, gated: bool = False
    ) -> torch.Tensor:
        """Mean answer-token loss of every lane, [K]; ``gated`` says that the batch brings its gates."""
        packed = batch.packed
        gates, weights = None, batch.features if gated else None  # [K, s, M]
        if routers is not None and self.router is not None:
            weights = self.router.logits(routers.leaves[0], batch.features).softmax(-1)  # [K, s, M]
        if weights is not None:
            per_sequence = weights.flatten(0, 1).index_select(0, batch.slot)  # [S, M]
            gates = spread(per_sequence, packed.sequence, packed.boundaries)[None]  # [1, T, M]
        with self.mixture.active(experts.leaves, gates, packed.lanes, batch.dropout, batch.spoken):
            hidden = self.backbone.hidden(packed, again=self.checkpointing, fp8=self.config.fp8, read=batch.read)
        nll = token_nll(hidden, self.backbone.head, batch.target, self.backbone.softcap)
        whose = batch.lane[None] == torch.arange(lanes, device=nll.device)[:, None]  # [K, n]
        return torch.where(whose, nll * batch.weight, 0.0).sum(1)  # no product: NaN · 0 would be every lane's


@torch.no_grad()
def clipping(grads: Sequence[torch.Tensor], limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Every lane's joint norm, [K], and the factor that brings it to at most ``limit``; grads are [K, ...] each."""
    norm = torch.stack([grad.flatten(1).norm(dim=1, dtype=torch.float32) for grad in grads]).norm(dim=0)
    return norm, (limit / (norm + 1e-6)).clamp(max=1.0)


def clip_lanes(grads: Sequence[torch.Tensor], limit: float) -> torch.Tensor:
    """Scale each lane's gradients to that norm, where they lie."""
    norm, factor = clipping(grads, limit)
    for grad in grads:
        grad.mul_(factor[:, None])
    return norm
