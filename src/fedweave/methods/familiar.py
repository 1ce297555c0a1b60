"""Which prompts are familiar (ours, not the paper's): a prompt like none before does without an expert.

An expert does well on what it was trained on and can do harm elsewhere; the shared part is the safer answer there.
Familiar prompts lie close to a few directions of feature space. The server learns these from sums over all
clients, and how far out familiar prompts lie from counts: it never sees a prompt's feature. Prompts that directions
were fitted to lie closer than new ones will, so a limit taken from them would send too many away; how much farther
new ones lie shows in the sums too, where the directions of one half of the prompts meet the other half.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from fedweave.config import Config
from fedweave.federation.admission import Receipts
from fedweave.federation.client import Client
from fedweave.federation.compute import Compute
from fedweave.federation.engines.base import Engine
from fedweave.federation.message import Facts, Message, Refused
from fedweave.federation.state import read_router, router_facts
from fedweave.federation.steps import FIGURE, Answer, Asked, Figure, Part, Summed
from fedweave.router.mlp import RouterLayout

_AXES = 128  # most directions; a quarter of the width where that is less
_ROWS = 10  # prompts that a direction needs
_BINS = 400  # of distances, in twentieths of the mean one
_WIDTH = 0.05
_LONGEST = 4.0  # times the median: mean square features of a site that are believed


class Moments(NamedTuple):
    """Sums over every other prompt, and over the rest: the two halves."""

    rows: torch.Tensor  # [2]
    sums: torch.Tensor  # [2, d] of features
    products: torch.Tensor  # [2, d (d + 1) / 2] of features with features, which is symmetric


class AskMoments(Summed[Moments]):
    """What are the features of each half of your prompts and their products, summed up?"""

    name = "moments"

    def __init__(self, config: Config):
        self.config = config

    def answer(self, compute: Compute, clients: Sequence[Client], question: Message) -> Iterator[Answer]:
        for client in clients:
            x = client.data.features[client.rows].double()  # [n, d]; a variance is a small difference of large sums
            halves = [x[::2], x[1::2]]
            row, column = torch.triu_indices(x.shape[1], x.shape[1])
            products = torch.stack([(half.T @ half)[row, column] for half in halves])
            yield Answer(
                {"sums": torch.stack([half.sum(0) for half in halves]), "products": products}, {"samples": len(x)}
            )

    def figures(self, asked: Asked) -> dict[str, Figure]:
        return {"samples": Figure(int, 1, min(len(asked.member), self.config.federation.max_samples), summed=True)}

    def parts(self, asked: Asked, figures: Facts) -> dict[str, Part]:
        d = asked.width
        return {"sums": Part((2, d), torch.float64), "products": Part((2, d * (d + 1) // 2), torch.float64)}

    def totals(self, asked: Asked) -> dict[str, tuple[int, ...]]:
        d = asked.width
        return {"sums": (2, d), "products": (2, d * (d + 1) // 2), f"{FIGURE}samples": (2,)}

    def summands(self, asked: Asked, answer: Answer) -> dict[str, torch.Tensor]:
        return {**answer.parts, f"{FIGURE}samples": _halves(answer.figures["samples"]).double()}

    def read_total(self, asked: Asked, totals: dict[str, torch.Tensor], clients: int) -> Moments:
        return Moments(totals[f"{FIGURE}samples"].round().long(), totals["sums"], totals["products"])

    def read(self, asked: Asked, parts: dict[str, torch.Tensor], figures: Facts) -> Moments:
        return Moments(_halves(int(figures["samples"])), parts["sums"], parts["products"])


def _halves(rows: int) -> torch.Tensor:
    """[2] how many rows each half has."""
    return torch.tensor([(rows + 1) // 2, rows // 2])


class Span(NamedTuple):
    """Directions that some prompts span, and how far outside of them these lie on average."""

    mean: torch.Tensor  # [d]
    scale: torch.Tensor  # [d]
    axes: torch.Tensor  # [k, d]
    distance: float


def fit(mean: torch.Tensor, second: torch.Tensor, count: int) -> Span:
    """The foremost directions of prompts with this mean [d] and these mean products [d, d]."""
    covariance = second - mean.outer(mean)
    variance = covariance.diagonal()
    moves = variance > 1e-9 * variance.mean()  # a channel that stands still says nothing
    scale = torch.where(moves, variance, torch.inf).rsqrt()
    values, vectors = torch.linalg.eigh(covariance * scale.outer(scale))  # ascending
    return Span(mean, scale, vectors[:, -count:].T, float(values[:-count].sum()))


def distance(span: Span, mean: torch.Tensor, second: torch.Tensor) -> float:
    """How far outside of a span other prompts lie on average."""
    crossed = mean.outer(span.mean)
    around = (
        second - crossed - crossed.T + span.mean.outer(span.mean)
    )  # mean products of what differs from its mean
    seen = around * span.scale.outer(span.scale)
    return float(seen.trace() - ((span.axes @ seen) * span.axes).sum())


def farther(means: list[torch.Tensor], seconds: list[torch.Tensor], count: int) -> float:
    """How many times as far out new prompts lie as those that directions are fitted to. Each half is held against
    the directions of the other; what is fitted to twice as many prompts is half as far off."""
    spans = [fit(mean, second, count) for mean, second in zip(means, seconds, strict=True)]
    ratios = [
        distance(spans[a], means[b], seconds[b]) / max(spans[a].distance, torch.finfo(torch.float64).tiny)
        for a, b in ((0, 1), (1, 0))
    ]
    return 1 + max(0.0, sum(ratios) / 2 - 1) / 2


class AskDistances(Summed[torch.Tensor]):
    """How many of your prompts lie how far outside of these directions? [bins]"""

    name = "distances"

    def answer(self, compute: Compute, clients: Sequence[Client], question: Message) -> Iterator[Answer]:
        router, phi = read_router(question.facts), question.tensors["phi"].to(compute.device)
        assert router is not None
        for client in clients:
            far = router.strangeness(phi, client.data.features[client.rows].to(phi)) / question.facts["mean"]
            bins = (far / _WIDTH).long().clamp(0, _BINS - 1).cpu()
            yield Answer(figures={"counts": torch.bincount(bins, minlength=_BINS).tolist()})

    def figures(self, asked: Asked) -> dict[str, Figure]:
        return {"counts": Figure(int, 0, len(asked.member), (_BINS, _BINS), summed=True)}

    def parts(self, asked: Asked, figures: Facts) -> dict[str, Part]:
        if sum(figures["counts"]) > len(asked.member):
            raise Refused("it counts more prompts than it has")
        return {}

    def totals(self, asked: Asked) -> dict[str, tuple[int, ...]]:
        return {f"{FIGURE}counts": (_BINS,)}

    def summands(self, asked: Asked, answer: Answer) -> dict[str, torch.Tensor]:
        return {f"{FIGURE}counts": torch.tensor(answer.figures["counts"], dtype=torch.float64)}

    def read_total(self, asked: Asked, totals: dict[str, torch.Tensor], clients: int) -> torch.Tensor:
        return totals[f"{FIGURE}counts"].round().long()

    def read(self, asked: Asked, parts: dict[str, torch.Tensor], figures: Facts) -> torch.Tensor:
        return torch.tensor(figures["counts"])


class Familiarity:
    """The two questions and their rule."""

    def __init__(self, config: Config):
        self.config, self.moments, self.distances = config, AskMoments(config), AskDistances()

    def learn(
        self, engine: Engine, router: RouterLayout, phi: torch.Tensor, receipts: Receipts
    ) -> tuple[RouterLayout, torch.Tensor]:
        """(router, φ [Q]) that know familiar prompts; as they came where there are too few prompts to tell."""
        heard = Receipts(bytes_up=receipts.bytes_up)
        told = [moments for _, moments in engine.ask(self.moments, engine.members, Message(), heard)]
        if not told:
            return router, phi
        row, column = torch.triu_indices(router.width, router.width)
        lengths = torch.stack(
            [one.products[:, row == column].sum() / one.rows.sum() for one in told]
        )  # mean squares
        # one site alone does not say what is familiar
        factors = (_LONGEST * lengths.median() / lengths.clamp(min=1e-30)).clamp(max=1.0)
        rows = torch.stack([one.rows for one in told]).sum(0)  # [2]
        sums = torch.stack([f.sqrt() * one.sums for f, one in zip(factors, told, strict=True)]).sum(0)
        flat = torch.stack([f * one.products for f, one in zip(factors, told, strict=True)]).sum(0)
        products = sums.new_zeros(2, router.width, router.width)
        products[:, row, column] = products[:, column, row] = flat
        count = min(_AXES, router.width // 4, int(rows.sum()) // _ROWS)
        if count < 1:
            return router, phi
        span = fit(sums.sum(0) / rows.sum(), products.sum(0) / rows.sum(), count)
        router, phi = router.knowing(phi, span.mean, span.scale, span.axes, torch.finfo(torch.float32).max)
        question = Message({"phi": phi}, router_facts(router) | {"mean": span.distance})
        counts, heard = torch.zeros(_BINS), Receipts(bytes_up=receipts.bytes_up)
        for _, found in engine.ask(self.distances, engine.members, question, heard):
            counts += found
        if not counts.any():  # nobody has said how far out familiar prompts lie: all are
            return router, phi
        asked = int(counts.sum())
        inside = min(asked, math.ceil((asked + 1) * self.config.router.familiar))  # the next prompt counts too
        limit = (int((counts.cumsum(0) < inside).sum()) + 1) * _WIDTH * span.distance
        if rows.min() > count:
            limit *= farther(list(sums / rows[:, None]), list(products / rows[:, None, None]), count)
        router.views(phi)["familiar.limit"].fill_(limit)
        return router, phi
