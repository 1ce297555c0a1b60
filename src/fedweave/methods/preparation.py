"""Lines 1 to 6 of Algorithm 1, for every method with experts: from the clients' units to the first state.

The rules of the server, with the questions of :mod:`fedweave.methods.prototypes` and
:mod:`fedweave.methods.warm_start`: a method that aligns experts has them all, others call a few.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedweave.aggregation.robust import believed, chosen_rule, client_average, streams, usual_length
from fedweave.aggregation.standing import Standing, left_out
from fedweave.alignment.align import (
    Alignment,
    align,
    expert_distances,
    expert_means,
    joining_limit,
    signature_distance,
)  # fmt: skip
from fedweave.alignment.novelty import own_distances
from fedweave.config import Config
from fedweave.discovery.clusterers import Buckets
from fedweave.errors import UserError
from fedweave.experts.layout import AdapterLayout
from fedweave.federation.admission import Receipts
from fedweave.federation.client import Member
from fedweave.federation.engines.base import Engine
from fedweave.federation.engines.in_process import InProcessEngine
from fedweave.federation.message import Message
from fedweave.federation.method import Method, Payload, Sizes
from fedweave.federation.news import Change
from fedweave.federation.state import ServerState
from fedweave.federation.steps import Step
from fedweave.methods.contested import Contest
from fedweave.methods.familiar import Familiarity
from fedweave.methods.prototypes import Discover, Prototypes, Start, StartExperts, first_adapter
from fedweave.methods.relabel import Relabel, relabel
from fedweave.methods.warm_start import WarmRouter, warm_up_router
from fedweave.router.mlp import RouterLayout
from fedweave.router.routed import RoutedExperts

Align = Callable[..., Alignment]  # (signature distances, most experts, options) -> M and a(i,c)
_SHOWN_PROTOTYPES = 512  # more distances than that are nothing to read, and a large file


class Aligned(Method):
    """A method whose experts are aligned over clients. Without ``start`` experts begin at zero, without ``warm``
    the router at random, without ``contest`` all experts stay, without ``relabel`` examples keep their buckets'
    experts, and without ``familiar`` every prompt gets an expert."""

    discovers = True
    shared_rank = 0  # of a part that all experts share

    def __init__(self, config: Config):
        super().__init__(config)
        self.discover = Discover(self)
        self.start: StartExperts | None = StartExperts(self.discover)
        self.warm: WarmRouter | None = None
        self.contest: Contest | None = None
        self.relabel: Relabel | None = None
        self.familiar: Familiarity | None = None
        self.align: Align = align

    def steps(self) -> list[Step]:
        known: list[Step] = [self.familiar.moments, self.familiar.distances] if self.familiar else []
        asked: list[Step | None] = [self.discover, self.start, self.warm, self.relabel, *known]
        asked += [*(self.contest.steps() if self.contest else []), *super().steps()]
        return [step for step in asked if step is not None]

    def prepare(self, engine: Engine, start: RoutedExperts | None = None) -> ServerState:
        """Buckets, signatures, alignment, initial experts and router."""
        if start is not None:
            state = self.continued(engine, start.forgetting())  # what was familiar elsewhere need not be so here
            return state if self.familiar is None else self.familiar.taught(engine, state, Receipts())
        config, shared = self.config, self.shared_rank
        heard, started, warmed = Receipts(), Receipts(), Receipts()
        found = discover_units(engine, self.discover, heard)  # lines 1-4
        blocks = signature_blocks(engine, self.discover, [told.signatures for told in found])
        distance = signature_distance(blocks)
        part = believed({i: sum(told.sizes) for i, told in enumerate(found)}, config)
        settings, sizes = (
            config.alignment,
            np.array([part[i] * n for i, told in enumerate(found) for n in told.sizes]),
        )
        options = {"method": settings.linkage, "least": settings.least_silhouette, "min_share": settings.min_share}
        aligned = self.align(distance, settings.max_experts, sizes=sizes, **options)  # line 5
        whose = [member.index for member, told in zip(engine.members, found, strict=True) for _ in told.sizes]
        report = assign(engine.members, found, aligned.experts, aligned.labels.tolist())
        report |= {"alignment_silhouettes": aligned.silhouettes, "alignment_note": aligned.note}
        # Line 6: an expert starts as the mean of its buckets' warmup adapters; the router starts at random.
        layout = engine.layout(config.experts.rank, report["experts"], shared)
        theta, standing = layout.initial(config.seed), Standing(engine.members, config)
        if self.start is not None:
            theta = start_experts(engine, self.start, layout, started, standing)
        router = RouterLayout(engine.width, config.router.hidden, layout.experts, config.router.features)
        phi = router.initial(config.seed + 1).to(engine.device)
        if self.warm is not None:
            phi = warm_up_router(engine, self.warm, router, phi, warmed, standing)
        down = 4 * router.size * config.router.warm_start.rounds
        if self.relabel is not None:
            router, phi, told = relabel(engine, self.relabel, router, phi, warmed)
            own = [m for m in range(layout.experts) if m not in told["dropped_experts"]]
            layout, theta = narrowed(layout, theta, own)
            assigned = [m for member in engine.members for m in member.assignment]
            report |= told | {"experts": layout.experts, "prototypes": len(assigned), "prototype_labels": assigned}
            down = 4 * router.size * config.router.warm_start.rounds
            here = np.isin(whose, [member.index for member in engine.members])  # who was silent takes no part
            distance, blocks = distance[np.ix_(here, here)], [block[here] for block in blocks]
        shown = distance.astype(float).round(6).tolist() if len(distance) <= _SHOWN_PROTOTYPES else None
        report["signature_distance"] = shown
        if chosen_rule(config) == "agreement":
            report["left_out"] = left_out(standing.evidence, config.federation.hostile)
        known = None
        if self.familiar is not None:
            router, phi, known = self.familiar.learn(engine, router, phi, warmed)
            down += 4 * 2 * router.width * (router.axes + 2)  # what each half of the prompts spans
        elif config.router.familiar == "auto" and config.privacy.level != "none":
            engine.console.say(
                "every prompt gets an expert: with privacy no sums of features tell which are strange"
            )
        router = replace(router, sure=config.router.gate == "sure")
        report["preparation_bytes"] = preparation_bytes(engine.members, (heard, 0), (started, 0), (warmed, down))
        means = None
        if engine.grows or config.living.notice != "off":
            asked, served = config.federation.join_distance, np.array(report["prototype_labels"]) >= 0
            owners = [m for m in report["prototype_labels"] if m >= 0]
            distance, blocks = distance[np.ix_(served, served)], [block[served] for block in blocks]
            halfway = joining_limit(distance, owners)
            report["join_distance"] = halfway if asked == "auto" else asked
            report["halfway"] = halfway if np.isfinite(halfway) else 0.0
            report["own_distances"] = own_distances(distance, owners)
            report["born"] = [0] * layout.experts
            report["signed_buckets"] = [owners.count(m) for m in range(layout.experts)]
            means = torch.from_numpy(expert_means(blocks, owners, layout.experts))  # [M, D]
        return ServerState(
            layout, router, theta.to(engine.device), phi[None], signatures=means, known=known,
            standing=standing.evidence, report=report,
        )  # fmt: skip

    def live(self, engine: Engine, state: ServerState, t: int) -> tuple[ServerState, Change]:
        """As ever; once round 1 has shown who is hostile, what was learned from them before it is learned anew."""
        state, change = super().live(engine, state, t)
        if t == 1:
            state = self.reconsider(engine, state, change)
            if self.contest is not None:
                state = self.contest.settle(engine, state, change, self.start_over)
        return state, change

    def reconsider(self, engine: Engine, state: ServerState, change: Change) -> ServerState:
        """The router starts over without those whom only the experts' first updates have shown to be hostile. Its
        warm start asks few clients, no two of which need have the same experts: it cannot tell by itself."""
        config, known = self.config, state.report.get("left_out")
        warmed = self.warm is not None and config.router.warm_start.enabled
        if not warmed or known is None or config.privacy.level != "none":  # a second time is not paid for
            return state
        if {*left_out(state.standing, config.federation.hostile)} <= {*known}:
            return state
        engine.console.say("the router starts over without those who count nothing")
        return self.start_over(engine, state, None, change)

    def start_over(
        self, engine: Engine, state: ServerState, step: WarmRouter | None, change: Change
    ) -> ServerState:
        """The state with a router that was warmed up anew by those who are in good standing."""
        step = step or self.warm
        assert step is not None and state.router is not None and state.phi is not None
        router, standing, heard = (
            state.router.trained,
            Standing(engine.members, self.config, state.standing),
            Receipts(),
        )
        phi = router.initial(self.config.seed + 1).to(state.phi)
        phi = warm_up_router(engine, step, router, phi, heard, standing, known=True)
        change.restarted = True
        change.count(heard, 4 * router.size * step.settings.rounds)
        phi = torch.cat([phi, state.phi[0, router.size :]])[None]
        return replace(state, phi=phi, norms={})  # where prompts went astray experts hardly moved

    def rehearse(self, engine: Engine, state: ServerState) -> None:
        if self.contest is not None:
            change, rival = Change(1), min(1, state.layout.experts - 1)
            state = self.start_over(engine, state, self.contest.again, change)
            self.contest.contested(engine, engine.members, state, change)
            self.contest.voted(engine, engine.members, state, [(0, rival)], change)

    def continued(self, engine: Engine, start: RoutedExperts) -> ServerState:
        """``init=BUNDLE``: buckets are found as ever; each goes to the expert that the given router prefers for its
        prompts, because that is the expert it would get at inference. No warmup, no signatures, and M stays."""
        if not isinstance(engine, InProcessEngine):
            raise UserError("init starts federations of this process only; leave it empty for real sites.")
        found = self.form_buckets(engine.compute, engine.members)
        labels: list[int] = []
        for client in engine.members:
            votes = start.weights(client.data.features)  # [n, M]
            labels += [int(votes[bucket].mean(0).argmax()) for bucket in client.buckets]
        report = assign(engine.members, found, start.layout.experts, labels)
        return ServerState(start.layout, start.router, start.theta, start.phi, start.shares, report=report)

    def admit(self, engine: Engine, state: ServerState, newcomer: Member) -> str:
        """Each bucket goes to its nearest expert, or is kept apart when that is too far."""
        assert state.signatures is not None
        limit, lines = state.report["join_distance"], []
        for _, told in engine.ask(self.discover, [newcomer], Message()):
            newcomer.learn(told.sizes, told.note)
            blocks = signature_blocks(engine, self.discover, [told.signatures])
            distances = expert_distances(blocks, state.signatures.cpu().numpy())  # [buckets, M]
            newcomer.assignment = []
            for c, row in enumerate(distances):
                m, near = int(row.argmin()), bool(row.min() <= limit)
                newcomer.assignment.append(m if near else -1)
                place = f"expert {m}" if near else f"kept apart, the nearest expert {m} is farther than {limit:.2f}"
                lines.append(f"bucket {c} ({told.sizes[c]} examples, distance {row[m]:.2f}) → {place}")
        return "; ".join(lines)


# ------------------------------------------------------------------------------------------ one rule each


def discover_units(engine: Engine, step: Discover, receipts: Receipts) -> list[Prototypes]:
    """What every client tells of its buckets, in the order of the members; who tells nothing takes no part."""
    found: dict[int, Prototypes] = {}
    for member, told in engine.ask(step, engine.present(), Message(), receipts):
        member.learn(told.sizes, told.note)
        found[member.index] = told
    engine.only(set(found))
    return [found[member.index] for member in engine.members]


def signature_blocks(engine: Engine, step: Discover, signatures: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """Per LoRA-B block one matrix over all prototypes, [prototypes, width]; signatures [buckets, D] by client."""
    signer = step.signer(engine.layout(step.config.experts.rank, 1))
    return signer.blocks([signature for told in signatures for signature in told])


def assign(
    members: Sequence[Member], found: Sequence[Prototypes | Buckets], experts: int, labels: list[int]
) -> dict[str, Any]:
    """a(i,c) of all buckets to their clients, and what discovery.json says of it."""
    place = iter(labels)
    for member in members:
        member.assignment = [next(place) for _ in member.sizes]
    silhouettes = {member.name: told.silhouettes for member, told in zip(members, found, strict=True)}
    return {
        "bucket_silhouettes": silhouettes,
        "prototypes": len(labels),
        "experts": experts,
        "prototype_labels": labels,
    }


def narrowed(layout: AdapterLayout, theta: torch.Tensor, kept: Sequence[int]) -> tuple[AdapterLayout, torch.Tensor]:
    """The same experts without all others, and what they share; θ [P]."""
    experts, narrow = layout.unstack(theta), layout.narrow(len(kept))
    return narrow, narrow.stack([experts[m] for m in kept], theta[layout.expert_of_column == layout.experts])


def start_experts(
    engine: Engine, step: StartExperts, layout: AdapterLayout, receipts: Receipts, standing: Standing
) -> torch.Tensor:
    """θ⁰ [P] of experts that start from warmups."""
    question = Message(facts={"experts": layout.experts})
    starts = warm_starts(engine, step, layout, range(layout.experts), engine.members, question, receipts, standing)
    return layout.stack(starts, layout.initial_shared(step.config.seed))


def warm_starts(
    engine: Engine,
    step: StartExperts,
    layout: AdapterLayout,
    experts: Sequence[int],
    members: Sequence[Member],
    question: Message,
    receipts: Receipts,
    standing: Standing,
) -> list[torch.Tensor]:
    """What each of these experts starts from, [P of one] each: the mean of its buckets' warmup adapters, as a
    stream; one without any starts where all of them did."""
    single, config = layout.with_experts(1), step.config
    first = first_adapter(single, config.seed)
    plain = streams(config)  # other rules than the mean compare clients, and how far each has moved
    origin = torch.zeros(1) if plain else first
    means = {m: client_average(single.size, torch.device("cpu"), config, standing) for m in experts}
    for member, start in engine.ask(step, members, question, receipts):
        for m, adapter, buckets in start if plain else _one_each(start):
            if m in means:
                means[m].add(adapter - origin, buckets, member.index)
    usual = usual_length(means.values())
    return [origin + mean.step(usual) if mean.weight else first for mean in means.values()]


def _one_each(start: Start) -> Start:
    """A client's adapters of one expert as their mean: what leaves a site."""
    experts = dict.fromkeys(m for m, _, _ in start)
    own = {m: [(adapter, n) for owner, adapter, n in start if owner == m] for m in experts}
    counts = {m: sum(n for _, n in rows) for m, rows in own.items()}
    return [(m, torch.stack([n * a for a, n in rows]).sum(0) / counts[m], counts[m]) for m, rows in own.items()]


def preparation_bytes(members: Sequence[Member], *asked: tuple[Receipts, int]) -> dict[str, dict[str, int]]:
    """What each client sent and received before round 1, from (receipts, bytes received) of every step."""
    return {
        member.name: {
            "up": sum(receipts.bytes_up.get(member.name, 0) for receipts, _ in asked),
            "down": sum(down for receipts, down in asked if member.name in receipts.bytes_up),
        }
        for member in members
    }


def mixture_payload(sizes: Sizes, up_experts: int, routers: int = 1, trained_router: bool = True) -> Payload:
    """The costs of a method with several experts, of which a client sends so many."""
    router, experts = sizes.router.trained.size if trained_router else 0, sizes.experts
    one = experts.with_experts(1).size
    shared = experts.size - experts.experts * one
    return Payload(
        rank=experts.rank,
        experts=experts.experts,
        routers=routers,
        trainable=experts.size + routers * router,
        up=up_experts * one + shared + router,
        down=experts.size + router,
    )
