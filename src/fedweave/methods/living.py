"""Buckets that come in mid-run: which expert they join, and how one opens for a kind that none knows.

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
from fedweave.alignment.novelty import kinds_of, novelty_limit
from fedweave.config import Config
from fedweave.federation.admission import Receipts
from fedweave.federation.client import Client, Member
from fedweave.federation.compute import Compute
from fedweave.federation.engines.base import Engine
from fedweave.federation.message import Facts, Message
from fedweave.federation.news import Change, Placed
from fedweave.federation.state import Broadcast, ServerState, broadcast, received
from fedweave.federation.steps import Answer, Asked, Figure, Part, Step
from fedweave.methods.familiar import Familiarity
from fedweave.methods.growing import GrowRouter, grow_router
from fedweave.methods.preparation import signature_blocks, warm_starts
from fedweave.methods.prototypes import Discover, Prototypes, StartExperts, first_adapter
from fedweave.streams import stream_key

_LOOKED_AT = 64  # examples that a client measures losses on
_MOST = 1e4  # nats: more than any vocabulary can cost


@dataclass
class Signed(Prototypes):
    """Buckets without an expert: their signatures, and how the model does on them."""

    losses: Sequence[float] = ()  # under the expert that the router picks
    doubts: Sequence[float] = ()  # 1 - the router's largest weight
    usual: float = 0.0  # loss of the client's other rows under their experts; 0: it has none


class Sign(Step[Signed]):
    """Sign your buckets that have no expert: warm one LoRA up for each, from the same start as ever."""

    name = "sign"
    together = None  # all warmups march in lockstep

    def __init__(self, discover: Discover):
        self.discover, self.config = discover, discover.config

    def answer(self, compute: Compute, clients: Sequence[Client], question: Message) -> Iterator[Answer]:
        state = received(question, compute.layers, compute.device)
        units = [(client, c) for client in clients for c in apart(client)]
        signatures = iter(list(self.discover.warm_up(compute, units)))
        for client in clients:
            own = [client.buckets[c] for c in apart(client)]
            gates = F.one_hot(client.example_experts().clamp(min=0), state.layout.experts).float()
            usual = self._loss(compute, state, client, np.concatenate([*client.served, own[0][:0]]), gates)
            weights = state.weights(client.data.features)  # [n, M]
            picked = state.gates(weights, "sparse")
            yield Answer({"signatures": torch.stack([next(signatures) for _ in own])}, {
                "losses": [self._loss(compute, state, client, rows, picked) for rows in own],
                "doubts": [float((1 - weights[rows].max(1).values).mean().clamp(0, 1)) for rows in own],
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
            "losses": Figure(float, 0, _MOST, count),
            "doubts": Figure(float, 0, 1, count),
            "usual": Figure(float, 0, _MOST),
        }

    def parts(self, asked: Asked, figures: Facts) -> dict[str, Part]:
        return {"signatures": self.discover.signatures(asked, len(apart(asked.member)))}

    def read(self, asked: Asked, parts: dict[str, torch.Tensor], figures: Facts) -> Signed:
        sizes = [asked.member.sizes[c] for c in apart(asked.member)]
        told = {name: figures[name] for name in ("losses", "doubts", "usual")}
        return Signed(sizes, parts["signatures"], **told)


def apart(member: Member) -> list[int]:
    """Its buckets that have no expert."""
    return [c for c, m in enumerate(member.assignment) if m < 0]


class Newcomers:
    """The questions about buckets that come in mid-run, and the rules that read the replies."""

    def __init__(
        self, config: Config, discover: Discover, start: StartExperts | None, familiar: Familiarity | None
    ):
        self.config, self.discover, self.start, self.familiar = config, discover, start, familiar
        self.sign, self.grow = Sign(discover), GrowRouter(config)

    def steps(self) -> list[Step]:
        return [self.sign, self.grow]

    def settle(self, engine: Engine, state: ServerState, change: Change) -> ServerState:
        """Every bucket without an expert gets one, or is kept apart until the operator has decided."""
        asking, asked = self.config.living.notice == "ask", state.report.get("asked", {})
        known = asked if asking else {}
        pending = [m for m in engine.members if apart(m) and known.get(m.name) != [m.sizes[c] for c in apart(m)]]
        question, heard = broadcast(state, change.t), Receipts()
        signed = list(engine.ask(self.sign, pending, question, heard)) if pending else []
        change.heard(heard, question)
        if not signed:
            return state
        units = [(member, c) for member, _ in signed for c in apart(member)]
        blocks = signature_blocks(engine, self.discover, [told for _, told in signed])
        means = kept_means(state)
        distances = expert_distances(blocks, means)  # [n, M]
        change.limit = novelty_limit(state.report["own_distances"], self.config.living.alarms)
        experts = decide(blocks, distances, change.limit, [m.sizes[c] for m, c in units], self.config)
        for bucket, far in enumerate(distances.min(1) > change.limit):
            if far and asking:
                experts[bucket] = -1
        figures = [
            (told.losses[i], told.usual, told.doubts[i]) for _, told in signed for i in range(len(told.sizes))
        ]
        for (member, c), m, row, told in zip(units, experts, distances, figures, strict=True):
            member.assignment = [*member.assignment[:c], m, *member.assignment[c + 1 :]]
            nearest = int(row.argmin())
            change.placed.append(Placed(member.name, member.sizes[c], m, nearest, float(row[nearest]), *told))
        change.opened = list(range(state.layout.experts, max([*experts, state.layout.experts - 1]) + 1))
        apart_now = {m.name: [m.sizes[c] for c in apart(m)] for m in engine.members if apart(m)}
        for line in lines(change):
            engine.console.say(line)
        state = remember(state, blocks, experts, len(change.opened))
        state.report["asked"] = apart_now
        return self.open(engine, state, change) if change.opened else state

    def open(self, engine: Engine, state: ServerState, change: Change) -> ServerState:
        """θ and φ with the new experts: old columns are copied, new ones start from their buckets' warmups."""
        layout, router, more = state.layout, state.router, len(change.opened)
        assert router is not None and state.phi is not None
        wide = engine.layout(layout.rank, layout.experts + more, layout.shared)
        question, heard = Message(facts={"t": change.t, "first": layout.experts}), Receipts()
        owners = [member for member in engine.members if set(member.assignment) & set(change.opened)]
        starts = [first_adapter(layout.with_experts(1), self.config.seed)] * more
        if self.start is not None:
            starts = warm_starts(engine, self.start, layout, change.opened, owners, question, heard)
        change.heard(heard, question)
        shared = state.theta[(layout.expert_of_column == layout.experts).to(state.theta.device)]
        theta = wide.stack([*layout.unstack(state.theta), *(one.to(state.theta) for one in starts)], shared)
        phi = state.phi[0]
        if router.axes:
            router, phi = router.forgetting(phi)
        router, phi = grow_router(engine, self.grow, router, phi, more, change)
        if self.familiar is not None:
            heard = Receipts()
            router, phi = self.familiar.learn(engine, router, phi, heard)
            change.heard(heard, Message({"phi": phi}))
        # a new expert and its output have far to go: what earlier rounds moved by is no measure for the next ones
        return replace(state, layout=wide, theta=theta, router=router, phi=phi[None], norms={})


def decide(
    blocks: Sequence[np.ndarray], distances: np.ndarray, limit: float, sizes: Sequence[int], config: Config
) -> list[int]:
    """The expert of every bucket; numbers beyond those of ``distances`` [n, M] are new experts. Far buckets that
    are near each other are one kind, which opens an expert if it has examples enough and there is room for one;
    what is left over joins the nearest, old or new."""
    experts, most = distances.shape[1], config.alignment.max_experts
    far = np.flatnonzero(distances.min(1) > limit)
    kinds = kinds_of([block[far] for block in blocks], limit)
    found = distances.argmin(1)
    opened: list[np.ndarray] = []  # buckets of each new expert
    for kind in range(int(kinds.max()) + 1 if len(kinds) else 0):
        own = far[kinds == kind]
        if sum(sizes[bucket] for bucket in own) >= config.living.least and experts + len(opened) < most:
            found[own] = experts + len(opened)
            opened.append(own)
    if opened:
        rest = [bucket for bucket in far if found[bucket] < experts]
        labels = [next((k for k, own in enumerate(opened) if b in own), -1) for b in range(len(distances))]
        new = expert_distances([block[rest] for block in blocks], expert_means(blocks, labels, len(opened)))
        for row, bucket in enumerate(rest):
            if new[row].min() < distances[bucket].min():
                found[bucket] = experts + int(new[row].argmin())
    return [int(m) for m in found]


def kept_means(state: ServerState) -> np.ndarray:
    """[M, D]: the mean signature of every expert's buckets."""
    assert state.signatures is not None
    return state.signatures.cpu().numpy()


def remember(state: ServerState, blocks: Sequence[np.ndarray], experts: Sequence[int], more: int) -> ServerState:
    """The state, with these buckets among those that the experts' mean signatures are of."""
    assert state.signatures is not None
    total = state.layout.experts + more
    counts = [*state.report["signed_buckets"], *[0] * more]
    new = [sum(m == owner for owner in experts) for m in range(total)]
    means = np.concatenate([kept_means(state), np.zeros((more, state.signatures.shape[1]), dtype=np.float32)])
    weights = np.array([[n / max(1, n + k)] for n, k in zip(counts, new, strict=True)], dtype=np.float32)
    joined = weights * means + (1 - weights) * expert_means(blocks, experts, total)
    means = np.where(np.array(new)[:, None] > 0, joined, means)  # nobody came: to the bit as it was
    report: dict[str, Any] = {**state.report, "signed_buckets": [n + k for n, k in zip(counts, new, strict=True)]}
    return replace(state, signatures=torch.from_numpy(means).to(state.signatures), report=report)


def lines(change: Change) -> Iterator[str]:
    """What was decided, in words."""
    for bucket in change.placed:
        where = (
            f"expert {bucket.expert}" if bucket.expert >= 0 else "kept apart; resume with living.notice=open or off"
        )
        new = " opens" if bucket.expert in change.opened else ""
        yield (
            f"before round {change.t + 1}: {bucket.rows} rows of {bucket.client} lie {bucket.distance:.2f} from "
            f"expert {bucket.nearest} (limit {change.limit:.2f}; loss {bucket.loss:.2f}, its others "
            f"{bucket.usual:.2f}; router's doubt {bucket.doubt:.2f}) → {where}{new}"
        )
