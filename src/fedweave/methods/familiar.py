"""Which prompts are familiar (ours, not the paper's): a prompt like none before does without an expert.

An expert does well on what it was trained on and can do harm elsewhere; the shared part is the safer answer there.
Familiar prompts lie close to a few directions of feature space. The server learns these from sums over all
clients, and how far out familiar prompts lie from counts: it never sees a prompt's feature. Prompts that directions
were fitted to lie closer than new ones will, so a limit taken from them would send too many away. Each half of the
prompts is therefore held against the directions of the other half. Counts say how far out the farthest then lie, as
multiples of the mean; the sums say what that mean is for directions that all prompts were fitted to.
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
from fedweave.federation.steps import FIGURE, Answer, Asked, Figure, Part, Summed
from fedweave.router.mlp import RouterLayout, outside

_AXES = 128  # most directions; a quarter of the width where that is less
_ROWS = 5  # prompts of each half that a direction needs
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
    both = mean.outer(span.mean)
    around = second - both - both.T + span.mean.outer(span.mean)  # mean products of what differs from its mean
    seen = around * span.scale.outer(span.scale)
    return float(seen.trace() - ((span.axes @ seen) * span.axes).sum())


def crossed(halves: Sequence[Span], means: torch.Tensor, seconds: torch.Tensor) -> list[float]:
    """How far each half lies outside of the directions of the other on average; means [2, d], seconds [2, d, d]."""
    tiny = torch.finfo(torch.float64).tiny
    return [max(distance(halves[1 - half], means[half], seconds[half]), tiny) for half in (0, 1)]


def farther(halves: Sequence[Span], new: Sequence[float]) -> float:
    """How many times as far out new prompts lie as those that directions are fitted to, by how far each half lies
    outside of the other: what is fitted to twice as many prompts is half as far off."""
    ratio = sum(far / max(halves[1 - half].distance, 1e-300) for half, far in enumerate(new)) / 2
    return 1 + max(0.0, ratio - 1) / 2


def spanned(halves: Sequence[Span]) -> dict[str, torch.Tensor]:
    """What the two halves span, as tensors that can be sent: [2, d], [2, d] and [2, k, d]."""
    return {name: torch.stack([getattr(half, name) for half in halves]).float() for name in Span._fields[:3]}


def count_far(features: torch.Tensor, spans: dict[str, torch.Tensor], mean_far: Sequence[float]) -> torch.Tensor:
    """[bins] how many features [n, d] of each half lie how far outside of the other half's directions, in units of
    the mean distance."""
    far = []
    for half in (0, 1):
        mean, scale, axes = (spans[name][1 - half].to(features.device) for name in Span._fields[:3])
        far.append(outside(features[half::2].to(mean), mean, scale, axes) / mean_far[half])
    bins = (torch.cat(far) / _WIDTH).long().clamp(0, _BINS - 1).cpu()
    return torch.bincount(bins, minlength=_BINS)


def reach(counts: torch.Tensor, share: float) -> float:
    """How many times the mean distance this share of prompts lies within, by counts [bins]."""
    inside = min(int(counts.sum()), math.ceil((int(counts.sum()) + 1) * share))  # the next prompt counts too
    return (int((counts.cumsum(0) < inside).sum()) + 1) * _WIDTH


class AskDistances(Summed[torch.Tensor]):
    """How many of your prompts, half by half, lie how far outside of the other half's directions? [bins]"""

    name = "distances"

    def answer(self, compute: Compute, clients: Sequence[Client], question: Message) -> Iterator[Answer]:
        for client in clients:
            x = client.data.features[client.rows].to(compute.device)
            counts = count_far(x, question.tensors, question.facts["mean_far"])
            yield Answer(figures={"counts": counts.tolist()})

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
        count = min(_AXES, router.width // 4, int(rows.min()) // _ROWS)
        if count < 1:
            return router, phi
        share = rows / rows.sum()
        pairs = list(zip(factors, told, strict=True))
        means = torch.stack([factor.sqrt() * one.sums for factor, one in pairs]).sum(0) / rows[:, None]  # [2, d]
        flat = torch.stack([factor * one.products for factor, one in pairs]).sum(0) / rows[:, None]
        seconds = means.new_zeros(2, router.width, router.width)
        seconds[:, row, column] = seconds[:, column, row] = flat
        span = fit((share[:, None] * means).sum(0), (share[:, None, None] * seconds).sum(0), count)
        halves = [fit(means[half], seconds[half], count) for half in (0, 1)]
        far = crossed(halves, means, seconds)
        question = Message(spanned(halves), {"mean_far": far})
        counts, heard = torch.zeros(_BINS), Receipts(bytes_up=receipts.bytes_up)
        for _, found in engine.ask(self.distances, engine.members, question, heard):
            counts += found
        if not counts.any():  # nobody has said how far out familiar prompts lie: all are
            return router, phi
        limit = reach(counts, self.config.router.familiar) * span.distance * farther(halves, far)
        return router.knowing(phi, span.mean, span.scale, span.axes, limit)
