"""Algorithm 1 of the paper, on one page.

Lines 1 to 6 (discovery, alignment, initialisation) are a method's ``prepare``; this is the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from fedweave.config import Config
from fedweave.errors import UserError
from fedweave.experts.dropout import stream_key
from fedweave.federation.client import Client, Update
from fedweave.federation.engine import InProcessEngine
from fedweave.methods.base import Method, ServerState


@dataclass
class RoundReport:
    """What a finished round leaves behind."""

    t: int
    participants: list[str]
    train_loss: float  # mean over participants of their mean step loss
    tokens: int


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
        received: list[Update] = []
        updates = method.local_updates(engine, state, participants, t)  # lines 9-13
        state = method.aggregate(state, _finite(updates, participants, received))  # line 14
        losses = [float(np.mean(u.losses)) for u in received]
        after_round(
            state,
            RoundReport(t, [c.name for c in participants], float(np.mean(losses)), sum(u.tokens for u in received)),
        )
    return state


def sample_clients(clients: list[Client], config: Config, t: int) -> list[Client]:
    """S_t: all clients, or a fraction or a count of them, drawn anew each round."""
    asked = config.training.participation
    count = round(asked * len(clients)) if asked <= 1 else int(asked)
    count = min(max(1, count), len(clients))
    rng = np.random.default_rng(stream_key("participants", config.seed, t))
    chosen = sorted(rng.permutation(len(clients))[:count])
    return [clients[i] for i in chosen]


def _finite(updates: Iterator[Update], participants: list[Client], received: list[Update]) -> Iterator[Update]:
    """Refuse a NaN before it reaches the server's state; what was saved so far stays good."""
    for update in updates:
        parts = [update.delta_theta] if update.delta_phi is None else [update.delta_theta, update.delta_phi]
        if not all(torch.isfinite(part).all() for part in parts):
            name = next(c.name for c in participants if c.index == update.client)
            raise UserError(
                f"client {name!r} returned an update with NaN or infinity; lower training.lr or router.lr and "
                "resume: the last checkpoint is intact."
            )
        yield update
        # keep the figures, not the vectors: memory must not grow with the number of clients
        received.append(
            Update(
                update.client,
                update.delta_theta[:0],
                update.counts,
                None,
                update.samples,
                update.losses,
                update.tokens,
            )
        )
