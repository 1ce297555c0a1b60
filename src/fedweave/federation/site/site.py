"""A site answers questions: the same client code as in a simulation, on one client.

Its rows, features, buckets and labels stay in this process; what leaves, leaves by :mod:`fedweave.federation.exit`.
"""

import copy
import secrets
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch

import fedweave
from fedweave.backbone.features import cached_features
from fedweave.backbone.load import Backbone, load_backbone
from fedweave.backbone.prompts import PromptFormat
from fedweave.config import BackboneConfig, Config, from_tree
from fedweave.console import Console
from fedweave.data.examples import Example
from fedweave.errors import UserError
from fedweave.federation import masks
from fedweave.federation.admission import Sealed
from fedweave.federation.checkpoint import load_checkpoint, save_checkpoint
from fedweave.federation.client import Client
from fedweave.federation.engines.in_process import InProcessEngine
from fedweave.federation.hello import Hello
from fedweave.federation.message import Message, NoAnswer
from fedweave.federation.method import Method
from fedweave.federation.news import News
from fedweave.federation.private import known_sizes
from fedweave.federation.site.feed import SiteFeed, read_saved
from fedweave.federation.site.floors import Declined, check_buckets, check_model, check_question
from fedweave.federation.site.ledger import Ledger, Sums
from fedweave.federation.site.settings import own_files
from fedweave.federation.site.source import Source
from fedweave.federation.steps import Asked
from fedweave.files import recover_folder
from fedweave.json_files import Damaged
from fedweave.settings import read_yaml
from fedweave.training.batch import ClientData

BuildMethod = Callable[[Config], Method]
_MEMORY = "memory"  # the site's own folder for what nobody else has


class Remembered(TypedDict):
    """Beside its tensors."""

    t: int  # the round
    pace: float | None  # and the share of the rates at which it was trained


class Models:
    """The loaded backbone, shared by the simulated sites of a process. Federations may render prompts differently:
    each gets its own view of the same weights."""

    def __init__(self) -> None:
        self._views: dict[BackboneConfig, Backbone] = {}

    def get(self, config: BackboneConfig) -> Backbone:
        if config in self._views:
            return self._views[config]
        own = (own_files(config), config.weights)
        same = next((view for known, view in self._views.items() if (own_files(known), known.weights) == own), None)
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


@dataclass
class Session:
    """The site's part in one federation."""

    key: tuple[Config, int, str]  # settings, index, federation
    method: Method
    engine: InProcessEngine  # one client, whose answers leave the process
    feed: SiteFeed  # its rows over the rounds

    @property
    def client(self) -> Client:
        return self.engine.members[0]


class Site:
    def __init__(self, source: Source, models: Models, build_method: BuildMethod, console: Console):
        self.source, self.models, self.build_method, self.console = source, models, build_method, console
        self.session: Session | None = None
        self.ledger = Ledger(source.state / "privacy.json" if source.state is not None else None)
        self.sums = Sums(source.state / "sums.json" if source.state is not None else None)

    def answer(self, sealed: Sealed) -> Message:
        """The answer, or one sentence that says why there is none and nothing of the site. A question that cannot
        be opened is the server's fault, and no reason to stop."""
        try:
            return self.reply(sealed if isinstance(sealed, Message) else sealed())
        except (Declined, NoAnswer) as error:
            self.console.warn(str(error))
            return Message.silent(str(error))
        except Exception as error:  # what went wrong here may quote a row or a path: it stays here
            self.console.warn(str(error) if isinstance(error, UserError) else traceback.format_exc())
            return Message.silent(f"{type(error).__name__}; the site's own log says more")

    def reply(self, question: Message) -> Message:
        return self.hello(question) if question.facts["step"] == Hello.name else self._answer(question)

    def rest(self) -> None:
        """Take the experts off a backbone that others use too."""
        if self.session is not None:
            self.session.engine.detach()

    def hello(self, question: Message) -> Message:
        """Who is there, with which model. No row has been looked at yet."""
        config = read_config(question)
        check_question(self.source.floors, config, question)
        backbone = self.models.get(self.source.backbone(config.backbone))
        check_model(self.source.floors, backbone.fingerprint)
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
        session, floors = self._session(question), self.source.floors
        check_question(floors, session.key[0], question)
        check_model(floors, session.engine.backbone.fingerprint)
        if self.source.secret:
            session.client.secret = secrets.randbits(128)
        steps = [*session.method.steps(), *masks.STEPS]
        step = next((s for s in steps if s.name == question.facts["step"]), None)
        if step is None:
            raise Declined("it does not know this question; is its fedweave of another version?")
        if question.facts["assignment"]:
            self._align(session, question)
        if step.name not in masks.NAMES:
            self.ledger.spend(session.key[2], session.key[0], step.name, floors)
        client, engine = session.client, session.engine
        client.held = session.feed.held
        alone = self.source.secret and not session.key[0].federation.secure_aggregation
        if alone and (sums := step.sums(len(client.rows))):
            self.sums.tell([client.data.examples[i].prompt.ids.tobytes() for i in client.rows], sums)
        asked = [Asked(session.client, question, engine.layers, engine.width)]
        ((_, message),) = engine.answers(step, asked, question)
        check_buckets(floors, [client.data.distinct(bucket) for bucket in client.buckets])
        self._remember(session)
        return message.spoken()

    # ---------------------------------------------------------------------------------- what the site holds

    def _session(self, question: Message) -> Session:
        """The site's client in this federation, with the rows that the server knows of; made when first asked for.
        They are others than it has where an answer got lost, or the server has gone back."""
        key = (read_config(question), question.facts["index"], question.facts["federation"])
        version = question.facts.get("version", 0)
        if self.session is None or self.session.key != key or self.session.client.version != version:
            self.rest()
            self.session = None  # whatever happens: what it was is over
            self.session = self._join(*key, version)
        return self.session

    def _join(self, config: Config, index: int, federation: str, version: int) -> Session:
        backbone, method = self.models.get(self.source.backbone(config.backbone)), self.build_method(config)
        labels = self.source.labels(config) if method.uses_labels else None
        if method.uses_labels and labels is None:
            raise UserError(f"{config.method} is told every example's kind: it runs in simulations only.")

        def encode(rows: Sequence[Example]) -> tuple[list[Example], ClientData]:
            kept, encoded = backbone.prompts.encode_fitting(rows, config.data.long_answers, self.console.warn)
            if labels:
                kinds = torch.tensor([labels.index(row.kind) for row in kept], dtype=torch.long)
                features = torch.nn.functional.one_hot(kinds, len(labels)).float()
            else:
                features = cached_features(backbone, [e.prompt for e in encoded], self.console)
            return kept, ClientData(self.source.name, encoded, features)

        folder = self._folder(federation)
        saved = read_saved(folder, version) if config.lives else None
        if version and saved is None:
            raise Declined("it has kept no buckets of the rows that it is asked about; start the federation anew.")
        feed = SiteFeed(self.source, config, index, encode, self.console, saved)
        if not len(feed.here):
            raise UserError("no training row is left after rows with too long answers were dropped.")
        client = Client(index, feed.here, held=feed.held, feed=feed, least=self.source.floors.least)
        if saved is not None:
            feed.restore(client, saved)
        if folder is not None:
            recover_folder(folder / _MEMORY)
        if folder is not None and (folder / _MEMORY).is_dir():
            try:
                tensors, meta = load_checkpoint(folder / _MEMORY, Remembered)
            except Damaged as error:
                raise UserError(
                    f"what this site remembers, {folder / _MEMORY}, is damaged ({error}); restore it, or remove "
                    "the folder to go on without it."
                ) from None
            remembered = {name: t.to(backbone.device) for name, t in tensors.items()}
            client.memory.load(remembered, meta["t"], meta["pace"])
        engine = InProcessEngine(backbone, [client], config, self.console, travels=True)
        return Session((config, index, federation), method, engine, feed)

    def _align(self, session: Session, question: Message) -> None:
        """Give the client's buckets the experts that they were given."""
        client, assignment = session.client, list(question.facts["assignment"])
        formed = not client.buckets
        if formed:  # the site was away: the same rows give the same buckets
            session.method.form_buckets(session.engine.compute, [client])
        own, told = known_sizes(session.key[0], client.sizes), list(question.facts["sizes"])
        asked = question.facts["step"] == News.name and not formed  # what has gone from its buckets
        if len(own) != len(told) or (own != told and not asked):
            raise Declined("its data has changed since this federation was aligned; restore it, or start anew.")
        client.assignment = assignment

    def _remember(self, session: Session) -> None:
        """Put what only this site knows where a restart finds it."""
        memory, folder = session.client.memory, self._folder(session.key[2])
        if folder is not None and session.key[0].lives:
            session.feed.save(folder, session.client)
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
