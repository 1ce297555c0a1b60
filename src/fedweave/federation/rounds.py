"""Algorithm 1 of the paper, on one page.

Lines 1 to 6 (discovery, alignment, initialisation) are a method's ``prepare``; this is the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from fedweave.config import Config
from fedweave.errors import UserError
from fedweave.experts.dropout import stream_key
from fedweave.federation.agreement import Agreement
from fedweave.federation.client import Client, Update
from fedweave.federation.engine import InProcessEngine
from fedweave.federation.traffic import Traffic
from fedweave.methods.base import Method, ServerState


@dataclass
class RoundReport:
    """What a finished round leaves behind: figures, not vectors, so that memory does not grow with the clients."""

    t: int
    participants: list[Client]
    agreement: Agreement
    traffic: Traffic
    losses: list[float] = field(default_factory=list)  # mean step loss of each
    tokens: int = 0

    @property
    def train_loss(self) -> float:
        return float(np.mean(self.losses))

    def watch(self, updates: Iterator[Update]) -> Iterator[Update]:
        """Note every update's figures, and refuse a NaN before it reaches the server's state."""
        for update in updates:
            parts = [part for part in (update.delta_theta, update.delta_phi) if part is not None]
            if not all(torch.isfinite(part).all() for part in parts):
                name = next(c.name for c in self.participants if c.index == update.client)
                raise UserError(
                    f"client {name!r} returned an update with NaN or infinity in round {self.t + 1}; start a new "
                    "run with a lower training.lr or router.lr. The last checkpoint is intact."
                )
            self.losses.append(float(np.mean(update.losses)))
            self.tokens += update.tokens
            self.agreement.add(update)
            self.traffic.add(update)
            yield update


def federate(
    method: Method,
    engine: InProcessEngine,
    state: ServerState,
    rounds: range,
    after_round: Callable[[ServerState, RoundReport], None],
) -> ServerState:
    """Lines 7 to 15. ``after_round`` validates and saves; a run that resumes starts at a later round."""
    for t in rounds:
        participants = sample_clients(engine.clients, method.config, t)  # line 8: S_t
        traffic = Traffic(state, method.travelling(state.layout))
        report = RoundReport(t, participants, Agreement(state.layout), traffic)
        updates = method.local_updates(engine, state, participants, t)  # lines 9-13
        state = method.aggregate(state, report.watch(updates))  # line 14
        after_round(state, report)
    return state


def sample_clients(clients: list[Client], config: Config, t: int) -> list[Client]:
    """S_t: all clients, or a fraction or a count of them, drawn anew each round."""
    asked = config.training.participation
    count = round(asked * len(clients)) if asked <= 1 else int(asked)
    count = min(max(1, count), len(clients))
    rng = np.random.default_rng(stream_key("participants", config.seed, t))
    chosen = sorted(rng.permutation(len(clients))[:count])
    return [clients[i] for i in chosen]
