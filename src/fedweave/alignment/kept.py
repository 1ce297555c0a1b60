"""The signatures that stay with a model, so that kinds of later data can be compared with those that it knows."""

from dataclasses import dataclass

import torch

from fedweave.config import Config
from fedweave.errors import UserError


@dataclass
class KeptSignatures:
    """Of a model's experts, and how they were made."""

    means: torch.Tensor  # [M, D] of the unit signatures of every expert's buckets
    own: list[float]  # how far each aligned bucket lay from the others of its expert, ascending
    halfway: float  # from an expert's own buckets to the next expert's
    buckets: list[int]  # behind each mean
    made: dict[str, float]  # as in how_made


def how_made(config: Config) -> dict[str, float]:
    """What two signatures must have in common to be compared: the start A₀, and the steps from there."""
    discovery = config.discovery
    rate = config.training.lr if discovery.warmup_lr == "auto" else discovery.warmup_lr
    return {
        "seed": config.seed,
        "discovery.sketch": discovery.sketch,
        "discovery.warmup_steps": discovery.warmup_steps,
        "discovery.warmup_batch": discovery.warmup_batch,
        "discovery.warmup_lr": rate,
    }


def require_comparable(kept: KeptSignatures | None, config: Config) -> KeptSignatures:
    """The signatures, if new buckets can be compared with them."""
    if kept is None:
        raise UserError(
            f"init={config.init} has no signatures to tell new kinds from: a run with living.notice=open or ask "
            "keeps them; set living.notice=off to go on without."
        )
    for key, value in how_made(config).items():
        if kept.made[key] != value:
            raise UserError(
                f"init={config.init} has signatures of {key}={kept.made[key]:g}; set {key}={kept.made[key]:g}, or "
                "living.notice=off."
            )
    return kept
