"""Which prompts are familiar (ours, not the paper's): a prompt like none before does without an expert.

An expert does well on what it was trained on and can do harm elsewhere; the shared part is the safer answer there.
Familiar prompts lie close to a few directions of feature space. The server learns these from sums over all
clients, and how far out familiar prompts lie from counts: it never sees a prompt's feature. Prompts that directions
were fitted to lie closer than new ones will, so a limit taken from them would send too many away. Each half of the
prompts is therefore held against the directions of the other half. Counts say how far out the farthest then lie, as
multiples of the mean; the sums say what that mean is for directions that all prompts were fitted to.

In a federation that lives familiar prompts are learned anew when rows come. Where others have gone since, or
whoever has them is away, what was familiar before stays so: else their prompts would be strange, and never reach
the expert that still knows how to answer them. Where an expert opens after they have gone it does not: nobody could
teach the router to tell them from the new kind, and strange prompts are answered better than wrongly routed ones.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from statistics import median_low
from typing import NamedTuple

import torch

from fedweave.aggregation.robust import believed, chosen_share
from fedweave.config import Config
from fedweave.federation.admission import Receipts
from fedweave.federation.client import Client
from fedweave.federation.compute import Compute
from fedweave.federation.engines.base import Engine
from fedweave.federation.message import Facts, Message, Refused
from fedweave.federation.state import ServerState
from fedweave.federation.steps import FIGURE, Answer, Asked, Figure, Part, Summed
from fedweave.router.mlp import RouterLayout, outside

_AUTO = 0.98  # router.familiar where nobody says otherwise: by measurement (docs/serving.md)
_AXES = 128  # most directions; a quarter of the width where that is less
_ROWS = 5  # prompts of each half that a direction needs, and that a client must have to tell of them
_BINS = 1000  # of distances, in hundredths of the mean one: a coarser limit is a higher one
_WIDTH = 0.01
_LEAST_SQUARE, _MOST_SQUARE = 1e-9, 1e9  # of a channel, on average: any model's is far inside
_LONGEST = 4.0  # times the median: mean square features of a site that are believed
_FARTHEST = 2.0  # times the median: how far out a stranger's prompts lie that is believed
_WAITING = 32  # sites whose moments are held at a time, until it is known how long features are


def familiar_share(config: Config) -> float:
    """The share of prompts that count as familiar. 1: all do, as where no sums of features may leave, and where a
    template's constant words are most of a short prompt's feature, so that none lies far from the others."""
    asked, backbone = config.router.familiar, config.backbone
    if asked != "auto":
        return asked
    words = backbone.pool == "content" or backbone.prompt == "plain"
    return _AUTO if words and config.privacy.level == "none" else 1.0


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
            halves = [x[half] for half in self.sums(len(x))] or [x[:0], x[:0]]
            row, column = torch.triu_indices(x.shape[1], x.shape[1])
            products = torch.stack([(half.T @ half)[row, column] for half in halves])
            yield Answer(
                {"sums": torch.stack([half.sum(0) for half in halves]), "products": products},
                {"samples": sum(map(len, halves))},
            )

    def sums(self, rows: int) -> list[slice]:
        return [slice(0, None, 2), slice(1, None, 2)] if rows >= 2 * _ROWS else []  # of few it is nearly a feature

    def figures(self, asked: Asked) -> dict[str, Figure]:
        return {"samples": Figure(int, 0, min(len(asked.member), self.config.federation.max_samples), summed=True)}

    def parts(self, asked: Asked, figures: Facts) -> dict[str, Part]:
        d = asked.width
        return {"sums": Part((2, d), torch.float64), "products": Part((2, d * (d + 1) // 2), torch.float64)}

    def totals(self, asked: Asked) -> dict[str, tuple[int, ...]]:
        d = asked.width
        return {"sums": (2, d), "products": (2, d * (d + 1) // 2), f"{FIGURE}samples": (2,)}

    def summands(self, asked: Asked, answer: Answer) -> dict[str, torch.Tensor]:
        return {**answer.parts, f"{FIGURE}samples": _halves(answer.figures["samples"]).double()}

    def read_total(self, asked: Asked, totals: dict[str, torch.Tensor], clients: int) -> Moments:
        return possible(Moments(totals[f"{FIGURE}samples"].round().long(), totals["sums"], totals["products"]))

    def read(self, asked: Asked, parts: dict[str, torch.Tensor], figures: Facts) -> Moments:
        return possible(Moments(_halves(int(figures["samples"])), parts["sums"], parts["products"]))


def possible(told: Moments) -> Moments:
    """Sums and products that features can have, or :class:`Refused`: what they cannot would outweigh all others, or
    leave nothing familiar to anybody. With a 1 beside every feature they are one matrix of inner products, which
    no direction makes negative."""
    width = told.sums.shape[1]
    row, column = torch.triu_indices(width, width)
    for rows, sums, products in zip(*told, strict=True):
        squares = products[row == column]
        mean = float(squares.mean() / rows.clamp(min=1))
        nothing = not rows and not sums.any() and not products.any()
        if not nothing and not _LEAST_SQUARE < mean < _MOST_SQUARE:
            raise Refused(f"its features have a mean square of {mean:.3g}")
        slack = 2 * width**0.5 * (1e-6 * squares.max() + 1e-5)  # rounding, that of masked sums as well
        whole = products.new_zeros(width + 1, width + 1)
        whole[row, column] = whole[column, row] = products
        whole[width, :width] = whole[:width, width] = sums
        whole[width, width] = rows
        whole.diagonal().add_(slack)
        if torch.linalg.cholesky_ex(whole).info:
            raise Refused("its sums and products are of no features")
    return told


def _halves(rows: int) -> torch.Tensor:
    """[2] how many rows each half has."""
    return torch.tensor([(rows + 1) // 2, rows // 2])


def together(told: Iterable[tuple[float, Moments]]) -> Moments | None:
    """Their sum, each by the part of it that counts, of a few at a time. One site alone does not say what is
    familiar: if its features are far longer than the median site's it is scaled down."""
    total: Moments | None = None
    lengths: list[float] = []
    counted = (Moments(*(part * x for x in one)) for part, one in told if one.rows.any())
    while some := list(islice(counted, _WAITING)):
        row, column = torch.triu_indices(some[0].sums.shape[1], some[0].sums.shape[1])
        lengths += [float(one.products[:, row == column].sum() / one.rows.sum()) for one in some]  # mean squares
        most = _LONGEST * median_low(lengths)
        for one, length in zip(some, lengths[-len(some) :], strict=True):
            factor = min(1.0, most / max(length, 1e-30))
            scaled = Moments(one.rows, one.sums * factor**0.5, one.products * factor)
            total = scaled if total is None else Moments(*(a + b for a, b in zip(total, scaled, strict=True)))
    return total


def remembered(total: Moments) -> torch.Tensor:
    """Both halves as one, [1 + d + d (d + 1) / 2]: rows, mean, covariance, in float32, which a checkpoint holds."""
    rows = total.rows.sum().double()
    mean, second = total.sums.sum(0) / rows, total.products.sum(0) / rows
    row, column = torch.triu_indices(len(mean), len(mean))
    return torch.cat([rows[None], mean, second - mean[row] * mean[column]]).float()


def with_remembered(total: Moments, known: torch.Tensor) -> Moments:
    """These sums and, a half of it to each, what was familiar before."""
    d = total.sums.shape[1]
    rows, mean, covariance = known.double().cpu().split([1, d, d * (d + 1) // 2])
    row, column = torch.triu_indices(d, d)
    products = covariance + mean[row] * mean[column]
    half = rows / 2
    return Moments(total.rows + half, total.sums + half * mean, total.products + half * products)


class Span(NamedTuple):
    """Directions that some prompts span, and how far outside of them these lie on average."""

    mean: torch.Tensor  # [d]
    scale: torch.Tensor  # [d]
    axes: torch.Tensor  # [k, d]
    distance: float  # by mean squares: outside over the root of the whole


def fit(mean: torch.Tensor, second: torch.Tensor, count: int) -> Span:
    """The foremost directions of prompts with this mean [d] and these mean products [d, d]."""
    covariance = second - mean.outer(mean)
    variance = covariance.diagonal()
    moves = variance > 1e-9 * variance.mean()  # a channel that stands still says nothing
    scale = torch.where(moves, variance, torch.inf).rsqrt()
    values, vectors = torch.linalg.eigh(covariance * scale.outer(scale))  # ascending
    return Span(mean, scale, vectors[:, -count:].T, float(values[:-count].sum() / values.sum().sqrt()))


def distance(span: Span, mean: torch.Tensor, second: torch.Tensor) -> float:
    """How far outside of a span other prompts lie on average."""
    both = mean.outer(span.mean)
    around = second - both - both.T + span.mean.outer(span.mean)  # mean products of what differs from its mean
    seen = around * span.scale.outer(span.scale)
    whole = seen.trace().clamp(min=torch.finfo(seen.dtype).tiny)
    return float((whole - ((span.axes @ seen) * span.axes).sum()) / whole.sqrt())


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
            x = x if len(x) >= 2 * _ROWS else x[:0]  # where the server names the directions, few tell of each
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
        counts = totals[f"{FIGURE}counts"].round().long()
        if (counts < 0).any():
            raise Refused("it counts fewer prompts than none")
        return counts

    def read(self, asked: Asked, parts: dict[str, torch.Tensor], figures: Facts) -> torch.Tensor:
        return torch.tensor(figures["counts"])


class Familiarity:
    """The two questions and their rule."""

    def __init__(self, config: Config):
        self.config, self.moments, self.distances = config, AskMoments(config), AskDistances()

    def taught(
        self,
        engine: Engine,
        state: ServerState,
        receipts: Receipts,
        gone: bool = False,
        forgets: bool = False,
    ) -> ServerState:
        """A state that knows what is familiar to the clients as they are now, and what was so before to those whose
        rows are ``gone``, or who do not answer; to nobody of these where it ``forgets``. Where nobody tells
        anything what was familiar stays so."""
        plain = state.forgetting()
        if plain.router is None or plain.phi is None:
            return plain
        before = None if forgets else state.known
        router, phi, known = self.learn(engine, plain.router, plain.phi[0], receipts, before, gone)
        if not router.axes:
            return state
        return replace(state, router=router, phi=phi[None], known=state.known if known is None else known)

    def learn(
        self,
        engine: Engine,
        router: RouterLayout,
        phi: torch.Tensor,
        receipts: Receipts,
        before: torch.Tensor | None = None,
        gone: bool = False,
    ) -> tuple[RouterLayout, torch.Tensor, torch.Tensor | None]:
        """(router, φ [Q]) that know familiar prompts, those ``before`` among them where rows are gone or a client
        says nothing; as they came where there are too few prompts to tell. And what is to be remembered of them,
        where data may change."""
        heard = Receipts(bytes_up=receipts.bytes_up)
        members = [member for member in engine.members if member.takes_part]
        part = believed({member.index: len(member) for member in members}, self.config)
        replies = engine.ask(self.moments, members, Message(), heard)
        told = ((part.get(member.index, 1.0), moments) for member, moments in replies)
        if (total := together(told)) is None:
            return router, phi, None
        if before is not None and (gone or len(heard.accepted) < len(members)):
            total = with_remembered(total, before)
        rows, sums, products = total
        count = min(_AXES, router.width // 4, int(rows.min()) // _ROWS)
        if count < 1:
            return router, phi, None
        share = rows / rows.sum()
        means, flat = sums / rows[:, None], products / rows[:, None]  # [2, d], [2, d (d + 1) / 2]
        row, column = torch.triu_indices(router.width, router.width)
        seconds = means.new_zeros(2, router.width, router.width)
        seconds[:, row, column] = seconds[:, column, row] = flat
        span = fit((share[:, None] * means).sum(0), (share[:, None, None] * seconds).sum(0), count)
        halves = [fit(means[half], seconds[half], count) for half in (0, 1)]
        if not all(one.distance > 0 for one in (span, *halves)):  # nothing moves
            return router, phi, None
        far = crossed(halves, means, seconds)
        question = Message(spanned(halves), {"mean_far": far})
        counts, heard = torch.zeros(_BINS), Receipts(bytes_up=receipts.bytes_up)
        asked, own = familiar_share(self.config), []
        for member, found in engine.ask(self.distances, members, question, heard):
            own += [reach(found, asked)] if found.any() else []
            counts += part.get(member.index, 1.0) * found
        if not counts.any():  # nobody has said how far out familiar prompts lie: all are
            return router, phi, None
        reached = reach(counts, asked)
        if chosen_share(self.config) < 1:
            reached = min(reached, _FARTHEST * median_low(own))
        limit = reached * span.distance * farther(halves, far)
        limit *= self.config.router.doubt
        known = remembered(total) if self.config.lives else None
        return (*router.knowing(phi, span.mean, span.scale, span.axes, limit), known)
