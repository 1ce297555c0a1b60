"""One lockstep step's inputs: packed tokens of all lanes, where their answers stand, features and dropout keys.

Built on the host with numpy and sent in one go. With a ``Capacity`` the tensors get fixed shapes, so that a
captured CUDA graph can be fed again and again: spare tokens form sequences of their own that no loss reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from fedweave.backbone.packing import Packed
from fedweave.backbone.prompts import Encoded
from fedweave.kernels import to_device
from fedweave.kernels.dropout import DropoutKeys
from fedweave.kernels.lanes import Lanes, Rows
from fedweave.streams import stream_key

GRAIN = 512  # tokens: fixed shapes are multiples of it


@dataclass
class ClientData:
    """What a client trains on: tokens and features. No labels."""

    name: str
    examples: list[Encoded]
    features: torch.Tensor  # [n, d]
    gathered: int = 1  # of so many clients, where one place has everybody's

    def __len__(self) -> int:
        return len(self.examples)

    def distinct(self, rows: Sequence[int] | np.ndarray) -> int:
        """How many different rows these are."""
        return len({self.examples[i].key for i in rows})

    def part(self, rows: Sequence[int] | np.ndarray) -> ClientData:
        """Some of it, in this order."""
        return replace(self, examples=[self.examples[i] for i in rows], features=self.features[rows])


@dataclass(frozen=True)
class Shield:
    """Example-level privacy of one lane (:mod:`fedweave.training.private`)."""

    noise: float  # standard deviation in a step's sum of gradients, as a multiple of the clip
    clip: float  # longest gradient of one example
    expected: float  # examples of a step
    key: int  # of the noise


@dataclass
class Lane:
    """One independent training job: a client with its experts and router, or a bucket with its warmup adapter."""

    data: ClientData
    schedule: list[np.ndarray]  # example indices of every step
    theta: torch.Tensor  # [P] where it starts
    phi: torch.Tensor | None  # [Q] the router it starts with; None: gates are given, or one expert has weight 1
    key: tuple[int | str, ...]  # names this job for dropout
    trainable: torch.Tensor | None = None  # [P] bool; None trains all columns
    gates: torch.Tensor | None = None  # [n, M] of every example, where no router makes them
    opened: torch.Tensor | None = None  # [M] bool: where no other expert's gate ever opens; None: any may
    even: bool = False  # every example of a step counts alike, whatever its answer's length
    shield: Shield | None = None  # what protects its single examples

    def examples(self, step: int) -> list[Encoded]:
        """What it reads in a step; nothing once its schedule has ended."""
        return [self.data.examples[i] for i in self.indices(step)]

    def indices(self, step: int) -> np.ndarray:
        return self.schedule[step] if step < len(self.schedule) else np.empty(0, dtype=int)


@dataclass(frozen=True)
class Capacity:
    """Fixed shapes that hold a step."""

    tokens: int
    answers: int
    sequences: int  # per lane
    longest: int

    @classmethod
    def of_steps(cls, lanes: Sequence[Lane]) -> list[Capacity]:
        """What every step of these lanes needs, rounded up so that others like it fit too."""
        steps = max(len(lane.schedule) for lane in lanes)
        return cls._of(lanes, np.repeat(np.arange(steps)[:, None], len(lanes), axis=1), np.zeros(steps))

    @classmethod
    def foreseen(cls, lanes: Sequence[Lane], count: int) -> list[Capacity]:
        """What so many steps of later rounds may need: every other is one of these again, in the rest each lane
        takes any of its own; all with other examples."""
        steps = max(len(lane.schedule) for lane in lanes)
        rng = np.random.default_rng(stream_key("foreseen", len(lanes), steps))
        taken = rng.integers(0, steps, (count, len(lanes)))
        taken[::2] = taken[::2, :1]
        return cls._of(lanes, taken, rng.normal(size=count))

    @classmethod
    def _of(cls, lanes: Sequence[Lane], taken: np.ndarray, luck: np.ndarray) -> list[Capacity]:
        """What n steps need in which lanes take these of their own, [n, K], with examples that are together so many
        standard deviations longer, [n]."""
        longest = _round_up(max(len(e.ids) for lane in lanes for e in lane.data.examples), 64)
        sizes = np.array([[_sizes(lane.examples(i)) for i in range(taken.max() + 1)] for lane in lanes])
        sizes = sizes[np.arange(len(lanes)), taken]  # [n, K, 5]
        sums = sizes[..., :2].sum(1) + luck[:, None] * np.sqrt(sizes[..., 2:4].sum(1))  # [n, 2]
        rounded = (-(-sums // GRAIN) * GRAIN).astype(int).tolist()
        most = sizes[..., 4].max(1).astype(int).tolist()
        return [cls(tokens, answers, own, longest) for (tokens, answers), own in zip(rounded, most, strict=True)]

    def holds(self, other: Capacity) -> bool:
        return all(getattr(self, f.name) >= getattr(other, f.name) for f in fields(self))

    def joined(self, other: Capacity) -> Capacity:
        return Capacity(*(max(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)))

    def roomier(self, factor: float) -> Capacity:
        """With that many more tokens and answers."""
        tokens, answers = (_round_up(math.ceil(n * factor), GRAIN) for n in (self.tokens, self.answers))
        return replace(self, tokens=tokens, answers=answers)


def _sizes(rows: Sequence[Encoded]) -> list[float]:
    """Of a lane's step: tokens and answer tokens, the variances of both where its examples are drawn anew, and how
    many they are."""
    columns = [[len(e.ids) for e in rows], [len(e.ids) - e.answer_start for e in rows]]
    sums = [sum(column) for column in columns]
    squares = [
        sum(n * n for n in column) - total**2 / max(1, len(rows))
        for column, total in zip(columns, sums, strict=True)
    ]
    return [*sums, *squares, len(rows)]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass
class StepBatch:
    """Everything one forward and backward pass reads."""

    packed: Packed
    read: Rows  # [n] positions whose hidden state predicts an answer token
    target: torch.Tensor  # [n] that token
    lane: torch.Tensor  # [n] whose it is
    weight: torch.Tensor  # [n] of each token's loss, together 1 in every lane; 0 for filling
    slot: torch.Tensor  # [S] row of each sequence in the padded [K·s] router batch
    features: torch.Tensor  # [K, s, d] what routers read, or [K, s, M] the gates themselves where they are given
    spoken: torch.Tensor  # [T] 1 on every prompt's last token and on its answer, 0 before
    dropout: DropoutKeys | None

    def tensors(self) -> list[torch.Tensor]:
        p = self.packed
        more = [p.tiles, self.dropout.tokens if self.dropout else None]
        return [p.ids, p.positions, p.sequence, p.boundaries, p.lanes.spans, p.lanes.tiles,
                self.read.index, self.read.lanes.spans, self.read.lanes.tiles,
                self.target, self.lane, self.weight, self.slot, self.features, self.spoken,
                *(tensor for tensor in more if tensor is not None)]  # fmt: skip

    def load(self, other: StepBatch) -> None:
        """Take another batch's values into this one's memory."""
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            mine.copy_(theirs, non_blocking=True)
        self.packed.lanes.lengths = other.packed.lanes.lengths
        self.read.lanes.lengths = other.read.lanes.lengths


def build_batch(
    lanes: Sequence[Lane], step: int, dropout: float, device: torch.device, capacity: Capacity | None = None
) -> StepBatch:
    chosen = [lane.examples(step) for lane in lanes]
    rows = [e for lane in chosen for e in lane]
    owner = np.repeat(np.arange(len(lanes)), [len(lane) for lane in chosen])
    place = np.concatenate([np.arange(len(lane)) for lane in chosen])
    lengths = np.array([len(e.ids) for e in rows])
    starts = np.cumsum(lengths) - lengths
    source = np.concatenate(
        [np.arange(e.answer_start - 1, len(e.ids) - 1) + s for e, s in zip(rows, starts, strict=True)]
    )
    answer_counts = np.array([len(e.ids) - e.answer_start for e in rows])
    lane_of_answer = np.repeat(owner, answer_counts)
    per_lane = np.bincount(lane_of_answer, minlength=len(lanes))
    even = np.array([lane.even for lane in lanes])[owner]  # [sequences]
    share = np.where(even, np.bincount(owner, minlength=len(lanes))[owner] * answer_counts, per_lane[owner])
    ids = np.concatenate([e.ids for e in rows])
    spoken = np.concatenate([np.arange(len(e.ids)) >= e.answer_start - 1 for e in rows])
    most = capacity.sequences if capacity else max(len(lane) for lane in chosen)
    read = [lane.data.features if lane.gates is None else lane.gates for lane in lanes]
    features = torch.zeros(len(lanes), most, read[0].shape[1])
    for row, lane, values in zip(features, lanes, read, strict=True):
        indices = lane.indices(step)
        row[: len(indices)] = values[indices]
    lane_lengths = [int(sum(len(e.ids) for e in lane)) for lane in chosen]
    target, weight, slot = ids[source + 1], np.repeat(1.0 / share, answer_counts), owner * most + place
    if capacity:
        tail = _tail(capacity.tokens - len(ids), capacity.longest)
        spare = capacity.sequences * len(lanes) + -(-capacity.tokens // capacity.longest) - len(lengths) - len(tail)
        lengths = np.concatenate([lengths, tail, np.zeros(spare, dtype=int)])
        ids, spoken = (np.pad(x, (0, capacity.tokens - len(x))) for x in (ids, spoken))
        fill = capacity.answers - len(source)
        source, target, lane_of_answer = (np.pad(x, (0, fill)) for x in (source, target, lane_of_answer))
        weight, slot = np.pad(weight, (0, fill)), np.pad(slot, (0, len(lengths) - len(slot)))
    keys = None
    if dropout > 0:
        names = [stream_key("dropout", *lane.key, step) for lane in lanes]
        keys = DropoutKeys.of(dropout, names, lane_lengths, len(ids), device)

    return StepBatch(
        packed=Packed.of(ids, lengths, lane_lengths, device, capacity.longest if capacity else None),
        read=Rows(to_device(source, device), Lanes.of(per_lane.tolist(), len(source), device)),
        target=to_device(target, device),
        lane=to_device(lane_of_answer, device),
        weight=to_device(weight, device, torch.float32),
        slot=to_device(slot, device),
        features=to_device(features.numpy(), device, torch.float32),
        spoken=to_device(spoken, device, torch.float32),
        dropout=keys,
    )


def _tail(tokens: int, longest: int) -> np.ndarray:
    """Lengths of the sequences that spare tokens form."""
    full, rest = divmod(tokens, longest)
    return np.array([longest] * full + [rest] * (rest > 0), dtype=int)
