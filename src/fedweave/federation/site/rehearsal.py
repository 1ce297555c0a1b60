"""``fedweave site check``: every question of a federation once, with nobody listening, and what each would send."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedweave.alignment.align import Alignment
from fedweave.config import Config, dump_config
from fedweave.console import Console, table
from fedweave.errors import UserError
from fedweave.federation.admission import Sealed
from fedweave.federation.client import Distant, Member
from fedweave.federation.engines.base import Engine
from fedweave.federation.hello import Hello
from fedweave.federation.message import Message
from fedweave.federation.rounds import one_round
from fedweave.federation.site.settings import SiteConfig
from fedweave.federation.site.site import BuildMethod, Models, Site
from fedweave.federation.site.source import OwnFiles
from fedweave.federation.state import broadcast
from fedweave.federation.steps import Asked, Reply


def check_site(settings: SiteConfig, config: Config, build_method: BuildMethod, console: Console) -> str:
    """A table of everything that would leave; whatever is wrong with the site raises before."""
    short = replace(
        config,
        training=replace(
            config.training,
            local_steps=min(config.training.local_steps, max(config.discovery.max_buckets, settings.floors.steps)),
        ),
        discovery=replace(config.discovery, warmup_steps=min(config.discovery.warmup_steps, settings.floors.steps)),
        federation=replace(config.federation, secure_aggregation=False),
        living=replace(
            config.living,
            notice="open" if config.living.notice == "ask" else config.living.notice,
            least=2,
            alone=1,
        ),
        alignment=replace(config.alignment, max_experts=1000),
    )  # as many steps as sizes need, no masks, which take several sites, and room for a kind that nobody knows
    source, masked = OwnFiles(settings), config.federation.secure_aggregation
    source.state = None  # a rehearsal leaves nothing behind
    source.floors = replace(settings.floors, secure=settings.floors.secure and not masked)
    site = Site(source, Models(), build_method, console)
    sent = rehearse(site, short, build_method)
    assert site.session is not None
    client, backbone = site.session.client, site.session.engine.backbone
    held = len(client.held) if client.held is not None else 0
    head = [
        f"site {settings.name}: ready",
        f"  data    {len(client.data)} rows to train on, {held} to validate on, {len(client.buckets)} buckets",
        f"  model   {backbone.name}, fingerprint {backbone.fingerprint}",
        f"  device  {backbone.device}, {str(backbone.dtype).removeprefix('torch.')}",
        f"  floors  {', '.join(f'{key} {value}' for key, value in vars(settings.floors).items() if value)}",
        *(
            ["  masks   on all that is added up: in the federation, nobody sees these answers by themselves"]
            if masked
            else []
        ),
        "",
        "What it would send (as many experts as it has buckets; a federation finds their number):",
        "",
    ]
    rows = [[step, name, what, f"{n:,}"] for step, message in sent.items() for name, what, n in message.rows()]
    return "\n".join([*head, table(["step", "name", "what", "bytes"], rows)])


def rehearse(site: Site, config: Config, build_method: BuildMethod) -> dict[str, Message]:
    """One round of every question of the method, over an engine with this site alone; its last answer to each. A
    kind that nobody knows comes after it, where the federation lives."""
    engine, method = RehearsalEngine(site, config), build_method(config)
    if hasattr(method, "align"):
        method.align = every_bucket_apart
    state = method.prepare(engine)
    state, _ = one_round(method, engine, state, engine.members, 0)
    for _ in engine.ask(method.evaluate, engine.members, broadcast(state, 0)):
        pass
    method.rehearse(engine, state)
    if state.signatures is not None and config.living.notice != "off":  # its last bucket is one that just came
        (member,) = engine.members
        member.assignment = [*member.assignment[:-1], -1]
        far = {**state.report, "own_distances": [0.0], "halfway": 0.0}  # from all that is known
        method.live(engine, replace(state, signatures=-state.signatures, report=far), 1)
    return engine.sent


def every_bucket_apart(distance: np.ndarray, most: int, **options: Any) -> Alignment:
    """As many experts as there are buckets: the most that this site can be asked for."""
    return Alignment(len(distance), np.arange(len(distance)), {})


class RehearsalEngine(Engine):
    """A federation of one site in this process; what it sends is written down."""

    device = torch.device("cpu")

    def __init__(self, site: Site, config: Config):
        self.site, self.config, self.console = site, config, site.console
        self.members = [Distant(0, site.source.name)]
        self.sent: dict[str, Message] = {}
        self._settings = dump_config(config)
        self.layers, self.width = {}, 0
        self.identity: Mapping[str, str] = {}
        for _, told in self.ask(Hello(), self.members, Message()):
            self.identity, self.layers, self.width = told.model.identity, told.model.layers, told.model.width

    def replies(self, step: Reply, asked: Sequence[Asked], question: Message) -> Iterator[tuple[Member, Sealed]]:
        for member in self.members:
            try:
                message = self.site.reply(member.addressed(question, step.name, self._settings, "rehearsal"))
            except UserError as error:  # here it may say everything
                raise UserError(f"the site cannot answer {step.name!r}: {error}") from None
            self.sent[step.name] = message
            yield member, message

    def restore(self, records: Sequence[dict[str, Any]], tensors: Mapping[str, torch.Tensor]) -> None:
        """Nothing is kept of a rehearsal."""
