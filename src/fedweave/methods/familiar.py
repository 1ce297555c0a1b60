"""Which prompts are familiar (ours, not the paper's): a prompt like none before does without an expert.

An expert does well on what it was trained on and can do harm elsewhere; the shared part is the safer answer there.
Familiar prompts lie close to a few directions of feature space. The server learns these from sums over all
clients, and how far out familiar prompts lie from counts: it never sees a prompt's feature.
"""

from collections.abc import Iterator, Sequence

import torch

from fedweave.config import Config
from fedweave.federation.admission import Receipts
from fedweave.federation.client import Client
from fedweave.federation.compute import Compute
from fedweave.federation.engines.base import Engine
from fedweave.federation.message import Facts, Message, Refused
from fedweave.federation.state import read_router, router_facts
from fedweave.federation.steps import Answer, Asked, Figure, Part, Step
from fedweave.router.mlp import RouterLayout

_AXES = 128  # most directions; a quarter of the width where that is less
_ROWS = 10  # prompts that a direction needs
_BINS = 400  # of distances, in twentieths of the mean one
_WIDTH = 0.05
_LONGEST = 4.0  # times the median: mean square features of a site that are believed

Moments = tuple[int, torch.Tensor, torch.Tensor]  # prompts, sum of features [d], sum of their products [d, d]


class AskMoments(Step[Moments]):
    """What are your prompts' features and their products, summed up?"""

    name = "moments"

    def __init__(self, config: Config):
        self.config = config

    def answer(self, compute: Compute, clients: Sequence[Client], question: Message) -> Iterator[Answer]:
        for client in clients:
            x = client.data.features[client.rows].double()  # [n, d]; a variance is a small difference of large sums
            yield Answer({"sum": x.sum(0), "products": x.T @ x}, {"samples": len(x)})

    def figures(self, asked: Asked) -> dict[str, Figure]:
        return {"samples": Figure(int, 1, min(len(asked.member), self.config.federation.max_samples), summed=True)}

    def parts(self, asked: Asked, figures: Facts) -> dict[str, Part]:
        d = asked.width
        return {"sum": Part((d,), torch.float64), "products": Part((d, d), torch.float64)}

    def read(self, asked: Asked, parts: dict[str, torch.Tensor], figures: Facts) -> Moments:
        return int(figures["samples"]), parts["sum"], parts["products"]


class AskDistances(Step[torch.Tensor]):
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
        lengths = torch.stack([products.trace() / n for n, _, products in told])  # mean squares
        # one site alone does not say what is familiar
        factors = (_LONGEST * lengths.median() / lengths.clamp(min=1e-30)).clamp(max=1.0)
        rows = sum(n for n, _, _ in told)
        total = torch.stack([f.sqrt() * one for f, (_, one, _) in zip(factors, told, strict=True)]).sum(0)
        products = torch.stack([f * two for f, (_, _, two) in zip(factors, told, strict=True)]).sum(0)
        count = min(_AXES, router.width // 4, rows // _ROWS)
        if count < 1:
            return router, phi
        mean = total / rows  # [d]
        covariance = products / rows - mean.outer(mean)  # [d, d]
        variance = covariance.diagonal()
        moves = variance > 1e-9 * variance.mean()  # a channel that stands still says nothing
        scale = torch.where(moves, variance, torch.inf).rsqrt()
        values, vectors = torch.linalg.eigh(covariance * scale.outer(scale))  # ascending
        axes, mean_distance = vectors[:, -count:].T, float(values[:-count].sum())
        router, phi = router.knowing(phi, mean, scale, axes, torch.finfo(torch.float32).max)
        question = Message({"phi": phi}, router_facts(router) | {"mean": mean_distance})
        counts, heard = torch.zeros(_BINS), Receipts(bytes_up=receipts.bytes_up)
        for _, found in engine.ask(self.distances, engine.members, question, heard):
            counts += found
        if not counts.any():  # nobody has said how far out familiar prompts lie: all are
            return router, phi
        within = counts.cumsum(0) / counts.sum()
        bins = int((within < self.config.router.familiar).sum()) + 1
        router.views(phi)["familiar.limit"].fill_(bins * _WIDTH * mean_distance)
        return router, phi
