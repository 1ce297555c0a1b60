"""Everything a run stands on, loaded and checked before anything long starts or anything is written."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from fedweave.backbone.features import cached_features
from fedweave.backbone.load import Backbone, load_backbone
from fedweave.backbone.prompts import Encoded
from fedweave.config import BackboneConfig, Config
from fedweave.console import Console
from fedweave.data import FederatedData, load_data
from fedweave.data.clients import ClientWeights
from fedweave.data.examples import Example, Task
from fedweave.errors import UserError
from fedweave.federation.client import Client
from fedweave.federation.engines.distributed import ShardedEngine, world
from fedweave.federation.engines.in_process import InProcessEngine
from fedweave.federation.method import Method
from fedweave.training.batch import ClientData


@dataclass
class TestSet:
    """Held-out examples with what scoring needs. Labels stay on this side; no method sees a TestSet."""

    examples: list[Example]
    encoded: list[Encoded]
    features: torch.Tensor  # [n, d]
    clients: ClientWeights | None = None  # how much each row counts for each client, where they are known

    @property
    def labels(self) -> list[str]:
        return [e.task for e in self.examples]

    @property
    def kinds(self) -> list[str]:
        return [e.kind for e in self.examples]


@dataclass
class Workspace:
    """The data side and the model side of a run."""

    config: Config
    data: FederatedData
    backbone: Backbone
    engine: InProcessEngine
    validation: TestSet
    test: TestSet
    unseen: TestSet | None  # tasks that nobody trains on
    client_rows: list[list[Example]]  # for the audit, by client

    @property
    def client_labels(self) -> list[list[str]]:
        return [[e.task for e in rows] for rows in self.client_rows]

    @property
    def client_kinds(self) -> list[list[str]]:
        return [[e.kind for e in rows] for rows in self.client_rows]

    @property
    def tasks(self) -> dict[str, Task]:
        return self.data.tasks

    @property
    def unseen_tasks(self) -> dict[str, Task]:
        return self.data.unseen_tasks

    @property
    def notes(self) -> list[str]:
        return self.data.notes

    def disclose(self, method: Method) -> None:
        """What an upper bound or a reference is given and a method never is: labels, or all data in one place."""
        if method.uses_labels:
            self.reveal_labels()
        if method.gathers:
            self.gather()

    def gather(self) -> None:
        """One client with everybody's data."""
        parts = [client.data for client in self.engine.members]
        examples, features = [e for part in parts for e in part.examples], torch.cat([p.features for p in parts])
        self.engine.members = [Client(0, ClientData("everybody", examples, features, gathered=len(parts)))]
        self.client_rows = [[e for rows in self.client_rows for e in rows]]

    def reveal_labels(self) -> None:
        """Swap every feature for its kind, one-hot. Nobody can tell which expert an unseen task belongs to."""
        names = self.data.kinds()

        def one_hot(kinds: list[str]) -> torch.Tensor:
            return torch.nn.functional.one_hot(torch.tensor([names.index(x) for x in kinds]), len(names)).float()

        for client, kinds in zip(self.engine.members, self.client_kinds, strict=True):
            client.data.features = one_hot(kinds)
        for held in (self.validation, self.test):
            held.features = one_hot(held.kinds)
        self.unseen = None


@dataclass
class Prepared:
    """A workspace before its features: every check has been made, nothing long has run."""

    config: Config
    data: FederatedData
    backbone: Backbone
    groups: list[
        tuple[list[Example], list[Encoded]]
    ]  # clients in order, validation, test; unseen, if there are any

    def build(self, console: Console) -> Workspace:
        """Compute (or recall) the features and set the clients up."""
        prompts = [e.prompt for _, encoded in self.groups for e in encoded]
        features = cached_features(self.backbone, prompts, console)
        parts = features.split([len(encoded) for _, encoded in self.groups])
        names = list(self.data.clients)
        clients = [
            Client(i, ClientData(name, encoded, part))
            for i, (name, (_, encoded), part) in enumerate(
                zip(names, self.groups[: len(names)], parts[: len(names)], strict=True)
            )
        ]
        validation, test, *unseen = (
            TestSet(*group, part, ClientWeights(self.data.clients, group[0]))
            for group, part in zip(self.groups[len(names) :], parts[len(names) :], strict=True)
        )
        rows = [examples for examples, _ in self.groups[: len(names)]]
        processes = world()
        engine = (
            InProcessEngine(self.backbone, clients, self.config, console)
            if processes is None
            else ShardedEngine(self.backbone, clients, self.config, console, processes)
        )
        second = unseen[0] if unseen else None
        return Workspace(self.config, self.data, self.backbone, engine, validation, test, second, rows)


class Kept:
    """What the runs of a comparison share: the last backbone and the last prepared data. One of each, because a
    grid over backbones must not hold them all."""

    def __init__(self) -> None:
        self.backbone: tuple[BackboneConfig, Backbone] | None = None
        self.prepared: tuple[Any, Prepared] | None = None


def prepare(config: Config, console: Console, kept: Kept | None = None) -> Prepared:
    """Load data and backbone, tokenise, and complain about whatever is wrong."""
    kept = kept or Kept()
    key = (config.backbone, config.data, config.seed, config.evaluation.max_new_tokens)
    if kept.prepared is None or kept.prepared[0] != key:
        kept.prepared = (key, _prepare(config, console, kept))
    prepared = replace(kept.prepared[1], config=config)
    prepared.backbone.linear_layers(config.experts.target_modules)
    prepared.backbone.check_answer(config.evaluation.max_new_tokens, "evaluation.max_new_tokens")
    return prepared


def _prepare(config: Config, console: Console, kept: Kept) -> Prepared:
    data = load_data(config)
    for note in data.notes:
        console.say(f"note: {note}")
    if kept.backbone is None or kept.backbone[0] != config.backbone:
        kept.backbone = None  # free the old one first
        kept.backbone = (config.backbone, load_backbone(config.backbone))
    backbone = kept.backbone[1]
    if backbone.note:
        console.say(f"note: {backbone.name}: {backbone.note}.")
    held = [
        ("validation", data.validation),
        ("test", data.test),
        *([("unseen", data.unseen)] if data.unseen else []),
    ]
    parts = [*data.clients.items(), *held]
    fitting, long_answers = backbone.prompts.encode_fitting, config.data.long_answers
    groups = [fitting(rows, long_answers, console.warn) for _, rows in parts]
    for (name, _), (rows, _) in zip(parts, groups, strict=True):
        if not rows:
            raise UserError(
                f"{name!r} is empty after rows with too long answers were dropped; raise backbone.max_length."
            )
    truncated = sum(e.prompt.truncated or len(e.prompt.ids) > e.answer_start for _, es in groups for e in es)
    if truncated:
        console.warn(
            f"{truncated} prompts exceed backbone.max_length={config.backbone.max_length} and lose their beginning."
        )
    return Prepared(config, data, backbone, groups)
