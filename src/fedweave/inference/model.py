"""A trained federation as one model: route a prompt, answer with one expert or a mixture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedweave.backbone.features import compute_features
from fedweave.backbone.load import Backbone
from fedweave.backbone.prompts import EncodedPrompt
from fedweave.console import Console
from fedweave.data.examples import Prompt
from fedweave.experts.mixture import Mixture
from fedweave.inference.generate import generate
from fedweave.router.mlp import RouterLayout, sparsify, vote


@dataclass
class Answer:
    text: str
    expert: int  # the one with the largest weight
    weights: list[float]  # of all experts


@dataclass
class RoutedModel:
    """Backbone, experts and router."""

    backbone: Backbone
    mixture: Mixture
    theta: torch.Tensor  # [P]
    router: RouterLayout | None
    phi: torch.Tensor | None  # [R, Q]
    shares: list[float]  # [R] how much each router counts

    def weights(self, features: torch.Tensor) -> torch.Tensor:
        """Soft router weights of cached features: [n, d] to [n, M] on the CPU."""
        return vote(self.router, self.phi, self.shares, features)

    def route(self, prompts: Sequence[Prompt]) -> torch.Tensor:
        """Soft router weights of prompts, [n, M]."""
        return self._route(self.backbone.prompts.encode_prompts(prompts))

    def _route(self, encoded: Sequence[EncodedPrompt]) -> torch.Tensor:
        return self.weights(compute_features(self.backbone, encoded, Console(quiet=True)))

    def answer(self, prompts: Sequence[Prompt], routing: str = "sparse", max_new_tokens: int = 64) -> list[Answer]:
        encoded = self.backbone.prompts.encode_prompts(prompts)
        weights = self._route(encoded)
        gates = sparsify(weights, routing)
        texts = generate(self.backbone, encoded, max_new_tokens, self.mixture, self.theta, gates)
        return [Answer(text, int(row.argmax()), row.tolist()) for text, row in zip(texts, weights, strict=True)]
