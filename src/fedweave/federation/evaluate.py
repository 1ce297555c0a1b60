"""Federated evaluation: every site measures the broadcast model on validation examples of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedweave.aggregation.robust import capped
from fedweave.federation.client import OWN, Client
from fedweave.federation.message import Facts, Message, Refused
from fedweave.federation.state import received
from fedweave.federation.steps import FIGURE, MOST_LOSS, Answer, Asked, Figure, Summed

if TYPE_CHECKING:
    from fedweave.federation.compute import Compute
    from fedweave.federation.method import Method

_PRIVATE = 10.0  # nats: under differential privacy no example counts for more
_LONGEST = 3.0  # times the median of all sites: a site's mean loss that is believed


@dataclass
class Loss:
    """Sums over examples, so that the mean over sites is the mean over all of their examples."""

    total: float = 0.0
    entropy: float = 0.0  # of the router
    count: int = 0

    def __add__(self, other: Loss) -> Loss:
        return Loss(self.total + other.total, self.entropy + other.entropy, self.count + other.count)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else float("nan")

    @property
    def mean_entropy(self) -> float:
        return self.entropy / self.count if self.count else float("nan")


def overall(losses: Sequence[Loss], most: float) -> Loss:
    """The sum over sites: a mean beyond a few times the median of all counts as that, and nobody for more than the
    share ``most`` of all examples."""
    limit = _LONGEST * float(np.median([loss.mean for loss in losses]))
    shares, count = capped([loss.count for loss in losses], most).tolist(), sum(loss.count for loss in losses)
    counted = [
        Loss(min(loss.mean, limit) * share * count, loss.mean_entropy * share * count, 0)
        for loss, share in zip(losses, shares, strict=True)
    ]
    return sum(counted, Loss(count=count))


def does_better(now: Mapping[str, float], before: Mapping[str, float]) -> bool | None:
    """Whether the median site does, each held against its own loss before: what a few sites say, and of how many
    examples, tips nothing. None where no site was there both times."""
    ratios = [loss / before[name] for name, loss in now.items() if before.get(name)]
    return bool(np.median(ratios) < 1) if ratios else None


class Evaluate(Summed[Loss]):
    """The validation loss of every site, with the routing that selects the best round."""

    name = "evaluate"

    def __init__(self, method: Method):
        self.method = method

    def answer(self, compute: Compute, clients: Sequence[Client], question: Message) -> Iterator[Answer]:
        state = received(question, compute.layers, compute.device)
        shared = self.method.shared(state.layout, question.facts["t"])
        for client in clients:
            held, own = client.held, client.memory.after.get(OWN)
            if held is None or not len(held):
                yield Answer(figures={"total": 0.0, "entropy": 0.0, "count": 0})
                continue
            theta = state.theta
            if own is not None and shared is not None:  # a site answers with what it keeps
                theta = torch.where(shared.to(theta.device), theta, own)
            weights = state.weights(held.features)
            gates = state.gates(weights, self.method.selection)
            losses = compute.losses(state.layout, theta, held.examples, gates)
            private = self.method.config.privacy.level
            if private != "none":
                losses = losses.nan_to_num(_PRIVATE, _PRIVATE).clamp(max=_PRIVATE)  # nor does anyone hear of NaN
            if private == "client":  # which counts as one, whatever it has
                losses = losses.mean(0, keepdim=True)
            entropy = max(0.0, -(weights.clamp(min=1e-12).log() * weights).sum().item())
            yield Answer(figures={"total": losses.sum().item(), "entropy": entropy, "count": len(held)})

    def figures(self, asked: Asked) -> dict[str, Figure]:
        most = self.method.config.federation.max_samples
        return {
            "total": Figure(float, 0, MOST_LOSS * most, summed=True, spread=_PRIVATE),
            "entropy": Figure(float, 0, MOST_LOSS * most, summed=True, veil=0.0),
            "count": Figure(int, 0, most, summed=True, examples=True),
        }

    def totals(self, asked: Asked) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys((f"{FIGURE}total", f"{FIGURE}entropy", f"{FIGURE}count"), (1,))

    def summands(self, asked: Asked, answer: Answer) -> dict[str, torch.Tensor]:
        return {FIGURE + name: torch.tensor([float(value)]) for name, value in answer.figures.items()}

    def read_total(self, asked: Asked, totals: dict[str, torch.Tensor], clients: int) -> Loss:
        total, entropy, count = (float(totals[FIGURE + name]) for name in ("total", "entropy", "count"))
        return self._possible(Loss(total, entropy, round(count)))

    def read(self, asked: Asked, parts: dict[str, torch.Tensor], figures: Facts) -> Loss:
        return self._possible(Loss(figures["total"], figures["entropy"], int(figures["count"])))

    def _possible(self, told: Loss) -> Loss:
        """Sums that so many examples can have, or :class:`Refused`; where there is noise any may be one."""
        noised, most = self.method.config.privacy.level != "none", MOST_LOSS * told.count
        if not noised and not (0 <= told.total <= most and 0 <= told.entropy <= most):
            raise Refused("its losses are of no examples")
        return told
