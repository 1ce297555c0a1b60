"""The question of a round (lines 9 to 13): train the broadcast model on your data, and send what you learned.

A reply holds what the method shares and nothing else: ``expert.m`` where n(i,m) > 0, ``shared`` where experts share
a part, and ``router`` where it is trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedweave.federation.client import OWN, Client
from fedweave.federation.message import Facts, Message, Refused
from fedweave.federation.state import received
from fedweave.federation.steps import FIGURE, MOST_LOSS, Answer, Asked, Figure, Part, Summed, adam_reach
from fedweave.router.mlp import RouterLayout

if TYPE_CHECKING:
    from fedweave.experts.layout import AdapterLayout
    from fedweave.federation.compute import Compute
    from fedweave.federation.method import Method

EXPERTS, ROUTER = "experts", "router"  # the two limits on norms
TOGETHER = -1  # the client of an update that is all clients'
SHARED = "shared"  # the part of θ that belongs to all experts


def expert_name(m: int) -> str:
    return f"expert.{m}"


@dataclass
class Update:
    """What a client learned in a round, before it is packed and after it is unpacked."""

    client: int
    delta_theta: torch.Tensor  # [P]
    counts: torch.Tensor  # [M] n(i,m); zero means: that expert's part is not uploaded
    delta_phi: torch.Tensor | None  # [Q]
    samples: int  # |D_i|
    losses: list[float]  # of every local step
    tokens: int


class Train(Summed[Update]):
    name = "train"

    def __init__(self, method: Method):
        self.method, self.config = method, method.config
        self._columns: tuple[AdapterLayout, torch.device, int, dict[str, torch.Tensor]] | None = None

    def said(self, t: int) -> str:
        return f"round {t + 1}"

    # ---------------------------------------------------------------------------------- client side

    def answer(self, compute: Compute, clients: Sequence[Client], question: Message) -> Iterator[Answer]:
        state, t = received(question, compute.layers, compute.device), question.facts["t"]
        router = (ROUTER, state.router.trained.size) if state.router is not None else None
        for client in clients:
            client.memory.begin(t, state.pace, router)
        shared = self.method.shared(state.layout, t)
        updates = self.method.local_updates(compute, state, clients, t)
        for client, update in zip(clients, updates, strict=True):
            own = client.memory.get(OWN)
            if shared is not None and own is not None:  # what it has for itself moves, and stays
                at_home = torch.where(shared.to(update.delta_theta.device), 0.0, update.delta_theta)
                # a client that has diverged is refused, and goes on from where it was
                at_home = at_home if torch.isfinite(at_home).all() else torch.zeros_like(at_home)
                client.memory.keep(OWN, own + at_home)
            columns = self.columns(state.layout, compute.device, t)
            parts = {name: update.delta_theta[columns[name]] for name in _sent(columns, update.counts.tolist())}
            if update.delta_phi is not None:
                parts[ROUTER] = update.delta_phi
            yield Answer(parts, {
                "counts": update.counts.tolist(), "samples": update.samples, "losses": update.losses,
                "tokens": update.tokens,
            })  # fmt: skip

    def columns(self, layout: AdapterLayout, device: torch.device, t: int) -> dict[str, torch.Tensor]:
        """For every part of θ, the experts' and the shared one, its columns that travel in round t."""
        if self._columns is None or self._columns[0] is not layout or self._columns[1:3] != (device, t):
            shared = self.method.shared(layout, t)
            owner = layout.expert_of_column
            owner = (owner if shared is None else owner.where(shared.cpu(), -1)).to(device)
            names = [*(expert_name(m) for m in range(layout.experts)), *([SHARED] if layout.shared else [])]
            found = {name: (owner == m).nonzero()[:, 0] for m, name in enumerate(names)}
            self._columns = (layout, device, t, found)
        return self._columns[3]

    # ---------------------------------------------------------------------------------- server side

    def figures(self, asked: Asked) -> dict[str, Figure]:
        examples = min(len(asked.member), self.config.federation.max_samples)
        experts, least = asked.question.facts["experts"], 1 if self.config.privacy.level == "none" else 0
        return {
            "samples": Figure(int, 1, examples, examples=True),
            "counts": Figure(int, 0, examples, (experts, experts), summed=True, examples=True),
            "losses": Figure(float, -MOST_LOSS, MOST_LOSS, (least, 1_000_000), veil=[]),
            "tokens": Figure(int, 0, 2**53, veil=0),
        }

    def parts(self, asked: Asked, figures: Facts) -> dict[str, Part]:
        counts, samples = figures["counts"], figures["samples"]
        if not any(counts):
            raise Refused("it has examples for no expert")
        if max(counts) > samples:
            raise Refused(f"it claims more of its {samples} examples for an expert than it has")
        for m, (count, most) in enumerate(zip(counts, self.method.claims(asked.member, len(counts)), strict=True)):
            if count > most:
                raise Refused(f"it claims {count:g} examples for expert {m}, where its buckets have {most}")
        if sum(counts) > samples and not self.method.every_expert:
            raise Refused(f"it claims {sum(counts):g} examples for all experts, and has {samples}")
        state = received(asked.question, asked.layers, asked.question.tensors["theta"].device)
        t = asked.question.facts["t"]
        columns, turn = self.columns(state.layout, state.theta.device, t), self.method.turn(t)
        parts = {
            name: Part((len(columns[name]),), rounded=True, turn=turn, limit=EXPERTS)
            for name in _sent(columns, counts)
        }
        if state.router is not None and self.method.trains_router:
            parts[ROUTER] = Part((state.router.trained.size,), rounded=True, limit=ROUTER)
        return parts

    def reach(self, asked: Asked, limit: str, size: int) -> tuple[float, str]:
        training = self.config.training
        rate = self.config.router.lr if limit == ROUTER else training.lr
        steps = self.method.local_steps(asked.member)
        reach = adam_reach(steps, rate, size)
        if training.weight_decay:
            away = float(asked.question.tensors["theta"].norm()) + reach
            reach += steps * rate * training.weight_decay * away
        return reach, "the farthest that the round's steps can lead"

    def read(self, asked: Asked, parts: dict[str, torch.Tensor], figures: Facts) -> Update:
        """Parts back in their places; a column that did not travel is zero."""
        theta = asked.question.tensors["theta"]
        layout = received(asked.question, asked.layers, theta.device).layout
        delta = torch.zeros(layout.size, device=theta.device)
        for name, columns in self.columns(layout, theta.device, asked.question.facts["t"]).items():
            if (part := parts.get(name)) is not None:
                delta[columns] = part
        counts = torch.tensor(figures["counts"], dtype=torch.float32)
        samples, tokens = int(figures["samples"]), int(figures["tokens"])
        return Update(asked.member.index, delta, counts, parts.get(ROUTER), samples, figures["losses"], tokens)

    # ---------------------------------------------------------------------------------- a sum of all

    def totals(self, asked: Asked) -> dict[str, tuple[int, ...]]:
        state = received(asked.question, asked.layers, asked.question.tensors["theta"].device)
        columns = self.columns(state.layout, state.theta.device, asked.question.facts["t"])
        shapes: dict[str, tuple[int, ...]] = {name: (len(own),) for name, own in columns.items()}
        if state.router is not None and self.method.trains_router:
            shapes[ROUTER] = (state.router.trained.size,)
        ones = dict.fromkeys((f"{FIGURE}samples", f"{FIGURE}loss", f"{FIGURE}tokens"), (1,))
        return shapes | {f"{FIGURE}counts": (state.layout.experts,), **ones}

    def summands(self, asked: Asked, answer: Answer) -> dict[str, torch.Tensor]:
        counts, samples, losses = (answer.figures[name] for name in ("counts", "samples", "losses"))
        weights = {expert_name(m): count for m, count in enumerate(counts)}
        figures = {"counts": counts, "samples": [samples], "tokens": [answer.figures["tokens"]],
                   "loss": [sum(losses) / len(losses) if losses else 0.0]}  # fmt: skip
        return {name: values.double() * weights.get(name, samples) for name, values in answer.parts.items()} | {
            FIGURE + name: torch.tensor(values, dtype=torch.float64) for name, values in figures.items()
        }

    def read_total(self, asked: Asked, totals: dict[str, torch.Tensor], clients: int) -> Update:
        theta = asked.question.tensors["theta"]
        layout = received(asked.question, asked.layers, theta.device).layout
        counts, samples = totals[f"{FIGURE}counts"].round(), float(totals[f"{FIGURE}samples"].round())
        if samples < clients or (counts < 0).any() or (counts > samples).any():
            raise Refused("its counts are of no examples")
        weights = {expert_name(m): float(count) for m, count in enumerate(counts)}
        delta = torch.zeros(layout.size, device=theta.device)
        for name, columns in self.columns(layout, theta.device, asked.question.facts["t"]).items():
            if weight := weights.get(name, samples):
                delta[columns] = (totals[name] / weight).to(delta)
        phi = (totals[ROUTER] / samples).to(delta) if ROUTER in totals else None
        if self.config.privacy.level != "client":
            self.check_mean(asked, EXPERTS, delta)
            if phi is not None:
                self.check_mean(asked, ROUTER, phi)
        told = [] if self.config.privacy.level != "none" else [float(totals[f"{FIGURE}loss"]) / clients]
        tokens = int(totals[f"{FIGURE}tokens"].round())
        return Update(TOGETHER, delta, counts.float(), phi, int(samples), told, tokens)

    def broadcast_size(self, layout: AdapterLayout, router: RouterLayout | None, t: int) -> int:
        """Bytes that a participant needs of round t's broadcast: the columns that the server may have moved since
        the round before, and one router; what it knows of familiar prompts stands still."""
        moved = self.method.moved(layout, t)
        columns = layout.size if moved is None else int(moved.sum())
        return 4 * (columns + (router.trained.size if router else 0))


def _sent(columns: dict[str, torch.Tensor], counts: Sequence[float]) -> list[str]:
    """The parts of θ that a client with these n(i,m) sends: its experts', and always the shared one."""
    counted = {expert_name(m): count for m, count in enumerate(counts)}
    return [name for name, own in columns.items() if len(own) and counted.get(name, 1) > 0]
