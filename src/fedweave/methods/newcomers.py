"""Buckets that come in mid-run: what they tell, and which expert each of them belongs to.

The same for rows that arrive at a client and for a client that comes late. The rule is in
:mod:`fedweave.alignment.novelty`, its argument in docs/living.md.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from fedweave.alignment.align import expert_distances, expert_means
from fedweave.alignment.novelty import kinds_of
from fedweave.config import Config
from fedweave.federation.client import Client, Member, examples_of
from fedweave.federation.compute import Compute
from fedweave.federation.message import Facts, Message
from fedweave.federation.news import Change, Placed
from fedweave.federation.state import Broadcast, ServerState, received
from fedweave.federation.steps import MOST_LOSS, Answer, Asked, Figure, Part, Step
from fedweave.methods.prototypes import Discover
from fedweave.streams import stream_key

_MORE = "too few to open an expert until more of their kind come (living.least)"
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


def sizes_apart(member: Member) -> list[int]:
    """How many rows each of these has."""
    return [member.sizes[c] for c in apart(member)]


@dataclass
class Arrived:
    """n buckets that have no expert yet."""

    whose: Sequence[str]
    sizes: Sequence[int]
    blocks: Sequence[np.ndarray]  # signatures, [n, size] a layer
    distances: np.ndarray  # [n, M] to the experts that are there
    new: np.ndarray  # [n] bool: of no known kind
    strange: np.ndarray  # [n] bool: most of its prompts are like none before
    limit: float  # nearer than this, two of them are one kind

    def kinds(self) -> list[np.ndarray]:
        """The buckets of every new kind; kinds that several clients bring come first."""
        far = np.flatnonzero(self.new)
        labels = kinds_of([block[far] for block in self.blocks], self.limit)
        found = [far[labels == kind] for kind in range(int(labels.max()) + 1 if len(labels) else 0)]
        return sorted(found, key=lambda own: self.alone(own) is not None)

    def alone(self, own: Sequence[int] | np.ndarray) -> str | None:
        """The client that all of these buckets are of, if it is one."""
        clients = {self.whose[bucket] for bucket in own}
        return clients.pop() if len(clients) == 1 else None


def decide(arrived: Arrived, held: Mapping[str, int], config: Config) -> tuple[list[int], list[str]]:
    """The expert of every bucket; numbers beyond those that are there are new experts. A new kind opens one if it
    has examples enough and there is room. One that has too few waits for more if its prompts are strange as well;
    all others join the nearest, old or new. One client alone opens ``living.alone`` at most, with those that it has
    ``held`` so far, and never the last one that there is room for. What may not open has no expert, -1, and in the
    second list the settings with which one would: none where it has too few examples so far."""
    experts, most = arrived.distances.shape[1], config.alignment.max_experts
    found, waits, held = arrived.distances.argmin(1), [""] * len(arrived.sizes), Counter(held)
    opened: list[np.ndarray] = []  # buckets of each new expert
    few = np.zeros(len(found), dtype=bool)
    for own in arrived.kinds():
        client = arrived.alone(own)
        if experts + len(opened) + (client is not None) >= most:
            continue
        if sum(arrived.sizes[bucket] for bucket in own) < config.living.least:
            wait = own[arrived.strange[own]]  # the signature of a few rows is no witness by itself
            found[wait], few[wait] = -1, True
            continue
        if client is not None:
            held[client] += 1
            if held[client] > config.living.alone:
                found[own] = -1
                for bucket in own:
                    waits[bucket] = f"living.alone={held[client]}"
                continue
        found[own] = experts + len(opened)
        opened.append(own)
    if opened:
        rest = np.flatnonzero((found >= 0) & (found < experts) | few)
        labels = [next((k for k, own in enumerate(opened) if b in own), -1) for b in range(len(found))]
        means = expert_means(arrived.blocks, labels, len(opened))
        away = expert_distances([block[rest] for block in arrived.blocks], means)
        for row, bucket in enumerate(rest):
            if away[row].min() < arrived.distances[bucket].min():
                found[bucket], few[bucket] = experts + int(away[row].argmin()), False
    if config.living.notice == "ask":  # about what would open an expert, and about nothing else
        unknown = ((found < 0) | (found >= experts)) & ~few
        waits = [f"living.notice=open {key}".strip() if u else "" for u, key in zip(unknown, waits, strict=True)]
        found[unknown] = -1
    return found.tolist(), waits


def openers(state: ServerState) -> list[str]:
    """[M] the client that opened an expert alone; empty where several did, or alignment."""
    known = state.report.get("openers", [])
    return [*known, *[""] * (state.layout.experts - len(known))]


def held_alone(state: ServerState, members: Sequence[Member]) -> Counter[str]:
    """How many experts a client has opened that nobody else feeds, whether it feeds them still or not."""
    fed = {member.name: examples_of([member], state.layout.experts) for member in members}
    return Counter(
        who
        for m, who in enumerate(openers(state))
        if who and not any(examples[m] for name, examples in fed.items() if name != who)
    )


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
        "openers": [*openers(state), *(change.opened_by(m) for m in change.opened)],
    }
    return replace(state, signatures=torch.from_numpy(means).to(state.signatures), report=report)


def placed_lines(change: Change) -> Iterator[str]:
    """What was decided, in words: a line for all buckets of a client that lie by one expert and go one way."""
    found: dict[tuple, list[Placed]] = {}
    for bucket in change.placed:
        far = change.limit is not None and change.limit < bucket.distance and bucket.expert == bucket.nearest
        found.setdefault((bucket.client, bucket.nearest, bucket.expert, bucket.waits, far), []).append(bucket)
    for (client, nearest, m, waits, far), own in found.items():
        rows = sum(bucket.rows for bucket in own)
        loss, doubt, strange = (
            sum(bucket.rows * getattr(bucket, name) for bucket in own) / rows
            for name in ("loss", "doubt", "strange")
        )
        away = sorted({f"{bucket.distance:.2f}" for bucket in own})
        whose = f"{rows} rows of {client}" + (f" in {len(own)} buckets" if len(own) > 1 else "")
        mend = f"resume with {waits} to open an expert" if waits else _MORE
        where = f"expert {m}" if m >= 0 else f"kept apart; {mend}"
        where += ", which opens" if m in change.opened else ""
        if far:
            where += ", although far: a new one has too few rows (living.least) or no room (alignment.max_experts, "
            where += "whose last place is for what two clients bring)"
        others = f", its others {own[0].usual:.2f}" if own[0].usual else ""  # it may have none
        yield (
            f"before round {change.t + 1}: {whose} lie {' to '.join(away[:: max(1, len(away) - 1)])} from expert "
            f"{nearest} (limit {change.limit:.2f}; loss {loss:.2f}{others}; router's doubt {doubt:.2f}; strange "
            f"{strange:.0%}) → {where}"
        )
