"""A site answers letters: the same client code as in a simulation, on one client.

Its rows, features, buckets and labels stay in this process. An answer is one of :mod:`fedweave.federation.wire`'s.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedweave
from fedweave.aggregation.rules import ClientAverage
from fedweave.backbone.encode import encode
from fedweave.backbone.features import cached_features
from fedweave.backbone.load import Backbone, load_backbone
from fedweave.backbone.prompts import PromptFormat
from fedweave.config import BackboneConfig, Config, from_tree
from fedweave.console import Console
from fedweave.errors import UserError, first_line
from fedweave.federation.checkpoint import load_checkpoint, save_checkpoint
from fedweave.federation.client import Client
from fedweave.federation.engine import InProcessEngine
from fedweave.federation.evaluate import local_loss
from fedweave.federation.letters import Letter
from fedweave.federation.parcel import expert_name
from fedweave.federation.site.sources import Source
from fedweave.federation.wire import (
    parcel_letter,
    prototypes_letter,
    read_router,
    read_state,
    router_letter,
    to_arrays,
    to_tensors,
)
from fedweave.methods import build_method
from fedweave.methods.base import Method, ServerState
from fedweave.settings import read_yaml
from fedweave.training.batch import ClientData


class Models:
    """The loaded backbone, shared by the simulated sites of a process. Federations may render prompts differently:
    each gets its own view of the same weights."""

    def __init__(self) -> None:
        self._views: dict[BackboneConfig, Backbone] = {}

    def get(self, config: BackboneConfig) -> Backbone:
        if config in self._views:
            return self._views[config]
        same = next((view for known, view in self._views.items() if _files(known) == _files(config)), None)
        if same is None:
            self._views.clear()  # a site has room for one
            self._views[config] = load_backbone(config)
        else:
            view = copy.copy(same)
            for cached in ("identity", "fingerprint"):
                view.__dict__.pop(cached, None)
            view.prompts = PromptFormat(same.tokenizer, config)
            self._views[config] = view
        return self._views[config]


def _files(config: BackboneConfig) -> tuple[str | None, ...]:
    return config.model, config.revision, config.device, config.dtype


@dataclass
class Seat:
    """The site's place in one federation: its client, on a bench of its own."""

    method: Method
    bench: InProcessEngine
    client: Client
    buckets: list[np.ndarray]  # all of them, also those that no expert serves
    own_round: int = -1  # the last round that moved the client's own parameters
    before: torch.Tensor | None = None  # what they were before it


class Site:
    """Answers the server's letters."""

    def __init__(self, source: Source, models: Models, console: Console):
        self.source, self.models, self.console = source, models, console
        self._seat: tuple[tuple, Seat] | None = None
        self._steps: dict[str, Callable[[Letter], Letter]] = {
            "hello": self.hello, "discover": self.discover, "start": self.start, "warm": self.warm,
            "train": self.train, "evaluate": self.evaluate,
        }  # fmt: skip

    def answer(self, letter: Letter) -> Letter:
        """The answer, or one sentence that says why there is none."""
        step = self._steps.get(str(letter.facts.get("step")))
        if step is None:
            return Letter(facts={"error": "it does not know this question; is its fedweave of another version?"})
        try:
            return step(letter)
        except UserError as error:
            self.console.warn(str(error))
            return Letter(facts={"error": str(error)})
        except Exception as error:
            self.console.warn(traceback.format_exc())
            return Letter(facts={"error": f"{type(error).__name__}: {first_line(error)}"})

    def rest(self) -> None:
        """Take the experts off a backbone that others use too."""
        if self._seat is not None:
            self._seat[1].bench.detach()

    # ---------------------------------------------------------------------------------- the questions

    def hello(self, letter: Letter) -> Letter:
        """Who is there, with which model. No row has been looked at yet."""
        config = read_config(letter)
        backbone = self.models.get(self.source.backbone(config.backbone))
        layers = backbone.linear_layers(config.experts.target_modules)
        labels = self.source.labels(config) if build_method(config).uses_labels else None
        return Letter(facts={
            "name": self.source.name, "version": fedweave.__version__, "fingerprint": backbone.fingerprint,
            **backbone.identity, "width": len(labels) if labels else backbone.width, "layers": list(layers),
            "inputs": [layer.in_features for layer in layers.values()],
            "outputs": [layer.out_features for layer in layers.values()],
        })  # fmt: skip

    def discover(self, letter: Letter) -> Letter:
        seat = self.seat(letter)
        (told,) = seat.method.discover(seat.bench, [seat.client])
        seat.buckets = seat.client.buckets
        return prototypes_letter(told)

    def start(self, letter: Letter) -> Letter:
        """The warmup adapters, averaged over the buckets that share an expert: no single one leaves."""
        seat = self.aligned(letter)
        if seat.bench.spool is None:  # the site was away in between
            list(seat.method.discover(seat.bench, [seat.client]))
            seat = self.aligned(letter)
        means: dict[int, ClientAverage] = {}
        for m, adapter, buckets in seat.bench.starts(seat.method):
            means.setdefault(m, ClientAverage(len(adapter), adapter.device)).add(adapter, buckets)
        arrays = to_arrays({expert_name(m): mean.step() for m, mean in means.items()})
        return Letter(arrays, {"experts": list(means), "buckets": [int(mean.weight) for mean in means.values()]})

    def warm(self, letter: Letter) -> Letter:
        seat = self.aligned(letter)
        router, facts = read_router(letter), dict[str, Any](letter.facts)
        assert router is not None
        phi = to_tensors(letter.arrays)["phi"].to(seat.bench.device)
        told = seat.method.warm_router(seat.bench, [seat.client], router, phi, facts["t"], facts["contrast"])
        ((delta, samples),) = told
        return router_letter(delta, samples)

    def train(self, letter: Letter) -> Letter:
        seat = self.aligned(letter)
        state, t = read_state(letter, seat.bench)
        if seat.own_round == t:  # the same round again: its first answer did not count
            seat.client.own = seat.before
        (update,) = seat.method.local_updates(seat.bench, state, [seat.client], t)
        residuals = seat.client.residuals
        parcel = seat.method.courier(state).seal(update, t, seat.bench.identity, residuals)
        if parcel.kept is not None:
            self._keep(letter, seat, state, seat.method.shared(state.layout), parcel.kept, t)
        if residuals.after:
            self._store(letter.facts["federation"], "residuals", residuals.tensors(), {"t": t})
        return parcel_letter(parcel)

    def evaluate(self, letter: Letter) -> Letter:
        seat = self.aligned(letter)
        state, _ = read_state(letter, seat.bench)
        loss = local_loss(seat.bench, seat.method, seat.client, state)
        return Letter(facts={"total": loss.total, "entropy": loss.entropy, "count": loss.count})

    # ---------------------------------------------------------------------------------- what the site holds

    def seat(self, letter: Letter) -> Seat:
        """The site's client in this federation, made when first asked for."""
        config = read_config(letter)
        key = (config, letter.facts["index"], letter.facts["federation"])
        if self._seat is None or self._seat[0] != key:
            self.rest()
            self._seat = (key, self._take_seat(config, *key[1:]))
        return self._seat[1]

    def _take_seat(self, config: Config, index: Any, federation: Any) -> Seat:
        backbone = self.models.get(self.source.backbone(config.backbone))
        method = build_method(config)
        labels = self.source.labels(config) if method.uses_labels else None
        if method.uses_labels and labels is None:
            raise UserError(f"{config.method} is told every task label: it runs in simulations only.")
        parts = []
        for rows in self.source.rows(config, index):
            kept, encoded = encode(backbone, rows, config.data.long_answers, self.console)
            if labels:
                tasks = torch.tensor([labels.index(row.task) for row in kept], dtype=torch.long)
                features = torch.nn.functional.one_hot(tasks, len(labels)).float()
            else:
                features = cached_features(backbone, [e.prompt for e in encoded], self.console)
            parts.append(ClientData(self.source.name, encoded, features))
        if not len(parts[0]):
            raise UserError("no training row is left after rows with too long answers were dropped.")
        client = Client(index, parts[0], held=parts[1])
        seat = Seat(method, InProcessEngine(backbone, [client], config, self.console), client, [])
        if (folder := self._folder(federation)) is not None and (folder / "own").is_dir():
            tensors, meta = load_checkpoint(folder / "own")
            client.own, seat.before = (tensors[k].to(backbone.device) for k in ("own", "before"))
            seat.own_round = meta["t"]
        if folder is not None and (folder / "residuals").is_dir():
            tensors, meta = load_checkpoint(folder / "residuals")
            client.residuals.load(tensors, meta["t"])
        return seat

    def aligned(self, letter: Letter) -> Seat:
        """The seat with the buckets that alignment saw and the experts that it gave them."""
        seat = self.seat(letter)
        if not seat.buckets:  # the site was away: the same rows give the same buckets
            seat.method.form_buckets(seat.bench, [seat.client])
            seat.buckets = seat.client.buckets
        facts: dict[str, Any] = letter.facts
        if [len(bucket) for bucket in seat.buckets] != list(facts["sizes"]):
            raise UserError("its data has changed since this federation was aligned; restore it, or start anew.")
        pairs = [(b, m) for b, m in zip(seat.buckets, facts["assignment"], strict=True) if m >= 0]
        seat.client.buckets, seat.client.assignment = [b for b, _ in pairs], [m for _, m in pairs]
        return seat

    def _keep(
        self,
        letter: Letter,
        seat: Seat,
        state: ServerState,
        shared: torch.Tensor | None,
        kept: torch.Tensor,
        t: int,
    ) -> None:
        """Move the client's own parameters, and put them on the disk: nobody else has them."""
        assert seat.client.own is not None and shared is not None
        seat.before, seat.own_round = seat.client.own, t
        seat.client.own = seat.before + torch.where(shared.to(kept.device), 0.0, kept)
        self._store(letter.facts["federation"], "own", {"own": seat.client.own, "before": seat.before}, {"t": t})

    def _store(self, federation: Any, name: str, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
        """Put what only this site knows where a restart finds it."""
        if (folder := self._folder(federation)) is not None:
            folder.mkdir(parents=True, exist_ok=True)
            save_checkpoint(folder, name, tensors, meta)

    def _folder(self, federation: Any) -> Path | None:
        if self.source.state is None:
            return None
        safe = "".join(c for c in str(federation) if c.isalnum())[:64]
        return self.source.state / "federations" / safe


def read_config(letter: Letter) -> Config:
    """The federation's settings, checked like any config file."""
    return from_tree(read_yaml(str(letter.facts["config"]), "the federation's config"))
