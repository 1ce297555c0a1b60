"""A trained federation as one model: route a prompt, answer with one expert or a mixture."""

import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from typing_extensions import Unpack

from fedweave.backbone.features import compute_features
from fedweave.backbone.load import Backbone
from fedweave.backbone.prompts import EncodedPrompt
from fedweave.console import Console, ProgressBar
from fedweave.data.examples import Prompt
from fedweave.errors import UserError
from fedweave.experts.mixture import Mixture
from fedweave.inference.rows import Row, RunningBatch, TokenScore
from fedweave.inference.sampling import Options, Sampling
from fedweave.router.mlp import active_experts
from fedweave.router.routed import RoutedExperts, foremost


@dataclass
class Answer:
    """A text and who gave it."""

    text: str
    expert: int  # the one with the largest weight; -1: none, for a prompt like none before
    weights: list[float]  # of all experts, by the router
    ended: str = "stop"  # stop: by itself or at a stop string; length: at max_new_tokens
    adapter: str = ""  # what answered: expert_0, …, shared (what experts share) or base (the bare backbone)
    doubt: float | None = None  # how strange the prompt is: above 1 no expert answers; None: not measured
    truncated: bool = False  # the prompt was longer than the model takes and lost its beginning
    tokens: list[int] = field(default_factory=list)  # of the answer, without its end
    scores: list[TokenScore] = field(
        default_factory=list
    )  # with logprobs: of its tokens, with echo the prompt's first

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Route:
    """Who answers a prompt, and why."""

    expert: int  # -1: none
    adapter: str  # its name; without an expert shared or base
    weights: list[float]
    doubt: float | None
    gates: torch.Tensor  # [M] or [M + R/r]


@dataclass(repr=False)
class FedWeaveModel:
    """Backbone, experts and router; :func:`fedweave.load` makes one of a run or a bundle."""

    backbone: Backbone
    mixture: Mixture
    experts: RoutedExperts

    def __repr__(self) -> str:
        layout, backbone = self.mixture.layout, self.backbone
        shared = f" and a shared part of rank {layout.shared}" if layout.shared else ""
        where = f"{str(backbone.dtype).removeprefix('torch.')} on {backbone.device}"
        return (
            f"<FedWeaveModel: {layout.experts} experts of rank {layout.rank}{shared} on {backbone.name}, {where}>"
        )

    @property
    def theta(self) -> torch.Tensor:
        """[P] the experts."""
        return self.experts.theta

    # ---------------------------------------------------------------------------------- routing

    def weights(self, features: torch.Tensor) -> torch.Tensor:
        """Soft router weights of cached features: [n, d] to [n, M] on the CPU."""
        return self.experts.weights(features)

    def require_whole_span(self, where: str) -> None:
        """Other programs let experts see a whole prompt."""
        if self.mixture.span != "all":
            raise UserError(
                f"these experts see answers alone (experts.span={self.mixture.span}), and in {where} they would "
                "see prompts too, which they were not trained for; use a bundle with `fedweave serve`."
            )

    def route(self, prompts: Sequence[Prompt]) -> torch.Tensor:
        """Soft router weights of prompts, [n, M]."""
        return self.judge(self.backbone.prompts.encode_prompts(_several(prompts)))[0]

    def judge(self, encoded: Sequence[EncodedPrompt]) -> tuple[torch.Tensor, list[float | None]]:
        """(soft router weights [n, M], doubts [n]) of prompts; one with several answers is read once."""
        distinct = {id(prompt): prompt for prompt in encoded}
        place = {key: row for row, key in enumerate(distinct)}
        features = compute_features(self.backbone, list(distinct.values()), Console(quiet=True))
        features = features[[place[id(prompt)] for prompt in encoded]]
        return self.weights(features), self.experts.strangeness(features)

    # ---------------------------------------------------------------------------------- answering

    def generate(
        self,
        prompts: Sequence[Prompt],
        routing: str = "sparse",
        progress: ProgressBar | None = None,
        adapter: str | None = None,
        **options: Unpack[Options],
    ) -> list[Answer]:
        """Answers in the order of ``prompts``, each by its own experts, in one batch. A prompt is a text or a tuple
        of chat messages; ``adapter`` lets expert_0, …, shared or base answer them all, whatever the router says;
        ``options`` carry the names of transformers' GenerationConfig (:class:`Sampling`)."""
        encoded = self._encode(_several(prompts), options)
        rows, routes = self._rows(encoded, routing, adapter, options)
        for row, _ in self._run(rows):
            if row.ended and progress:
                progress.advance()
        return [
            Answer(
                text=row.text.text,
                expert=route.expert,
                weights=route.weights,
                ended=row.ended,
                adapter=route.adapter,
                doubt=route.doubt,
                truncated=row.prompt.truncated,
                tokens=row.new,
                scores=row.scores,
            )
            for row, route in zip(rows, routes, strict=True)
        ]

    def stream(
        self, prompt: Prompt, routing: str = "sparse", adapter: str | None = None, **options: Unpack[Options]
    ) -> Iterator[str]:
        """The same answer piece by piece, as it is made; no piece splits a character."""
        rows, _ = self._rows(self._encode([prompt], options), routing, adapter, options)
        return (piece for _, piece in self._run(rows) if piece)

    def batch(self, rows: int, length: int) -> RunningBatch:
        """An empty running batch of this model."""
        return RunningBatch(self.backbone, self.mixture, self.theta, rows, length)

    def routes(
        self, encoded: Sequence[EncodedPrompt], routing: str = "sparse", adapter: str | None = None
    ) -> list[Route]:
        """Who answers each prompt: by the router's choice, or the adapter that was asked for."""
        weights, doubts = self.judge(encoded)
        gates = self.experts.gates(weights, routing)
        chosen = [(foremost(w), g) for w, g in zip(weights, gates, strict=True)]
        names = [self.experts.adapter(expert) for expert, _ in chosen]
        if adapter is not None:
            chosen, names = [self.experts.only(adapter)] * len(encoded), [adapter] * len(encoded)
        return [
            Route(expert, name, w.tolist(), doubt, gate)
            for (expert, gate), name, w, doubt in zip(chosen, names, weights, doubts, strict=True)
        ]

    def _encode(self, prompts: Sequence[Prompt], options: Mapping[str, object]) -> list[EncodedPrompt]:
        """Prompts up to the model's own length; what is longer loses its beginning, which is said."""
        room = self.backbone.longest_prompt(Sampling.of(options).max_new_tokens)
        encoded = self.backbone.prompts.encode_prompts(prompts, room)
        if cut := sum(prompt.truncated for prompt in encoded):
            warnings.warn(f"{cut} of {len(encoded)} prompts lost their beginning: {room} tokens fit.", stacklevel=3)
        return encoded

    def _rows(
        self, encoded: Sequence[EncodedPrompt], routing: str, adapter: str | None, options: Mapping[str, object]
    ) -> tuple[list[Row], list[Route]]:
        """(rows to run, who answers them); whatever is wrong with the options shows before anything runs."""
        sampling = Sampling.of(options)
        self.backbone.check_answer(sampling.max_new_tokens)
        active_experts(routing)
        if adapter is not None:
            self.experts.only(adapter)
        routes = self.routes(encoded, routing, adapter)
        return [
            Row(self.backbone, prompt, route.gates, sampling, number)
            for number, (prompt, route) in enumerate(zip(encoded, routes, strict=True))
        ], routes

    def _run(self, rows: list[Row]) -> Iterator[tuple[Row, str]]:
        """All rows to their end; long prompts first, so that rows of a batch end together."""
        waiting = deque(sorted(rows, key=lambda row: -row.room))
        most = 256 if self.backbone.device.type == "cuda" else 32
        batch = self.batch(min(most, len(rows)), max((row.room for row in rows), default=0))
        while waiting or not all(row.ended for row in batch.rows):
            yield from batch.advance(waiting)


def _several(prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    """A lone text where a list is meant would otherwise be read letter by letter."""
    if isinstance(prompts, str):
        raise UserError("prompts must be a list; put the text in brackets.")
    return prompts
