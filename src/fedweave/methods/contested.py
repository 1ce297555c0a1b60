"""Contested prompts (ours, not the paper's): of experts that no prompt tells apart, the one of most clients stays.

Signatures see answers, the router sees prompts alone. Clients that give other answers to the same prompts form an
expert of their own, on which they agree with each other, and to which of the two the router sends these prompts is
chance: hostile ones would answer for everybody. With ``federation.contested=close``, where the rule leaves hostile
clients out (``agreement``), one question after the warm start tells where the router sends every bucket. If it
sends most clients' buckets of an expert to another, only one of the two will be asked; the other closes, and its
buckets take no part. Each client has one vote, however many examples it says it has. A client with buckets of both
has told them apart by prompts: with many such it is the router that is spoilt, and both stay.
"""

from collections import Counter, defaultdict

import torch

from fedweave.aggregation.robust import chosen_rule
from fedweave.config import Config
from fedweave.federation.admission import Receipts
from fedweave.federation.engines.base import Engine
from fedweave.federation.message import Message
from fedweave.federation.state import router_facts
from fedweave.methods.relabel import Relabel
from fedweave.router.mlp import RouterLayout


def contests(config: Config) -> bool:
    """Whether it is asked. With labels by the router both feed one expert; with privacy no client tells where its
    prompts go; and where kinds are noticed in mid-run, buckets without an expert would open theirs again."""
    asked = config.federation.contested == "close" and chosen_rule(config) == "agreement"
    plain = config.experts.labels == "buckets" and config.privacy.level == "none" and config.living.notice == "off"
    return asked and plain and config.router.warm_start.enabled


def contested(
    engine: Engine, step: Relabel, router: RouterLayout, phi: torch.Tensor, receipts: Receipts
) -> list[int]:
    """The experts that close. Who does not answer has no vote."""
    votes: defaultdict[int, Counter[int]] = defaultdict(Counter)  # expert -> where its clients' prompts go
    question, heard = Message({"phi": phi}, router_facts(router)), Receipts(bytes_up=receipts.bytes_up)
    for member, (_, picks) in engine.ask(step, engine.members, question, heard):
        sent: defaultdict[int, Counter[int]] = defaultdict(Counter)
        for m, pick, size in zip(member.assignment, picks, member.sizes, strict=True):
            sent[m][pick] += size
        for m, goes in sent.items():
            votes[m][goes.most_common(1)[0][0]] += 1
    owned = [set(member.assignment) for member in engine.members]
    clients, closed = Counter(m for own in owned for m in own), set()
    for m, said in votes.items():
        pick, agreed = said.most_common(1)[0]
        both = sum({m, pick} <= own for own in owned)
        if pick != m and 2 * agreed > said.total() and 2 * both < min(clients[m], clients[pick]):
            closed.add(m if clients[m] <= clients[pick] else pick)  # of two alike the one that is asked stays
    return sorted(closed)


def close(engine: Engine, closed: list[int], experts: int) -> list[int]:
    """The experts that stay. Buckets of the others have none, and the operator is told whose they are."""
    kept = [m for m in range(experts) if m not in closed]
    for m in closed:
        names = ", ".join(member.name for member in engine.members if m in member.assignment)
        engine.console.warn(
            f"expert {m} of {names} closes: the router cannot tell its prompts from those of an expert that more "
            "clients have. These buckets take no part."
        )
    place = {m: i for i, m in enumerate(kept)}
    for member in engine.members:
        member.assignment = [place.get(m, -1) for m in member.assignment]
    return kept
