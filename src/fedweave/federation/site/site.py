"""A site answers questions: the same client code as in a simulation, on one client.

Its rows, features, buckets and labels stay in this process; what leaves, leaves by :mod:`fedweave.federation.exit`.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

import fedweave
from fedweave.backbone.encode import encode
from fedweave.backbone.features import cached_features
from fedweave.backbone.load import Backbone, load_backbone
from fedweave.backbone.prompts import PromptFormat
from fedweave.config import BackboneConfig, Config, from_tree
from fedweave.console import Console
from fedweave.errors import UserError, first_line
from fedweave.federation.checkpoint import load_checkpoint, save_checkpoint
from fedweave.federation.client import Client
from fedweave.federation.engines.in_process import InProcessEngine
from fedweave.federation.hello import Hello
from fedweave.federation.message import Message
from fedweave.federation.method import Method
from fedweave.federation.site.sources import Source
from fedweave.federation.steps import Asked
from fedweave.settings import read_yaml
from fedweave.training.batch import ClientData

BuildMethod = Callable[[Config], Method]
_MEMORY = "memory"  # the site's own folder for what nobody else has


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


class SiteEngine(InProcessEngine):
    """One client, whose answers leave the process."""

    travels = True


@dataclass
class Session:
    """The site's part in one federation."""

    key: tuple[Config, int, str]  # settings, index, federation
    method: Method
    engine: SiteEngine
    buckets: list[np.ndarray] = field(default_factory=list)  # all of them, also those that no expert serves

    @property
    def client(self) -> Client:
        return self.engine.members[0]


class Site:
    """Answers the server's questions."""

    def __init__(self, source: Source, models: Models, build_method: BuildMethod, console: Console):
        self.source, self.models, self.build_method, self.console = source, models, build_method, console
        self.session: Session | None = None

    def answer(self, question: Message) -> Message:
        """The answer, or one sentence that says why there is none."""
        try:
            return self.hello(question) if question.facts["step"] == Hello.name else self._answer(question)
        except UserError as error:
            self.console.warn(str(error))
            return Message(facts={"error": str(error)})
        except Exception as error:
            self.console.warn(traceback.format_exc())
            return Message(facts={"error": f"{type(error).__name__}: {first_line(error)}"})

    def rest(self) -> None:
        """Take the experts off a backbone that others use too."""
        if self.session is not None:
            self.session.engine.detach()

    def hello(self, question: Message) -> Message:
        """Who is there, with which model. No row has been looked at yet."""
        config = read_config(question)
        backbone = self.models.get(self.source.backbone(config.backbone))
        layers = backbone.linear_layers(config.experts.target_modules)
        labels = self.source.labels(config) if self.build_method(config).uses_labels else None
        return Message(facts={
            "step": Hello.name, "t": 0, "name": self.source.name, "version": fedweave.__version__,
            "fingerprint": backbone.fingerprint, **backbone.identity,
            "width": len(labels) if labels else backbone.width, "layers": list(layers),
            "inputs": [layer.in_features for layer in layers.values()],
            "outputs": [layer.out_features for layer in layers.values()],
        })  # fmt: skip

    def _answer(self, question: Message) -> Message:
        session = self._session(question)
        step = next((s for s in session.method.steps() if s.name == question.facts["step"]), None)
        if step is None:
            raise UserError("it does not know this question; is its fedweave of another version?")
        if question.facts["assignment"]:
            self._align(session, question)
        engine = session.engine
        asked = [Asked(session.client, question, engine.layers, engine.width)]
        ((_, message),) = engine.answers(step, asked, question)
        if not question.facts["assignment"]:
            session.buckets = session.client.buckets
        self._remember(session)
        return message

    # ---------------------------------------------------------------------------------- what the site holds

    def _session(self, question: Message) -> Session:
        """The site's client in this federation, made when first asked for."""
        key = (read_config(question), question.facts["index"], question.facts["federation"])
        if self.session is None or self.session.key != key:
            self.rest()
            self.session = self._join(*key)
        return self.session

    def _join(self, config: Config, index: int, federation: str) -> Session:
        backbone, method = self.models.get(self.source.backbone(config.backbone)), self.build_method(config)
        labels = self.source.labels(config) if method.uses_labels else None
        if method.uses_labels and labels is None:
            raise UserError(f"{config.method} is told every example's kind: it runs in simulations only.")
        parts = []
        for rows in self.source.rows(config, index):
            kept, encoded = encode(backbone, rows, config.data.long_answers, self.console)
            if labels:
                kinds = torch.tensor([labels.index(row.kind) for row in kept], dtype=torch.long)
                features = torch.nn.functional.one_hot(kinds, len(labels)).float()
            else:
                features = cached_features(backbone, [e.prompt for e in encoded], self.console)
            parts.append(ClientData(self.source.name, encoded, features))
        if not len(parts[0]):
            raise UserError("no training row is left after rows with too long answers were dropped.")
        client = Client(index, parts[0], held=parts[1])
        if (folder := self._folder(federation)) is not None and (folder / _MEMORY).is_dir():
            tensors, meta = load_checkpoint(folder / _MEMORY)
            client.memory.load(
                {name: t.to(backbone.device) for name, t in tensors.items()}, meta["t"], meta.get("pace")
            )
        return Session((config, index, federation), method, SiteEngine(backbone, [client], config, self.console))

    def _align(self, session: Session, question: Message) -> None:
        """Give the client the buckets that alignment saw and the experts that they were given."""
        if not session.buckets:  # the site was away: the same rows give the same buckets
            session.method.form_buckets(session.engine.compute, [session.client])
            session.buckets = session.client.buckets
        if [len(bucket) for bucket in session.buckets] != list(question.facts["sizes"]):
            raise UserError("its data has changed since this federation was aligned; restore it, or start anew.")
        assignment = question.facts["assignment"]
        pairs = [(b, m) for b, m in zip(session.buckets, assignment, strict=True) if m >= 0]
        session.client.buckets, session.client.assignment = [b for b, _ in pairs], [m for _, m in pairs]

    def _remember(self, session: Session) -> None:
        """Put what only this site knows where a restart finds it."""
        memory, folder = session.client.memory, self._folder(session.key[2])
        if folder is not None and memory.after:
            folder.mkdir(parents=True, exist_ok=True)
            save_checkpoint(folder, _MEMORY, memory.tensors(), {"t": memory.round, "pace": memory.pace})

    def _folder(self, federation: str) -> Path | None:
        if self.source.state is None:
            return None
        safe = "".join(c for c in federation if c.isalnum())[:64]
        return self.source.state / "federations" / safe


def read_config(question: Message) -> Config:
    """The federation's settings, checked like any config file."""
    return from_tree(read_yaml(str(question.facts["config"]), "the federation's config"))
