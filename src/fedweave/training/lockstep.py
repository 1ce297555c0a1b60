"""K clients in one forward and backward pass.

A *lane* is one independent training job: a client with its experts and router, or a bucket with its warmup
adapter. Lanes share the frozen backbone and nothing else: every lane has its own loss (the mean over its own
answer tokens), its own gradient norm and its own optimiser state, so a lane's result does not depend on its
neighbours. `lanes_per_step` bounds memory; it never changes results beyond float rounding.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedweave.backbone.load import Backbone
from fedweave.backbone.packing import Packed, pack
from fedweave.backbone.prompts import Encoded
from fedweave.config import TrainingConfig
from fedweave.experts.dropout import DropoutKeys, stream_key
from fedweave.experts.mixture import Mixture, Segments
from fedweave.router.mlp import RouterLayout
from fedweave.training.loss import token_nll


@dataclass
class ClientData:
    """What a client trains on: tokens and features. No labels."""

    name: str
    examples: list[Encoded]
    features: torch.Tensor  # [n, d]

    def __len__(self) -> int:
        return len(self.examples)


@dataclass
class Lane:
    """One training job."""

    data: ClientData
    schedule: list[np.ndarray]  # example indices of every step
    theta: torch.Tensor  # [P] where it starts
    phi: torch.Tensor | None  # [Q] the router it starts with; None: one expert with weight 1
    key: tuple[int | str, ...]  # names this job for dropout
    trainable: torch.Tensor | None = None  # [P] bool; None trains all columns
    router_rate: float = 0.0


@dataclass
class LaneResult:
    """What a lane learned."""

    delta_theta: torch.Tensor  # [P]
    delta_phi: torch.Tensor | None  # [Q]
    losses: list[float]  # of every step
    tokens: int


class Trainable:
    """K rows of parameters as leaves that autograd fills in place.

    ``master`` [K, P] is float32 and belongs to the optimiser. ``leaves`` are views of it, or of a copy in the
    backbone's dtype, whose gradients land in one buffer; clipping and stepping are a few whole-matrix operations.
    """

    def __init__(self, rows: torch.Tensor, dtype: torch.dtype, views: Callable[[torch.Tensor], list]):
        self.master = rows.requires_grad_()
        self.master.grad = torch.zeros_like(rows)
        same = dtype == rows.dtype
        self.copy = rows.detach() if same else rows.detach().to(dtype)
        self.copy_grad = self.master.grad if same else torch.zeros_like(self.copy)
        self.leaves = views(self.copy)
        for leaf, grad in zip(_tensors(self.leaves), _tensors(views(self.copy_grad)), strict=True):
            leaf.requires_grad_()
            leaf.grad = grad

    def collect(self) -> torch.Tensor:
        """Gradients of the last backward pass, in float32."""
        assert self.master.grad is not None
        if self.copy_grad is not self.master.grad:
            self.master.grad.copy_(self.copy_grad)
        return self.master.grad

    def refresh(self) -> None:
        """After an optimiser step: bring the copy up to date and clear the gradients."""
        with torch.no_grad():
            if self.copy.data_ptr() != self.master.data_ptr():
                self.copy.copy_(self.master)
            self.copy_grad.zero_()


def _tensors(layers: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    return [tensor for layer in layers for tensor in layer.values()]


class LockstepTrainer:
    """Trains lanes on one device."""

    def __init__(
        self,
        backbone: Backbone,
        mixture: Mixture,
        router: RouterLayout | None,
        config: TrainingConfig,
        dropout: float,
    ):
        self.backbone, self.mixture, self.router = backbone, mixture, router
        self.config, self.dropout = config, dropout

    def train(
        self, lanes: Sequence[Lane], lanes_per_step: int, on_step: Callable[[int], None] = lambda lanes: None
    ) -> Iterator[LaneResult]:
        """Results in the order of ``lanes``. Running out of memory halves the group and goes on."""
        start = 0
        while start < len(lanes):
            group = lanes[start : start + lanes_per_step]
            try:
                results = self._train_group(group, on_step)
            except torch.OutOfMemoryError:
                if lanes_per_step == 1:
                    raise
                lanes_per_step = (lanes_per_step + 1) // 2
                torch.cuda.empty_cache()
                continue
            yield from results
            start += len(group)

    def _train_group(self, lanes: Sequence[Lane], on_step: Callable[[int], None]) -> list[LaneResult]:
        device = self.backbone.device
        start_theta = torch.stack([lane.theta for lane in lanes]).to(device)  # [K, P]
        experts = Trainable(start_theta.clone(), self.backbone.dtype, self.mixture.layout.views)
        groups = [{"params": [experts.master], "lr": self.config.lr}]
        parts = [experts]
        routers = None
        if self.router is not None:
            phis = [lane.phi for lane in lanes if lane.phi is not None]
            start_phi = torch.stack(phis).to(device)  # [K, Q]
            layout = self.router
            routers = Trainable(start_phi.clone(), torch.float32, lambda phi: [layout.views(phi)])
            groups.append({"params": [routers.master], "lr": lanes[0].router_rate})
            parts.append(routers)
        masks = [lane.trainable for lane in lanes]
        mask = torch.stack([m for m in masks if m is not None]).to(device) if masks[0] is not None else None
        optimiser = torch.optim.AdamW(
            groups, weight_decay=self.config.weight_decay, fused=device.type == "cuda", foreach=False
        )
        losses = []
        tokens = [0] * len(lanes)
        for step in range(len(lanes[0].schedule)):
            batch = self._batch(lanes, step)
            lane_loss = self._loss(lanes, step, batch, experts, routers)  # [K]
            with warnings.catch_warnings():  # rows of a matrix are no dense tensors, and need not be
                warnings.filterwarnings("ignore", message="grad and param do not obey the gradient layout")
                lane_loss.sum().backward()
            clip_lanes([part.collect() for part in parts], self.config.clip, mask)
            optimiser.step()
            for part in parts:
                part.refresh()
            losses.append(lane_loss.detach())
            on_step(len(lanes))
            tokens = [n + m for n, m in zip(tokens, batch.packed.lane_lengths, strict=True)]
        history = torch.stack(losses, 1).cpu()  # [K, steps]
        delta_theta = experts.master.detach() - start_theta
        delta_phi = routers.master.detach() - start_phi if routers is not None else None
        return [
            LaneResult(
                delta_theta[k],
                delta_phi[k] if delta_phi is not None else None,
                history[k].tolist(),
                tokens[k],
            )
            for k in range(len(lanes))
        ]

    def _batch(self, lanes: Sequence[Lane], step: int) -> _Batch:
        chosen = [[lane.data.examples[i] for i in lane.schedule[step]] for lane in lanes]
        packed = pack([[e.ids for e in lane] for lane in chosen], self.backbone.device)
        return _Batch.of(chosen, packed)

    def _loss(
        self,
        lanes: Sequence[Lane],
        step: int,
        batch: _Batch,
        experts: Trainable,
        routers: Trainable | None,
    ) -> torch.Tensor:
        """Mean answer-token loss of every lane, [K]."""
        packed = batch.packed
        gates = None
        if routers is not None and self.router is not None:
            features = _padded_features(lanes, step).to(self.backbone.device, non_blocking=True)  # [K, S, d]
            weights = self.router.logits(routers.leaves[0], features).softmax(-1)  # [K, S, M]
            per_sequence = weights.flatten(0, 1).index_select(0, batch.slot)  # [sequences, M]
            gates = per_sequence.index_select(0, packed.sequence)[None]  # [1, T, M]
        dropout = None
        if self.dropout > 0:
            keys = [stream_key("dropout", *lane.key, step) for lane in lanes]
            dropout = DropoutKeys.of(self.dropout, keys, packed.lane_lengths, self.backbone.device)
        segments = Segments(packed.lane_lengths, packed.lane_ends)
        with self.mixture.active(experts.leaves, gates, segments, dropout):
            hidden = self.backbone.hidden(packed)  # [T, d]
        nll = token_nll(
            hidden.index_select(0, batch.source), self.backbone.head, batch.target, self.backbone.softcap
        )
        sums = torch.zeros(len(lanes), device=nll.device).index_add(0, batch.lane, nll)
        return sums / batch.count


@dataclass
class _Batch:
    """A packed batch and where its answers stand."""

    packed: Packed
    source: torch.Tensor  # [n] positions whose hidden state predicts an answer token
    target: torch.Tensor  # [n] that token
    lane: torch.Tensor  # [n] whose it is
    count: torch.Tensor  # [K] answer tokens per lane
    slot: torch.Tensor  # [S] row of each sequence in the padded [K, S] router batch

    @classmethod
    def of(cls, lanes: Sequence[Sequence[Encoded]], packed: Packed) -> _Batch:
        rows = [(k, s, e) for k, lane in enumerate(lanes) for s, e in enumerate(lane)]
        most = max(len(lane) for lane in lanes)
        source, lane_of, start = [], [], 0
        for k, _, example in rows:
            source.append(np.arange(example.answer_start - 1, len(example.ids) - 1) + start)
            lane_of.append(np.full(len(source[-1]), k))
            start += len(example.ids)
        device = packed.ids.device

        def to(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        positions = to(np.concatenate(source))
        lane_index = np.concatenate(lane_of)
        return cls(
            packed=packed,
            source=positions,
            target=packed.ids[0].index_select(0, positions + 1),
            lane=to(lane_index),
            count=to(np.bincount(lane_index, minlength=len(lanes)).astype(np.float32)),
            slot=to(np.array([k * most + s for k, s, _ in rows])),
        )


def answer_positions(
    examples: Sequence[Encoded], packed: Packed
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(source positions, target tokens, sequence of each) for one lane of examples."""
    batch = _Batch.of([examples], packed)
    return batch.source, batch.target, packed.sequence.index_select(0, batch.source)


def _padded_features(lanes: Sequence[Lane], step: int) -> torch.Tensor:
    """Features of a step's examples, [K, S, d]; a shorter batch is filled with zeros that nobody reads."""
    most = max(len(lane.schedule[step]) for lane in lanes)
    padded = torch.zeros(len(lanes), most, lanes[0].data.features.shape[1])
    for row, lane in zip(padded, lanes, strict=True):
        row[: len(lane.schedule[step])] = lane.data.features[lane.schedule[step]]
    return padded


@torch.no_grad()
def clip_lanes(grads: Sequence[torch.Tensor], limit: float, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Scale each lane's gradients, [K, ...] in every matrix, to a joint norm of at most ``limit``."""
    if mask is not None:
        grads[0].mul_(mask)
    norm = sum(grad.square().sum(1) for grad in grads)
    norm = torch.as_tensor(norm).sqrt()  # [K]
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(factor[:, None])
    return norm


def choose_lanes_per_step(backbone: Backbone, lanes: Sequence[Lane], asked: int | str) -> int:
    """How many lanes fit: as asked, or as many as the device's memory holds activations for."""
    if asked != "auto":
        return int(asked)
    mean = float(np.mean([len(e.ids) for lane in lanes for e in lane.data.examples]))
    batch = max(len(step) for lane in lanes for step in lane.schedule)
    return max(1, int(token_capacity(backbone) // max(1.0, mean * batch)))


def token_capacity(backbone: Backbone) -> int:
    """Tokens whose activations fit in about half of the device's memory (on a CPU: in a modest step)."""
    config = backbone.model.config.get_text_config()
    # Saved for backward per token and layer: about 12 hidden-wide and 4 MLP-wide tensors.
    numbers = config.num_hidden_layers * (12 * config.hidden_size + 4 * config.intermediate_size)
    per_token = numbers * backbone.head.element_size()
    if backbone.device.type == "cuda":
        memory = torch.cuda.get_device_properties(backbone.device).total_memory
        return int(0.5 * memory / per_token)
    return min(4096, max(512, int(4e9 / per_token)))
