"""Algorithm 1 of the paper, on one page.

Lines 1 to 6 (discovery, alignment, initialisation) are a method's ``prepare``; this is the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from fedweave.config import Config
from fedweave.errors import UserError
from fedweave.federation.agreement import Agreement
from fedweave.federation.client import Member
from fedweave.federation.engine import Engine
from fedweave.federation.intake import Intake, RoundReport
from fedweave.methods.base import Method, ServerState
from fedweave.streams import stream_key

M = TypeVar("M", bound=Member)


def federate(
    method: Method,
    engine: Engine,
    state: ServerState,
    rounds: range,
    after_round: Callable[[ServerState, RoundReport], None],
) -> ServerState:
    """Lines 7 to 15. ``after_round`` validates and saves; a run that resumes starts at a later round."""
    for t in rounds:
        participants = sample_clients(engine.present(method, state), method.config, t)  # line 8: S_t
        state, report = one_round(method, engine, state, participants, t)
        after_round(state, report)
    return state


def one_round(
    method: Method, engine: Engine, state: ServerState, participants: Sequence[Member], t: int
) -> tuple[ServerState, RoundReport]:
    """Lines 9 to 14. A round in which too few answers can be used is repeated from the same state."""
    settings = method.config.federation
    courier = method.courier(state)
    for attempt in range(1 + settings.repeats):
        received = engine.broadcast_bytes(state, courier)
        report = RoundReport(t, participants, Agreement(state.layout), bytes_down=received)
        intake = Intake(method.config, courier, engine.identity, state, report)
        answers = engine.answers(method, state, participants, t, courier)  # lines 9-13
        moved = method.aggregate(state, intake.updates(answers, engine.console.warn))  # line 14
        if len(report.accepted) >= settings.min_answers:
            return replace(moved, norms=intake.remembered()), report
        short = (
            f"round {t + 1} got {len(report.accepted)} of the {settings.min_answers} usable answers that it needs"
        )
        if attempt < settings.repeats:
            engine.console.warn(f"{short}; it is repeated.")
    why = f" ({report.sentence(*report.refused[-1])})" if report.refused else ""
    raise UserError(
        f"{short}{why}; mend the clients or lower federation.min_answers. The last checkpoint is intact: continue "
        "with `fedweave resume`."
    )


def sample_clients(clients: Sequence[M], config: Config, t: int) -> list[M]:
    """S_t: all clients, or a fraction or a count of them, drawn anew each round."""
    asked = config.training.participation
    count = round(asked * len(clients)) if asked <= 1 else int(asked)
    count = min(max(1, count), len(clients))
    rng = np.random.default_rng(stream_key("participants", config.seed, t))
    chosen = sorted(rng.permutation(len(clients))[:count])
    return [clients[i] for i in chosen]
