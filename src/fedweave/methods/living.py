"""Experts that open, merge and close in mid-run.

Before a round every bucket without an expert is placed (:mod:`fedweave.methods.newcomers`); an expert opens for
what belongs to none. Two that have become alike become one, and one that nobody feeds stays as it is or is retired,
where the config says so. Each is θ, φ and the kept signatures in another size; nothing old moves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from fedweave.aggregation.standing import Standing
from fedweave.alignment.align import expert_distances
from fedweave.alignment.novelty import MOSTLY, alike, novel, novelty_limit
from fedweave.config import Config
from fedweave.federation.admission import Receipts
from fedweave.federation.client import Member, examples_of
from fedweave.federation.engines.base import Engine
from fedweave.federation.message import Message
from fedweave.federation.news import Change, Placed
from fedweave.federation.state import ServerState, broadcast
from fedweave.federation.steps import Step
from fedweave.methods.closing import without_experts
from fedweave.methods.growing import GrowRouter, grow_router
from fedweave.methods.lessons import Lesson, give_lessons, shared_of
from fedweave.methods.newcomers import (
    Arrived,
    Sign,
    apart,
    decide,
    held_alone,
    kept_means,
    openers,
    placed_lines,
    remember,
    sizes_apart,
)
from fedweave.methods.preparation import signature_blocks, warm_starts
from fedweave.methods.prototypes import Discover, StartExperts, first_adapter


class Living:
    """The questions between rounds, and the rules that read the replies."""

    def __init__(self, config: Config, discover: Discover, start: StartExperts | None):
        self.config, self.discover, self.start = config, discover, start
        self.sign, self.teach, self.lesson = Sign(discover), GrowRouter(config), Lesson(config)

    def steps(self) -> list[Step]:
        return [self.sign, self.teach, self.lesson]

    def settle(self, engine: Engine, state: ServerState, change: Change) -> ServerState:
        """Everything that may happen to experts before a round."""
        settings = self.config.living
        state = self.place(engine, state, change)
        state = self.merge(engine, state, change) if settings.merge else state
        state = self.retire(engine, state, change) if settings.retire else state
        return self.tell_unfed(engine, state, change)

    # ---------------------------------------------------------------------------------- opening

    def place(self, engine: Engine, state: ServerState, change: Change) -> ServerState:
        """Every bucket without an expert gets one, or is kept apart until the operator has decided."""
        asking, held = self.config.living.notice == "ask", held_alone(state, engine.members)
        pending = self.pending(engine.members, state, held)
        # half of the bytes: the model is needed for a few figures, not for signatures
        question, heard = broadcast(state, change.t, torch.bfloat16), Receipts()
        signed = list(engine.ask(self.sign, pending, question, heard)) if pending else []
        change.heard(heard, question)
        signed.sort(key=lambda one: one[0].index)  # the order of arrival decides nothing
        if not signed:
            return state
        units = [(member, c) for member, _ in signed for c in apart(member)]
        blocks = signature_blocks(engine, self.discover, [told.signatures for _, told in signed])
        distances = expert_distances(blocks, kept_means(state))  # [n, M]
        own = state.report["own_distances"]
        change.limit = novelty_limit(own, self.config.living.alarms, state.report["halfway"])
        strange = [share for _, told in signed for share in told.strange]
        new = novel(distances.min(1), strange, own, change.limit)
        whose, sizes = [m.name for m, _ in units], [m.sizes[c] for m, c in units]
        arrived = Arrived(whose, sizes, blocks, distances, new, np.array(strange) > MOSTLY, change.limit)
        experts, waits = decide(arrived, held, self.config)
        figures = [
            (loss, told.usual, doubt, strange)
            for _, told in signed
            for loss, doubt, strange in zip(told.losses, told.doubts, told.strange, strict=True)
        ]
        for i, ((member, c), m) in enumerate(zip(units, experts, strict=True)):
            member.assignment = [*member.assignment[:c], m, *member.assignment[c + 1 :]]
            nearest = int(distances[i].argmin())
            distance = float(distances[i, nearest])
            change.placed.append(Placed(member.name, member.sizes[c], m, nearest, distance, *figures[i], waits[i]))
        change.opened = sorted({m for m in experts if m >= state.layout.experts})
        for line in placed_lines(change):
            engine.console.say(line)
        state = remember(state, blocks, experts, change)
        silent = {member.name for member in pending} - {member.name for member, _ in signed}
        told = {m.name: sizes_apart(m) for m in engine.members if apart(m) and m.name not in silent}
        state.report.update(asked=told if asking else {}, waiting={} if asking else told)
        if not change.opened:
            return state
        state = self.widen(engine, state, change, self.starts(engine, state, change))
        return give_lessons(engine, self.lesson, state, change.opened, change)

    def pending(self, members: Sequence[Member], state: ServerState, held: Mapping[str, int]) -> list[Member]:
        """Whose buckets without an expert are to be signed. The operator is asked once about each. What a client
        may not open an expert for alone, or has too few rows for, is looked at again, all of it, when buckets come
        that may be of its kind, and when it may open another."""
        settings, waiting = self.config.living, [member for member in members if apart(member)]
        known = state.report.get("asked" if settings.notice == "ask" else "waiting", {})
        unknown = {member.name for member in waiting if known.get(member.name) != sizes_apart(member)}
        many = {member.name for member in waiting if sum(sizes_apart(member)) >= settings.least}
        if settings.notice == "ask":
            return [member for member in waiting if member.name not in many - unknown] if unknown else []
        may_open = any(held.get(name, 0) < settings.alone for name in many)
        return waiting if unknown or may_open else []

    def starts(self, engine: Engine, state: ServerState, change: Change) -> list[torch.Tensor]:
        """What new experts start from, [P of one] each: the mean of their buckets' warmup adapters, B = 0, or
        the expert that was nearest to most of their rows."""
        if self.config.living.start == "nearest":
            known = state.layout.unstack(state.theta)
            return [known[change.nearest_of(m)] for m in change.opened]
        if self.start is None:
            return [first_adapter(state.layout.with_experts(1), self.config.seed)] * len(change.opened)
        question, heard = Message(facts={"t": change.t, "first": state.layout.experts}), Receipts()
        owners = [member for member in engine.members if set(member.assignment) & set(change.opened)]
        standing = Standing(engine.members, self.config, state.standing)
        starts = warm_starts(engine, self.start, state.layout, change.opened, owners, question, heard, standing)
        change.heard(heard, question)
        return starts

    def widen(
        self, engine: Engine, state: ServerState, change: Change, starts: Sequence[torch.Tensor]
    ) -> ServerState:
        """θ and φ with further experts, which start so; the old ones are copied."""
        layout, router = state.layout, state.router
        assert router is not None and state.phi is not None
        wide = engine.layout(layout.rank, layout.experts + len(starts), layout.shared)
        theta = wide.stack(
            [*layout.unstack(state.theta), *(one.to(state.theta) for one in starts)], shared_of(state)
        )
        trained, known = state.phi[0].split([router.trained.size, router.size - router.trained.size])
        grown, phi = grow_router(engine, self.teach, router.trained, trained, len(starts), change)
        router, phi = replace(grown, axes=router.axes), torch.cat([phi, known])  # what was familiar is so still
        # a new expert and its output have far to go: what earlier rounds moved by is no measure for the next ones
        return replace(state, layout=wide, theta=theta, router=router, phi=phi[None], norms={})

    # ---------------------------------------------------------------------------------- merging and closing

    def merge(self, engine: Engine, state: ServerState, change: Change) -> ServerState:
        """Two experts of which one opened in mid-run, and whose buckets lie as near to each other as those of one
        expert usually do, become one: the mean of both opens, both close."""
        pair = alike(kept_means(state), state.report["own_distances"], state.report["born"])
        if pair is None:
            return state
        signed, had, last = state.report["signed_buckets"], openers(state), state.layout.experts
        fed = examples_of(engine.members, last)
        weights = torch.tensor([float(fed[m] or signed[m]) for m in pair])
        weights /= weights.sum()
        for member in engine.members:
            member.assignment = [last if m in pair else m for m in member.assignment]
        experts = state.layout.unstack(state.theta)
        mean = sum(w * experts[m] for w, m in zip(weights.to(state.theta), pair, strict=True))
        assert isinstance(mean, torch.Tensor) and state.signatures is not None
        counts = torch.tensor([float(signed[m]) for m in pair]).to(state.signatures)
        one = (counts @ state.signatures[list(pair)] / counts.sum())[None]
        report = {
            **state.report,
            "signed_buckets": [*signed, sum(signed[m] for m in pair)],
            "born": [*state.report["born"], change.t + 1],
            "openers": [*had, had[pair[0]] if had[pair[0]] == had[pair[1]] else ""],
        }
        state = replace(state, signatures=torch.cat([state.signatures, one]), report=report)
        change.merged = list(pair)
        engine.console.say(f"before round {change.t + 1}: experts {pair[0]} and {pair[1]} are alike and become one")
        return without_experts(engine, self.widen(engine, state, change, [mean]), pair)

    def retire(self, engine: Engine, state: ServerState, change: Change) -> ServerState:
        """Experts that nobody has fed for ``living.retire`` rounds close."""
        fed = examples_of(engine.present(), state.layout.experts)
        before = [*state.report.get("idle", []), *[0] * state.layout.experts]
        idle = [0 if examples else rounds + 1 for examples, rounds in zip(fed, before, strict=False)]
        state = replace(state, report={**state.report, "idle": idle})
        gone = [m for m, rounds in enumerate(idle) if rounds > self.config.living.retire]
        if not gone or len(gone) == len(fed):
            return state
        change.retired = gone
        for m in gone:
            engine.console.say(f"before round {change.t + 1}: nobody feeds expert {m} any more; it is retired")
        return without_experts(engine, state, gone)

    def tell_unfed(self, engine: Engine, state: ServerState, change: Change) -> ServerState:
        """The operator hears once of an expert whose last rows are gone, or whose only sites are away."""
        unfed = [m for m, n in enumerate(examples_of(engine.present(), state.layout.experts)) if not n]
        known = state.report.get("unfed", [])
        if unfed == known:
            return state
        change.unfed, change.fed_again = sorted(set(unfed) - set(known)), sorted(set(known) - set(unfed))
        for m in change.unfed:
            engine.console.say(
                f"before round {change.t + 1}: nobody who is here feeds expert {m}; it stays as it is"
            )
        return replace(state, report={**state.report, "unfed": unfed})
