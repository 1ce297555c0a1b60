"""Labels by the router (ours, not the paper's): experts train on what they will be asked.

A bucket is as pure as a client's clustering; the warmed-up router, which has learned from all clients' buckets,
sorts single prompts better, and at inference it is the router that sends them. So every example belongs to the
expert that the router picks. An expert that hardly anybody is sent to is dropped; its prompts go to the next best.
"""

from collections.abc import Iterator, Sequence

import torch

from fedweave.aggregation.robust import believed
from fedweave.config import Config
from fedweave.federation.admission import Receipts
from fedweave.federation.client import Client
from fedweave.federation.compute import Compute
from fedweave.federation.engines.base import Engine
from fedweave.federation.message import Facts, Message, Refused
from fedweave.federation.state import read_router, router_facts
from fedweave.federation.steps import Answer, Asked, Figure, Part, Step
from fedweave.router.mlp import RouterLayout

# What the router makes of a client's examples: those that it sends to each expert, [M], and every bucket's expert
Labels = tuple[torch.Tensor, list[int]]


def picked(router: RouterLayout, phi: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """[n] the expert of every prompt; phi [Q], features [n, d]."""
    return router.choose(phi, features.to(phi)).cpu()


class Relabel(Step[Labels]):
    """How many of your examples does this router send to each expert?"""

    name = "relabel"

    def __init__(self, config: Config):
        self.config = config
        # client -> (phi, features, labels)
        self._latest: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def labels(self, router: RouterLayout, phi: torch.Tensor, client: Client) -> torch.Tensor:
        """[n] what :func:`picked` says of a client's prompts; a round asks several times, and a router that is not
        trained says the same in every round."""
        known = self._latest.get(client.index)
        if known is None or known[0] is not phi or known[1] is not client.data.features:
            labels = picked(router, phi[0], client.data.features)
            known = self._latest[client.index] = phi, client.data.features, labels
        return known[2]

    def answer(self, compute: Compute, clients: Sequence[Client], question: Message) -> Iterator[Answer]:
        router, phi = read_router(question.facts), question.tensors["phi"].to(compute.device)
        for client in clients:
            labels = picked(router, phi, client.data.features)
            every = [torch.bincount(labels[bucket], minlength=router.experts) for bucket in client.buckets]
            counts = torch.bincount(labels[client.rows], minlength=router.experts)  # of rows that have an expert
            yield Answer(figures={"counts": counts.tolist(), "experts": [int(own.argmax()) for own in every]})

    def figures(self, asked: Asked) -> dict[str, Figure]:
        m, buckets = read_router(asked.question.facts).experts, len(asked.member.assignment)
        return {
            "counts": Figure(int, 0, len(asked.member), (m, m), summed=True),
            "experts": Figure(int, 0, m - 1, (buckets, buckets)),
        }

    def parts(self, asked: Asked, figures: Facts) -> dict[str, Part]:
        if sum(figures["counts"]) > len(asked.member):
            raise Refused("it counts more prompts than it has")
        return {}

    def read(self, asked: Asked, parts: dict[str, torch.Tensor], figures: Facts) -> Labels:
        return torch.tensor(figures["counts"]), [int(m) for m in figures["experts"]]


def relabel(
    engine: Engine, step: Relabel, router: RouterLayout, phi: torch.Tensor, receipts: Receipts
) -> tuple[RouterLayout, torch.Tensor, dict[str, list[int]]]:
    """(router and φ [Q] over the experts that stay, what discovery.json says of it). Members get their buckets'
    experts by the router; a member that does not answer takes no part."""
    counts = _ask(engine, step, router, phi, receipts)
    few = counts < step.config.experts.min_share * counts.sum()
    few[counts.argmax()] = False
    kept = (~few).nonzero()[:, 0].tolist()
    report = {"router_examples": counts.tolist(), "dropped_experts": few.nonzero()[:, 0].tolist()}
    if len(kept) < router.experts:
        router, phi = router.narrowed(phi, kept)
        report["router_examples"] = _ask(engine, step, router, phi, receipts).tolist()
    return router, phi, report


def _ask(
    engine: Engine, step: Relabel, router: RouterLayout, phi: torch.Tensor, receipts: Receipts
) -> torch.Tensor:
    """[M] examples of each expert, over all clients."""
    heard, total = Receipts(bytes_up=receipts.bytes_up), torch.zeros(router.experts, dtype=torch.long)
    question = Message({"phi": phi}, router_facts(router))
    part = believed({member.index: len(member) for member in engine.members}, step.config)
    for member, (counts, experts) in engine.ask(step, engine.members, question, heard):
        member.assignment = experts
        total += (part[member.index] * counts).round().long()
    engine.only(heard.accepted)
    return total
