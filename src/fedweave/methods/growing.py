"""The router grows by an output for every expert that opens, without forgetting.

Only new outputs learn, and all else stays as it was to the bit: between two old experts every prompt goes where it
went before. As in the warm start those teach who can tell something apart, here the new kind from others of their
rows. Who has none of it would only teach that it is never right, and together with a few who have it that is what
the mean would learn (docs/living.md); only where nobody has both does everybody teach.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from fedweave.aggregation.robust import client_average
from fedweave.aggregation.standing import Standing
from fedweave.config import Config
from fedweave.federation.admission import Receipts
from fedweave.federation.client import Client
from fedweave.federation.compute import Compute
from fedweave.federation.engines.base import Engine
from fedweave.federation.message import Facts, Message
from fedweave.federation.news import Change
from fedweave.federation.state import read_router, router_facts
from fedweave.federation.steps import Answer, Asked, Part
from fedweave.federation.train import ROUTER
from fedweave.methods.warm_start import WarmRouter, lessons, warm_start_clients
from fedweave.router.mlp import RouterLayout

# One output on fixed features is a convex problem: fewer and longer turns than the warm start's lead as far, and
# the router travels less often.
_LONGER = 3


class GrowRouter(WarmRouter):
    """A round of the warm start in which the outputs from ``first`` on learn, and nothing else leaves."""

    name = "grow"

    def __init__(self, config: Config):
        super().__init__(config)
        warm, turns = config.router.warm_start, config.living.turns
        turns = -(-warm.rounds // _LONGER) if turns == "auto" else turns
        self.settings = replace(warm, rounds=turns, steps=_LONGER * warm.steps)

    def answer(self, compute: Compute, clients: Sequence[Client], question: Message) -> Iterator[Answer]:
        router, phi = read_router(question.facts), question.tensors["phi"].to(compute.device)
        first = question.facts["first"]
        taught = lessons(clients, "grow", self.config.seed, question.facts["t"], question.facts["turn"])
        deltas = warm_start_clients(router, phi, taught, self.settings, "own", first)
        for client, delta in zip(clients, deltas[:, router.outputs(first).to(deltas.device)], strict=True):
            yield Answer({ROUTER: delta}, {"samples": len(client)})

    def parts(self, asked: Asked, figures: Facts) -> dict[str, Part]:
        facts = asked.question.facts
        return {ROUTER: Part((len(read_router(facts).outputs(facts["first"])),), limit=ROUTER)}


def grow_router(
    engine: Engine, step: GrowRouter, router: RouterLayout, phi: torch.Tensor, more: int, change: Change
) -> tuple[RouterLayout, torch.Tensor]:
    """(router, φ [Q]) with so many more outputs, which the clients have taught."""
    first, settings, standing = router.experts, step.settings, Standing(engine.members, step.config)
    router, phi = router.grown(phi, more)
    if not settings.enabled:
        return router, phi
    here, columns = engine.present(), router.outputs(first).to(phi.device)
    owned = {member.index: {m for m in member.assignment if m >= 0} for member in here}
    able = [member for member in here if max(owned[member.index]) >= first and len(owned[member.index]) > 1]
    pupils = able or here
    progress = engine.console.progress("router grows", settings.rounds * len(pupils), "client rounds")
    for turn in range(settings.rounds):
        question = Message({"phi": phi}, {"t": change.t, "turn": turn, "first": first, **router_facts(router)})
        average, heard = client_average(len(columns), phi.device, step.config, standing), Receipts()
        for member, (delta, samples) in engine.ask(step, pupils, question, heard):
            average.add(delta, samples, member.index)
            progress.advance()
        standing.hear([average])
        phi = phi.index_add(0, columns, average.step())
        change.heard(heard, question)
    progress.close()
    return router, phi
