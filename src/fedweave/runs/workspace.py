"""Everything a run stands on, loaded and checked before anything long starts or anything is written."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from fedweave.alignment.kept import require_comparable
from fedweave.backbone.features import cached_features
from fedweave.backbone.load import Backbone, load_backbone
from fedweave.backbone.prompts import Encoded
from fedweave.backbone.targets import spelled_out
from fedweave.config import BackboneConfig, Config
from fedweave.console import Console
from fedweave.data import FederatedData, load_data
from fedweave.data.changes import too_late
from fedweave.data.clients import ClientWeights
from fedweave.data.examples import Course, Example
from fedweave.data.hostile import ON_ROWS
from fedweave.errors import UserError
from fedweave.federation.client import Client
from fedweave.federation.engines.distributed import ShardedEngine, world
from fedweave.federation.engines.in_process import InProcessEngine
from fedweave.federation.hostile import boast
from fedweave.federation.method import Method
from fedweave.federation.recent import Recent
from fedweave.federation.state import ServerState
from fedweave.router.routed import RoutedExperts
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
class Scheduled:
    """A simulated client's rows over the rounds, as ``data.changes`` has them."""

    everything: ClientData  # all that it ever has, with features
    here: dict[int, list[int]]  # as in Course

    def version(self, t: int) -> int:
        """The round before which the last change up to round t (counted from 0) happened."""
        return max(number for number in self.here if number <= t + 1)

    def data(self, version: int) -> ClientData:
        return self.everything.part(self.here[version])


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
    rows: list[list[Example]]  # for the audit: all that each client ever has

    @property
    def client_rows(self) -> list[list[Example]]:
        """What each client has at the moment."""
        here = {client.index: _feed(client).here[client.version] for client in self.engine.members}
        return [[rows[place] for place in here.get(i, range(len(rows)))] for i, rows in enumerate(self.rows)]

    @property
    def client_labels(self) -> list[list[str]]:
        return [[e.task for e in rows] for rows in self.client_rows]

    @property
    def client_kinds(self) -> list[list[str]]:
        return [[e.kind for e in rows] for rows in self.client_rows]

    def disclose(self, method: Method) -> None:
        """What an upper bound or a reference is given and a method never is: labels, or all data in one place."""
        if method.uses_labels:
            self.reveal_labels()
        if method.gathers:
            self.gather()

    def gather(self) -> None:
        """One client with everybody's data."""
        feeds = [_feed(client) for client in self.engine.members]
        parts = [feed.everything for feed in feeds]
        examples, features = [e for part in parts for e in part.examples], torch.cat([p.features for p in parts])
        starts = np.cumsum([0, *map(len, parts)]).tolist()
        here = {
            number: [
                start + i for start, f in zip(starts, feeds, strict=False) for i in f.here[f.version(number - 1)]
            ]
            for number in sorted({number for feed in feeds for number in feed.here})
        }
        feed = Scheduled(ClientData("everybody", examples, features, gathered=len(parts)), here)
        self.engine.members = [Client(0, feed.data(0), feed=feed if len(here) > 1 else None)]
        self.rows = [[e for rows in self.rows for e in rows]]

    def reveal_labels(self) -> None:
        """Swap every feature for its kind, one-hot. Nobody can tell which expert an unseen task belongs to."""
        names = self.data.kinds()

        def one_hot(kinds: list[str]) -> torch.Tensor:
            return torch.nn.functional.one_hot(torch.tensor([names.index(x) for x in kinds]), len(names)).float()

        for client, rows in zip(self.engine.members, self.rows, strict=True):
            feed = _feed(client)
            feed.everything.features = one_hot([e.kind for e in rows])
            client.data = feed.data(client.version)
        for held in (self.validation, self.test):
            held.features = one_hot(held.kinds)
        self.unseen = None


@dataclass
class Prepared:
    """A workspace before its features: every check has been made, nothing long has run."""

    config: Config
    data: FederatedData
    backbone: Backbone
    groups: list[tuple[list[Example], list[Encoded]]]  # clients in order, validation, test, and unseen if any
    recent: Recent | None = None  # what earlier runs of this process have computed

    def build(self, console: Console) -> Workspace:
        """Compute (or recall) the features and set the clients up."""
        prompts = [e.prompt for _, encoded in self.groups for e in encoded]
        features = cached_features(self.backbone, prompts, console)
        parts = features.split([len(encoded) for _, encoded in self.groups])
        names = list(self.data.clients)
        clients = [
            _client(i, ClientData(name, encoded, part), rows, self.data.courses.get(name))
            for i, (name, (rows, encoded), part) in enumerate(
                zip(names, self.groups[: len(names)], parts[: len(names)], strict=True)
            )
        ]
        tested = self.data.after(self.config.training.rounds)  # clients are held against what they have by then
        validation, test, *unseen = (
            TestSet(*group, part, ClientWeights(tested, group[0]))
            for group, part in zip(self.groups[len(names) :], parts[len(names) :], strict=True)
        )
        for client in clients:
            client.boast = boast(self.config, client.index)
        rows = [examples for examples, _ in self.groups[: len(names)]]
        given, processes = (self.backbone, clients, self.config, console), world()
        engine = (
            InProcessEngine(*given, recent=self.recent)
            if processes is None
            else ShardedEngine(*given, processes, self.recent)
        )
        second = unseen[0] if unseen else None
        return Workspace(self.config, self.data, self.backbone, engine, validation, test, second, rows)


def _feed(client: Client) -> Scheduled:
    """A client whose rows never change has one schedule, too."""
    if isinstance(client.feed, Scheduled):
        return client.feed
    return Scheduled(client.data, {0: list(range(len(client.data)))})


def _client(index: int, data: ClientData, rows: list[Example], course: Course | None) -> Client:
    """``data`` are all rows that it ever has."""
    if course is None:
        return Client(index, data)
    place = {id(row): i for i, row in enumerate(rows)}  # without those whose answers were too long
    kept = {
        number: [place[id(course.rows[i])] for i in here if id(course.rows[i]) in place]
        for number, here in course.here.items()
    }
    feed = Scheduled(data, kept)
    return Client(index, feed.data(0), feed=feed)


@dataclass
class Kept:
    """What the runs of a comparison share: the backbone, prepared data, and what was discovered in them. The last
    backbone alone, because a grid over several must not hold them all."""

    backbone: tuple[BackboneConfig, Backbone] | None = None
    recent: Recent = field(default_factory=Recent)


def prepare(config: Config, console: Console, kept: Kept | None = None) -> Prepared:
    """Load data and backbone, tokenise, and complain about whatever is wrong."""
    if world() is not None and config.data.changes:
        raise UserError("data.changes needs one process; start the run without torchrun.")
    if late := too_late(config.data.changes, config.training.rounds):
        console.say(f"note: {late}")
    kept = kept or Kept()
    if kept.backbone is not None and kept.backbone[0] != config.backbone:
        kept.backbone, kept.recent = None, Recent()  # free the old one first
    spoilt, scored = config.attack if config.attack.kind in ON_ROWS else None, config.evaluation
    causes = (config.backbone, config.data, config.seed, scored.max_new_tokens, scored.metrics, spoilt)
    found, _ = kept.recent.of("data", causes, lambda: _prepare(config, console, kept))
    prepared = replace(found, config=config, recent=kept.recent)
    prepared.backbone.linear_layers(config.experts.target_modules)
    prepared.backbone.check_answer(config.evaluation.max_new_tokens, "evaluation.max_new_tokens")
    return prepared


def _prepare(config: Config, console: Console, kept: Kept) -> Prepared:
    data = load_data(config)
    for note in data.notes:
        console.say(f"note: {note}")
    if kept.backbone is None:
        kept.backbone = (config.backbone, load_backbone(config.backbone))
    backbone = kept.backbone[1]
    if backbone.note:
        console.say(f"note: {backbone.name}: {backbone.note}.")
    held = [
        ("validation", data.validation),
        ("test", data.test),
        *([("unseen", data.unseen)] if data.unseen else []),
    ]
    everybody = {
        name: data.courses[name].rows if name in data.courses else rows for name, rows in data.clients.items()
    }
    parts = [*everybody.items(), *held]
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


def initial_state(config: Config, backbone: Backbone) -> RoutedExperts | None:
    """``init=BUNDLE``: the bundle's experts and router as the first state of a new federation, once method, model
    and shapes are those of the config; None without a bundle."""
    from fedweave.bundle.load import read_experts, read_kept, verify_bundle

    if config.init is None:
        return None
    folder = Path(str(config.init)).expanduser()
    description = verify_bundle(folder)
    rank = "experts.single_rank" if description["router"] is None else "experts.rank"
    experts = config.experts
    layers = backbone.linear_layers(experts.target_modules)
    wanted = {
        "method": (config.method, description["method"]),
        rank: (experts.single_rank if description["router"] is None else experts.rank, description["rank"]),
        "experts.shared_rank": (experts.shared_rank if description["router"] else 0, description.get("shared", 0)),
        "experts.alpha": (experts.alpha, description["alpha"]),
        "experts.span": (experts.span, description.get("span", "all")),
        "experts.target_modules": (
            sorted(spelled_out(experts.target_modules, layers)),
            sorted(description["target_modules"]),
        ),
    }
    for key, (asked, found) in wanted.items():
        if asked != found:
            value = f"[{','.join(found)}]" if isinstance(found, list) else f"{found}"
            raise UserError(f"init={config.init} does not fit {key}={asked}; set {key}={value}, as in the bundle.")
    found = read_experts(folder, description, backbone, layers)
    if config.living.notice == "off":
        return found
    kept = require_comparable(read_kept(folder, description), config)
    report = {
        "own_distances": kept.own, "halfway": kept.halfway, "signed_buckets": kept.buckets,
        "born": [0] * found.layout.experts,
    }  # fmt: skip
    return ServerState(**vars(found), signatures=kept.means.to(found.theta), report=report)
