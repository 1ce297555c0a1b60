"""The router's warm start (ours, not the paper's): before round 1 it learns the labels a(i,c) that alignment gives.

Each client trains on its own (feature, expert) pairs, the server averages, a few times over. No backbone
pass, no task label, and nothing leaves a client that a training round would not send anyway.

A client that has examples of two experts out of four knows how to tell these two apart and nothing about the
others. So its softmax runs over those two alone (as in FedRS, Li and Zhan, 2021): over all four it would learn that
the others are never right, and every client that lacks an expert would unlearn what its owners teach. A client of
one expert has nothing to tell apart and is not asked. That needs clients whose experts overlap: where some experts
are linked by no chain of clients, everybody learns over all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from fedweave.aggregation.robust import client_average
from fedweave.aggregation.standing import Standing, by_output
from fedweave.config import Config
from fedweave.config_method import WarmStartConfig
from fedweave.federation.admission import Receipts
from fedweave.federation.client import Client
from fedweave.federation.compute import Compute
from fedweave.federation.engines.base import Engine
from fedweave.federation.message import Facts, Message, Refused
from fedweave.federation.private import shield_of
from fedweave.federation.state import read_router, router_facts
from fedweave.federation.steps import FIGURE, Answer, Asked, Figure, Part, Summed, adam_reach
from fedweave.federation.train import ROUTER
from fedweave.router.mlp import RouterLayout
from fedweave.streams import stream_key
from fedweave.training.batch import Shield
from fedweave.training.private import noised
from fedweave.training.schedule import drawn_schedule


class WarmRouter(Summed[tuple[torch.Tensor, int]]):
    """One round of the warm start: (Δφ, |D_i|) of a client that learned its own alignment labels."""

    name = "warm"

    def __init__(self, config: Config):
        self.config, self.settings = config, config.router.warm_start

    def answer(self, compute: Compute, clients: Sequence[Client], question: Message) -> Iterator[Answer]:
        facts, settings = question.facts, self.settings
        router, phi = read_router(facts), question.tensors["phi"].to(compute.device)
        taught = lessons(clients, self.config.seed, facts["t"])
        taught = [
            replace(lesson, shield=self._shield(client, settings.batch_size, lesson.key))
            for client, lesson in zip(clients, taught, strict=True)
        ]
        deltas = warm_start_clients(router, phi, taught, settings, facts["contrast"])
        for client, delta in zip(clients, deltas, strict=True):
            yield Answer({ROUTER: delta}, {"samples": len(client)})

    def _shield(self, client: Client, batch: int, key: tuple[int | str, ...]) -> Shield | None:
        private = self.config.privacy.level == "example"
        return shield_of(self.config, client, self.name, batch, key) if private else None

    def figures(self, asked: Asked) -> dict[str, Figure]:
        most = min(len(asked.member), self.config.federation.max_samples)
        return {"samples": Figure(int, 1, most, examples=True)}

    def parts(self, asked: Asked, figures: Facts) -> dict[str, Part]:
        return {ROUTER: Part((read_router(asked.question.facts).size,), limit=ROUTER)}

    def reach(self, asked: Asked, limit: str, size: int) -> tuple[float, str]:
        settings = self.settings
        return adam_reach(settings.steps, settings.lr, size), "the farthest that the warm start's steps can lead"

    def totals(self, asked: Asked) -> dict[str, tuple[int, ...]]:
        return {ROUTER: (read_router(asked.question.facts).size,), f"{FIGURE}samples": (1,)}

    def summands(self, asked: Asked, answer: Answer) -> dict[str, torch.Tensor]:
        samples = torch.tensor([float(answer.figures["samples"])])
        return {
            ROUTER: answer.parts[ROUTER].double() * samples.to(answer.parts[ROUTER]),
            f"{FIGURE}samples": samples,
        }

    def read_total(self, asked: Asked, totals: dict[str, torch.Tensor], clients: int) -> tuple[torch.Tensor, int]:
        samples = round(float(totals[f"{FIGURE}samples"]))
        mean = (totals[ROUTER] / max(1, samples)).float().to(asked.question.tensors["phi"].device)
        if samples < clients:
            raise Refused("its counts are of no examples")
        if self.config.privacy.level != "client":
            self.check_mean(asked, ROUTER, mean)
        return mean, samples

    def read(self, asked: Asked, parts: dict[str, torch.Tensor], figures: Facts) -> tuple[torch.Tensor, int]:
        return parts[ROUTER], int(figures["samples"])


def warm_up_router(
    engine: Engine,
    step: WarmRouter,
    router: RouterLayout,
    phi: torch.Tensor,
    receipts: Receipts,
    standing: Standing,
    known: bool = False,
) -> torch.Tensor:
    """φ⁰ [Q]: local steps and a sample-weighted average, a few times over; as it came where it is switched off.
    ``known`` says that standing is known from better evidence than that of routers, and is not to change."""
    settings = step.settings
    if not settings.enabled or router.experts < 2:
        return phi
    progress = engine.console.progress("router warm start", settings.rounds, "averages")
    for t in range(settings.rounds):
        contrast, pupils = _class(engine, step.config, standing)
        if known:
            pupils = [member for member in pupils if member.index in standing]
        question = Message({"phi": phi}, {"t": t, "contrast": contrast, **router_facts(router)})
        average, heard = (
            client_average(router.size, phi.device, step.config, standing),
            Receipts(bytes_up=receipts.bytes_up),
        )
        for member, (delta, samples) in engine.ask(step, pupils, question, heard):
            average.add(delta, samples, member.index)
        if not known:
            standing.hear(by_output(average, router, engine.members), turn=t)
        phi = phi + average.step()
        progress.advance()
    progress.close()
    return phi


def _class(engine: Engine, config: Config, standing: Standing) -> tuple[str, list[Any]]:
    """(contrast, who learns). Who counts nothing links no experts: what only hostile clients tell apart nobody
    would learn. An expert that nobody else has needs no link."""
    asked = config.router.warm_start.contrast
    believed = [member.assignment for member in engine.members if member.index in standing]
    contrast = contrast_of(believed, asked)
    # who can tell something apart
    own = [(member, {m for m in member.assignment if m >= 0}) for member in engine.members]
    pupils = [member for member, experts in own if len(experts) > (contrast != "all")]
    if config.federation.secure_aggregation and len(pupils) < 3:  # of so few no sum is opened
        return "all", list(engine.members)
    return contrast, pupils


@dataclass
class LabelledFeatures:
    """What one client's router learns from."""

    features: torch.Tensor  # [n, d]
    experts: torch.Tensor  # [n] a(i,c) of every example's bucket
    key: tuple[int | str, ...]  # names this client and round
    shield: Shield | None = None  # of its single examples; all clients have one or none has


def lessons(clients: Sequence[Client], *key: int | str) -> list[LabelledFeatures]:
    """Every client's examples that have an expert."""
    taught = []
    for client in clients:
        rows = client.rows
        features, experts = client.data.features[rows], client.example_experts()[rows]
        taught.append(LabelledFeatures(features, experts, (*key, client.index)))
    return taught


def contrast_of(assignments: Sequence[Sequence[int]], asked: str = "auto") -> str:
    """Over which experts clients learn: own where clients with several link every expert that one of them has to
    every other, or all."""
    if asked != "auto":
        return asked
    linked = [{m} for m in sorted({m for own in assignments for m in own if m >= 0})]
    for own in map(set, assignments):
        if touched := [group for group in linked if group & own]:
            linked = [group for group in linked if not group & own] + [set().union(*touched)]
    return "own" if len(linked) == 1 else "all"


def warm_start_clients(
    layout: RouterLayout,
    phi: torch.Tensor,  # [Q] broadcast state
    clients: Sequence[LabelledFeatures],
    config: WarmStartConfig,
    contrast: str,  # own or all
    first: int | None = None,  # only the outputs from this one on learn, and everybody has them for a contrast
) -> torch.Tensor:
    """Δφ [K, Q] of K clients, each after ``config.steps`` steps of cross-entropy on its own alignment labels. They
    march together: everything is a row of its own, so none sees the others."""
    device, count = phi.device, len(clients)
    features = torch.cat([p.features for p in clients]).to(device)
    experts = torch.cat([p.experts for p in clients]).to(device)
    shields = [p.shield for p in clients if p.shield is not None]
    index, weight = _drawn(clients, config.steps) if shields else _batches(clients, config)
    absent = None
    if contrast == "own":
        own = [torch.bincount(p.experts, minlength=layout.experts) for p in clients]
        absent = (torch.stack(own) == 0)[:, None].to(device)  # [K, 1, M]
        absent[..., first if first is not None else layout.experts :] = False
    frozen = torch.ones(layout.size, dtype=torch.bool, device=device)
    frozen[layout.outputs(first or 0).to(device)] = False
    local = phi.repeat(count, 1).requires_grad_()  # [K, Q]
    optimiser = torch.optim.AdamW([local], lr=config.lr, weight_decay=0.0)
    for step, (rows, share) in enumerate(zip(index.to(device), weight.to(device), strict=True)):  # [K, b]
        logits = layout.logits(layout.views(local), features[rows])  # [K, b, M]
        if absent is not None:
            logits = logits.masked_fill(absent, float("-inf"))
        if shields:
            with torch.no_grad():
                errors = logits.softmax(-1) - F.one_hot(experts[rows], layout.experts)
                norms = layout.gradient_norms(layout.views(local), features[rows], errors)
                share = share * (shields[0].clip / (norms + 1e-6)).clamp(max=1.0)
        losses = F.cross_entropy(logits.flatten(0, 1), experts[rows].flatten(), reduction="none").view_as(share)
        optimiser.zero_grad()
        (losses * share).sum().backward()
        if shields and local.grad is not None:
            local.grad = noised(local.grad, shields, step, "phi")
        if first is not None and local.grad is not None:
            local.grad[:, frozen] = 0.0
        optimiser.step()
    return local.detach() - phi


def _drawn(clients: Sequence[LabelledFeatures], steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`_batches`, where every example is drawn by itself, and has weight 1."""
    firsts = np.cumsum([0, *(len(p.features) for p in clients)])
    drawn = []
    for p in clients:
        assert p.shield is not None
        count = len(p.features)
        drawn.append(drawn_schedule(np.arange(count), steps, p.shield.expected / count, p.shield.key))
    widest = max(1, *(len(batch) for own in drawn for batch in own))
    index = np.repeat(firsts[None, :-1, None], steps, 0).repeat(widest, 2)  # [steps, K, widest]
    weight = np.zeros(index.shape, dtype=np.float32)
    for k, own in enumerate(drawn):
        for step, batch in enumerate(own):
            index[step, k, : len(batch)] += batch
            weight[step, k, : len(batch)] = 1.0
    return torch.from_numpy(index), torch.from_numpy(weight)


def _batches(clients: Sequence[LabelledFeatures], config: WarmStartConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of all steps [steps, K, b] in the joined features, and their weights: a small client's batch is filled
    up with its first row, of weight 0."""
    sizes = [len(p.features) for p in clients]
    widest = min(config.batch_size, max(sizes))
    index = np.zeros((config.steps, len(sizes), widest), dtype=np.int64)
    weight = np.zeros(index.shape, dtype=np.float32)
    first = 0
    for k, (size, key) in enumerate(zip(sizes, [p.key for p in clients], strict=True)):
        rng, batch = np.random.default_rng(stream_key("warm-start", *key)), min(size, widest)
        index[:, k] = first
        for step in range(config.steps):
            index[step, k, :batch] = first + rng.permutation(size)[:batch]
        weight[:, k, :batch] = 1 / batch
        first += size
    return torch.from_numpy(index), torch.from_numpy(weight)
