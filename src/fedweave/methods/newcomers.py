"""Buckets that come in mid-run: what they tell, and which expert each of them belongs to.

The same for rows that arrive at a client and for a client that comes late. The rule is in
:mod:`fedweave.alignment.novelty`, its argument in docs/living.md.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from fedweave.alignment.align import expert_distances, expert_means
from fedweave.alignment.novelty import kinds_of
from fedweave.config import Config
from fedweave.federation.client import Client, Member
from fedweave.federation.compute import Compute
from fedweave.federation.message import Facts, Message
from fedweave.federation.news import Change
from fedweave.federation.state import Broadcast, ServerState, received
from fedweave.federation.steps import MOST_LOSS, Answer, Asked, Figure, Part, Step
from fedweave.methods.prototypes import Discover
from fedweave.streams import stream_key

_LOOKED_AT = 64  # examples that a client measures losses on


@dataclass
class Signed:
    """Buckets without an expert: their signatures, and how the model does on them."""

    signatures: torch.Tensor  # [buckets, D]
    losses: list[float]  # under the expert that the router picks
    usual: float  # loss of the client's other rows under their experts; 0: it has none
    doubts: list[float]  # of the router: 1 - its largest weight
    strange: list[float]  # share of their prompts that are like none before


class Sign(Step[Signed]):
    """Sign your buckets that have no expert: warm one LoRA up for each, from the same start as ever."""

    name = "sign"
    together = None  # all warmups march in lockstep

    def __init__(self, discover: Discover):
        self.discover, self.config = discover, discover.config

    def answer(self, compute: Compute, clients: Sequence[Client], question: Message) -> Iterator[Answer]:
        state = received(question, compute.layers, compute.device)
        units = [(client, c) for client in clients for c in apart(client)]
        signatures = self.discover.warm_up(compute, units)
        for client in clients:
            own = [client.buckets[c] for c in apart(client)]
            gates = F.one_hot(client.example_experts(), state.layout.experts).float()
            usual = self._loss(compute, state, client, np.concatenate([*client.served, own[0][:0]]), gates)
            weights = state.weights(client.data.features)  # [n, M]
            picked, sure = state.gates(weights, "sparse"), weights.max(1).values.clamp(0, 1)
            strange = (weights.sum(1) == 0).float()
            yield Answer({"signatures": torch.stack([next(signatures) for _ in own])}, {
                "losses": [self._loss(compute, state, client, rows, picked) for rows in own],
                "doubts": [float((1 - sure[rows]).mean()) for rows in own],
                "strange": [float(strange[rows].mean()) for rows in own],
                "usual": usual,
            })  # fmt: skip

    def _loss(
        self, compute: Compute, state: Broadcast, client: Client, rows: np.ndarray, gates: torch.Tensor
    ) -> float:
        """Mean over a sample of rows; gates [n, M] are those of all rows."""
        rng = np.random.default_rng(stream_key("look", self.config.seed, client.index))
        chosen = rng.permutation(rows)[:_LOOKED_AT]
        if not len(chosen):
            return 0.0
        examples = [client.data.examples[i] for i in chosen]
        return float(compute.losses(state.layout, state.theta, examples, gates[chosen]).mean())

    def figures(self, asked: Asked) -> dict[str, Figure]:
        count = (len(apart(asked.member)),) * 2
        return {
            "losses": Figure(float, 0, MOST_LOSS, count),
            "doubts": Figure(float, 0, 1, count),
            "strange": Figure(float, 0, 1, count),
            "usual": Figure(float, 0, MOST_LOSS),
        }

    def parts(self, asked: Asked, figures: Facts) -> dict[str, Part]:
        return {"signatures": self.discover.signatures(asked, len(apart(asked.member)))}

    def read(self, asked: Asked, parts: dict[str, torch.Tensor], figures: Facts) -> Signed:
        return Signed(parts["signatures"], **figures)


def apart(member: Member) -> list[int]:
    """Its buckets that have rows and no expert."""
    return [c for c, (size, m) in enumerate(zip(member.sizes, member.assignment, strict=True)) if size and m < 0]


def decide(
    blocks: Sequence[np.ndarray],
    distances: np.ndarray,
    new: np.ndarray,
    limit: float,
    sizes: Sequence[int],
    config: Config,
) -> list[int]:
    """The expert of every bucket; numbers beyond those of ``distances`` [n, M] are new experts. Those that are
    ``new`` [n] and near each other are one kind, which opens an expert if it has examples enough and there is room
    for one; all others join the nearest, old or new."""
    experts, most = distances.shape[1], config.alignment.max_experts
    far = np.flatnonzero(new)
    kinds = kinds_of([block[far] for block in blocks], limit)
    found = distances.argmin(1)
    opened: list[np.ndarray] = []  # buckets of each new expert
    for kind in range(int(kinds.max()) + 1 if len(kinds) else 0):
        own = far[kinds == kind]
        if sum(sizes[bucket] for bucket in own) >= config.living.least and experts + len(opened) < most:
            found[own] = experts + len(opened)
            opened.append(own)
    if opened:
        rest = np.flatnonzero(found < experts)
        labels = [next((k for k, own in enumerate(opened) if b in own), -1) for b in range(len(distances))]
        away = expert_distances([block[rest] for block in blocks], expert_means(blocks, labels, len(opened)))
        for row, bucket in enumerate(rest):
            if away[row].min() < distances[bucket].min():
                found[bucket] = experts + int(away[row].argmin())
    return [int(m) for m in found]


def kept_means(state: ServerState) -> np.ndarray:
    """[M, D]: the mean signature of every expert's buckets."""
    assert state.signatures is not None
    return state.signatures.cpu().numpy()


def remember(
    state: ServerState, blocks: Sequence[np.ndarray], experts: Sequence[int], change: Change
) -> ServerState:
    """The state, with these buckets among those that the experts' mean signatures are of."""
    assert state.signatures is not None
    more = len(change.opened)
    total = state.layout.experts + more
    counts = [*state.report["signed_buckets"], *[0] * more]
    new = [sum(m == owner for owner in experts) for m in range(total)]
    means = np.concatenate([kept_means(state), np.zeros((more, state.signatures.shape[1]), dtype=np.float32)])
    weights = np.array([[n / max(1, n + k)] for n, k in zip(counts, new, strict=True)], dtype=np.float32)
    joined = weights * means + (1 - weights) * expert_means(blocks, experts, total)
    means = np.where(np.array(new)[:, None] > 0, joined, means)  # nobody came: to the bit as it was
    report: dict[str, Any] = {
        **state.report,
        "signed_buckets": [n + k for n, k in zip(counts, new, strict=True)],
        "born": [*state.report["born"], *[change.t + 1] * more],
    }
    return replace(state, signatures=torch.from_numpy(means).to(state.signatures), report=report)


def placed_lines(change: Change) -> Iterator[str]:
    """What was decided, in words."""
    for bucket in change.placed:
        kept = "kept apart; resume with living.notice=open to open an expert"
        where = f"expert {bucket.expert}" if bucket.expert >= 0 else kept
        new = " opens" if bucket.expert in change.opened else ""
        if change.limit is not None and change.limit < bucket.distance and bucket.expert == bucket.nearest:
            new = ", although far: a new one has too few rows (living.least) or no room (alignment.max_experts)"
        yield (
            f"before round {change.t + 1}: {bucket.rows} rows of {bucket.client} lie {bucket.distance:.2f} from "
            f"expert {bucket.nearest} (limit {change.limit:.2f}; loss {bucket.loss:.2f}, its others "
            f"{bucket.usual:.2f}; router's doubt {bucket.doubt:.2f}; strange {bucket.strange:.0%}) → {where}{new}"
        )
