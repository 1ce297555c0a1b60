"""Differential privacy at a client: what is clipped, where noise comes in, what is not told at all.

level=client: all tensors of an answer, whatever the step, are one vector; it is clipped and gets noise at the exit.
level=example: the local steps that made them did so for every example (:mod:`fedweave.training.private`), and what
follows from their result says no more.

Figures are numbers derived from data as well: each is a constant, known (how many examples there are), or noised.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedweave.config import Config
from fedweave.federation.client import Client, Member
from fedweave.federation.steps import FIGURE, Answer, Asked, Figure, Reply, Summed
from fedweave.privacy.budget import Budget
from fedweave.privacy.masking import threshold
from fedweave.schema import PrivacyFigures
from fedweave.streams import stream_key
from fedweave.training.batch import Lane, Shield
from fedweave.training.private import normal
from fedweave.training.schedule import drawn_schedule


class Noise:
    """The filter of the exit."""

    def __init__(self, config: Config):
        self.config, self.budget = config, Budget(config)

    def __call__(self, step: Reply, asked: Asked, client: Client, answer: Answer) -> Answer:
        key, expected = self._key(step, asked, client), step.figures(asked)
        masked = self.config.federation.secure_aggregation and isinstance(step, Summed)
        share = _share(client) if masked and self.config.privacy.level == "client" else 1.0
        figures = {
            name: self._told(step, name, expected[name], fact, key, share) for name, fact in answer.figures.items()
        }
        if self.config.privacy.level == "client" and answer.parts and not masked:
            return Answer(self._noised(step, asked, replace(answer, figures=figures), key), figures)
        return replace(answer, figures=figures)

    def summed(
        self, step: Summed, asked: Asked, client: Client, summands: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """level=client under masks: what a client adds to a sum is clipped as a whole, zeros included, and has its
        share of the noise that the sum needs. Figures were noised before, or are the same for all."""
        key, clip, sent = self._key(step, asked, client), self.config.privacy.clip, dict(summands)
        shapes = {name: shape for name, shape in step.totals(asked).items() if not name.startswith(FIGURE)}
        if not shapes:
            return sent
        given = {name: summands[name].double().nan_to_num(0.0, 0.0, 0.0) for name in shapes if name in summands}
        norm = math.sqrt(sum(float(values.square().sum()) for values in given.values()))
        deviation = self.budget.noise(step.name) * clip * _share(client)
        device = next((values.device for values in given.values()), torch.device("cpu"))
        for name, shape in shapes.items():
            noise = normal(torch.empty(shape, device=device), deviation, *key, name).double()
            values = given.get(name)
            clipped = 0.0 if values is None else values.to(device) * min(1.0, clip / max(norm, 1e-30))
            sent[name] = clipped + noise
        return sent

    def _key(self, step: Reply, asked: Asked, client: Client) -> tuple[int | str, ...]:
        return client.secret, self.config.seed, step.name, asked.question.facts["t"], client.index

    def _told(
        self, step: Reply, name: str, figure: Figure, fact: Any, key: tuple[int | str, ...], share: float
    ) -> Any:
        if figure.veil is not None:
            return figure.veil
        if figure.examples and self.config.privacy.level == "client":
            return [type(n)(min(n, 1)) for n in fact] if isinstance(fact, list) else min(fact, 1)
        if figure.spread:
            deviation = self.budget.noise(step.name) * figure.spread * share
            noised = float(fact) + float(normal(torch.zeros(()), deviation, *key, name))
            return min(max(noised, figure.low), figure.high) if share == 1 else noised
        return fact

    def _noised(
        self, step: Reply, asked: Asked, answer: Answer, key: tuple[int | str, ...]
    ) -> dict[str, torch.Tensor]:
        """All tensors of the answer, together no longer than the clip, with noise. What a client has of several
        adapters of one expert is their mean; a start is how far it has moved."""
        parts, moved = step.parts(asked, answer.figures), {}
        for name, part in parts.items():
            values = answer.parts[name].double()
            values = values.mean(0, keepdim=True) if part.rows else values
            origin = torch.zeros(()) if part.origin is None else part.origin
            moved[name] = (values - origin.to(values)).nan_to_num(0.0, 0.0, 0.0)  # a diverged client tells nothing
        clip = self.config.privacy.clip
        norm = math.sqrt(sum(float(values.square().sum()) for values in moved.values()))
        deviation = self.budget.noise(step.name) * clip
        sent = {}
        for name, values in moved.items():
            noise = normal(torch.empty(values.shape), deviation, *key, name)
            noised = values * min(1.0, clip / max(norm, 1e-30)) + noise.to(values)
            start = parts[name].origin
            sent[name] = _cast(noised if start is None else noised + start.to(noised), parts[name].dtype)
        return sent


def _share(client: Client) -> float:
    """Of the noise that a sum needs: as many as must answer for it to open have all of it."""
    assert client.party is not None
    return 1 / math.sqrt(threshold(len(client.party.keys)))


def _cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As the step sends them; half precision ends early."""
    most = torch.finfo(dtype).max
    return values.clamp(-most, most).to(dtype)


def noised_reach(config: Config, step: str, size: int) -> tuple[float, str]:
    """The longest that ``size`` numbers of an honest answer are: the clip, and noise, which is beyond this once in
    a billion answers."""
    clip, noise = config.privacy.clip, Budget(config).noise(step)
    rounded = clip * (1 + 1e-3)  # precisions of messages, and the order of sums
    return rounded + clip * noise * (math.sqrt(size) + 6), "the longest that a clipped answer is with its noise"


def shielded(lane: Lane, config: Config, client: Client, step: str, batch: int) -> Lane:
    """level=example: this lane, with examples that are drawn by themselves, clipped and hidden in noise."""
    if config.privacy.level != "example":
        return lane
    pool = np.sort(np.concatenate(client.buckets))
    shield = shield_of(config, client, step, batch, lane.key)
    schedule = drawn_schedule(pool, len(lane.schedule), shield.expected / len(pool), shield.key)
    return replace(lane, schedule=schedule, shield=shield)


def shield_of(config: Config, client: Client, step: str, batch: int, key: tuple[int | str, ...]) -> Shield:
    noise, expected = Budget(config).noise(step, len(client)), float(min(batch, len(client)))
    return Shield(noise, config.privacy.clip, expected, stream_key("shield", client.secret, step, *key))


def known_sizes(config: Config, sizes: list[int]) -> list[int]:
    """Of a client's buckets, as the server knows them."""
    return [1 for _ in sizes] if config.privacy.level == "client" else sizes


# -------------------------------------------------------------------------------------- what the server tells of it


def privacy_figures(
    config: Config, members: Sequence[Member], answered: Mapping[str, Mapping[str, int]]
) -> PrivacyFigures:
    """The guarantee, and what the client that has spent most has spent of it, by what the server has asked."""
    private, budget = config.privacy, Budget(config)
    sizes = {m.name: 0 if private.level == "client" else sum(m.sizes) for m in members}
    noises = [budget.noise("train", examples) for examples in sizes.values()]
    spent = [budget.spent(answered.get(name, {}), examples) for name, examples in sizes.items()]
    return {
        "level": private.level, "epsilon": private.epsilon, "delta": private.delta, "clip": private.clip,
        "noise": [min(noises), max(noises)], "spent": max(spent),
    }  # fmt: skip
