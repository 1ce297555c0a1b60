"""A checkpoint as read from disk, and whether it belongs to a config and a backbone."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch
from typing_extensions import NotRequired

from fedweave.backbone.catalog import other_weights
from fedweave.backbone.load import Backbone
from fedweave.config import Config
from fedweave.errors import UserError
from fedweave.experts.layout import AdapterLayout, Shaped
from fedweave.federation.state import ServerState
from fedweave.router.mlp import RouterLayout
from fedweave.schema import RouterShape
from fedweave.settings import flatten, to_tree

# Where a run's data and model lie, how columns are called, what computes: fingerprints tell whether it is the same.
PLACES = ("data.path", "data.fields", "backbone.model", "backbone.revision", "backbone.device", "backbone.weights")
# Keys that do not alter what was already computed.
LATER = (
    "output",
    "loggers",
    "finish",
    "engine",
    "evaluation",
    "living.notice",
    "living.alone",
    "training.rounds",
    "training.clients_per_step",
    "training.checkpointing",
    "federation.min_answers",
    "federation.repeats",
    "federation.sites",
    "federation.deadline",
    "federation.patience",
    "federation.test",
    "federation.fingerprint",
    "federation.quarantine",
)
FREE_KEYS = (*LATER, *PLACES)  # what a resumed run may change


class CheckpointMeta(TypedDict):
    """meta.json of a round's checkpoint; state.safetensors beside it has the tensors."""

    completed: int
    best_round: int
    best_loss: float
    seconds: float  # spent so far, over all sessions
    since: int  # as in Progress
    setbacks: int
    pace: float
    rank: int
    experts: int
    shared: int
    router: RouterShape | None
    shares: list[float]
    norms: dict[str, list[float]]
    standing: NotRequired[dict[str, float]]
    doubts: dict[str, int]
    bucket_doubts: NotRequired[dict[str, list[int]]]
    answered: dict[str, dict[str, int]]  # client -> question -> how often it was asked
    report: dict[str, object]  # an AlignmentReport
    clients: list[dict[str, object]]  # as they record themselves
    metrics_bytes: int  # length of metrics.jsonl
    metrics_sha256: str
    settings: str  # a hash of what a resumed run may not change
    backbone: str  # the fingerprint
    state_sha256: str


@dataclass
class Snapshot:
    """A checkpoint as read from disk."""

    tensors: dict[str, torch.Tensor]
    meta: CheckpointMeta
    path: Path

    def check(self, config: Config, backbone: Backbone) -> None:
        """Refuse to mix a checkpoint with another config or another backbone."""
        self.check_config(config)
        if self.meta["backbone"] != backbone.fingerprint:
            raise UserError(
                f"checkpoint {self.path} was trained on another backbone, tokenizer or prompt rendering than "
                f"{backbone.name} as loaded now; {other_weights(backbone.name)} (run and resume: backbone.model=…, "
                "backbone.weights=…)."
            )

    def check_config(self, config: Config) -> None:
        """As much of it as needs no backbone: a server over sites meets them long after it has begun to write."""
        if self.meta["settings"] != config_hash(config):
            raise UserError(f"checkpoint {self.path} belongs to another config than the run's config.yaml.")
        if config.living.notice != "off" and "signatures" not in self.tensors:
            raise UserError(
                "this run has kept no signatures to tell new kinds from, since it began with living.notice=off; go "
                "on with off, or start anew."
            )

    def state(self, layers: Mapping[str, Shaped], device: torch.device, prefix: str = "") -> ServerState:
        """The last round's state."""
        names = (
            "theta",
            "phi",
            "private",
            "signatures",
            "known",
        )  # what the best round has in common is there once
        parts = {name: self.tensors.get(f"{prefix}{name}", self.tensors.get(name)) for name in names}
        on_device = {name: t.to(device) for name, t in parts.items() if t is not None}
        meta, theta, phi = self.meta, on_device["theta"], on_device.get("phi")
        layout = AdapterLayout.of(layers, meta["rank"], meta["experts"], meta["shared"])
        router = RouterLayout(**meta["router"]) if meta["router"] else None
        if theta.shape != (layout.size,) or (phi is None if router else phi is not None):
            raise self._damaged()
        if router is not None and phi is not None and phi.shape != (len(meta["shares"]), router.size):
            raise self._damaged()
        return ServerState(
            layout=layout,
            router=router,
            theta=theta,
            phi=phi,
            shares=meta["shares"],
            pace=meta["pace"],
            private=on_device.get("private"),
            signatures=on_device.get("signatures"),
            known=on_device.get("known"),
            norms=meta["norms"],
            standing=meta.get("standing", {}),
            doubts=meta["doubts"],
            bucket_doubts=meta.get("bucket_doubts", {}),
            report=meta["report"],
        )

    def _damaged(self) -> UserError:
        return UserError(
            f"checkpoint {self.path} is damaged: its meta.json does not describe what its state.safetensors holds; "
            "go on from another one with --checkpoint ROUND."
        )

    def best(self, layers: Mapping[str, Shaped], device: torch.device) -> ServerState:
        """The state of the best round so far."""
        return self.state(layers, device, "best_" if self.meta["best_round"] != self.meta["completed"] else "")


def config_hash(config: Config) -> str:
    """A hash over the keys that decide results, where they differ from their defaults: a key that a later version
    adds leaves the runs of an earlier one alone."""
    defaults = flatten(to_tree(Config()))
    changed = {
        key: value
        for key, value in flatten(to_tree(config)).items()
        if value != defaults[key] and not is_one_of(key, FREE_KEYS)
    }
    return hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:32]


def is_one_of(key: str, keys: Sequence[str]) -> bool:
    """Whether a key is listed, by itself or with its section."""
    return any(key == one or key.startswith(f"{one}.") for one in keys)
