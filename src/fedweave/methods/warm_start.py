"""The router's warm start (ours, not the paper's): before round 1 it learns the labels a(i,c) that alignment gives.

:mod:`fedweave.router.warmstart` has the idea and the arithmetic; this is its question and its rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from fedweave.aggregation.rules import ClientAverage
from fedweave.config import Config
from fedweave.federation.admission import Receipts
from fedweave.federation.client import Client, Member
from fedweave.federation.compute import Compute
from fedweave.federation.engines.base import Engine
from fedweave.federation.message import Facts, Message
from fedweave.federation.state import read_router, router_facts
from fedweave.federation.steps import Answer, Asked, Figure, Part, Step, adam_reach
from fedweave.federation.train import ROUTER
from fedweave.router.mlp import RouterLayout
from fedweave.router.warmstart import LabelledFeatures, contrast_of, warm_start_clients


class WarmRouter(Step[tuple[torch.Tensor, int]]):
    """One round of the warm start: (Δφ, |D_i|) of a client that learned its own alignment labels."""

    name = "warm"

    def __init__(self, config: Config):
        self.config = config

    def answer(self, compute: Compute, clients: Sequence[Client], question: Message) -> Iterator[Answer]:
        facts, settings = question.facts, self.config.router.warm_start
        router, phi = read_router(facts), question.tensors["phi"].to(compute.device)
        assert router is not None
        lessons = [
            LabelledFeatures(
                client.data.features, client.example_experts(), (self.config.seed, facts["t"], client.index)
            )
            for client in clients
        ]
        deltas = warm_start_clients(router, phi, lessons, settings, facts["contrast"])
        for client, delta in zip(clients, deltas, strict=True):
            yield Answer({ROUTER: delta}, {"samples": len(client)})

    def figures(self, asked: Asked) -> dict[str, Figure]:
        return {"samples": Figure(int, 1, min(len(asked.member), self.config.federation.max_samples))}

    def parts(self, asked: Asked, figures: Facts) -> dict[str, Part]:
        router = read_router(asked.question.facts)
        assert router is not None
        return {ROUTER: Part((router.size,), limit=ROUTER)}

    def reach(self, asked: Asked, limit: str, size: int) -> tuple[float, str]:
        settings = self.config.router.warm_start
        return adam_reach(settings.steps, settings.lr, size), "the farthest that the warm start's steps can lead"

    def read(self, asked: Asked, parts: dict[str, torch.Tensor], figures: Facts) -> tuple[torch.Tensor, int]:
        return parts[ROUTER], int(figures["samples"])


def warm_up_router(
    engine: Engine, step: WarmRouter, router: RouterLayout, phi: torch.Tensor, receipts: Receipts
) -> torch.Tensor:
    """φ⁰ [Q]: local steps and a sample-weighted average, a few times over; as it came where it is switched off."""
    settings = step.config.router.warm_start
    if not settings.enabled or router.experts < 2:
        return phi
    contrast, pupils = _pupils(engine.members, router.experts, settings.contrast)
    progress = engine.console.progress("router warm start", settings.rounds * len(pupils), "client rounds")
    for t in range(settings.rounds):
        question = Message({"phi": phi}, {"t": t, "contrast": contrast, **router_facts(router)})
        average, heard = ClientAverage(router.size, phi.device), Receipts(bytes_up=receipts.bytes_up)
        for _, (delta, samples) in engine.ask(step, pupils, question, heard):
            average.add(delta, samples)
            progress.advance()
        phi = phi + average.step()
    progress.close()
    return phi


def _pupils(members: Sequence[Member], experts: int, asked: str) -> tuple[str, list[Member]]:
    """Over which experts the warm start runs, and the clients that have something to tell apart."""
    contrast = contrast_of([member.assignment for member in members], experts, asked)
    return contrast, [m for m in members if contrast == "all" or len(set(m.assignment)) > 1]
