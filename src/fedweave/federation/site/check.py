"""``fedweave site check``: every step of a federation once, with nobody listening, and what each would send."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fedweave.config import Config, dump_config
from fedweave.console import Console, table
from fedweave.errors import UserError
from fedweave.experts.layout import AdapterLayout
from fedweave.federation.letters import Letter
from fedweave.federation.site.answers import Models, Site
from fedweave.federation.site.settings import SiteConfig
from fedweave.federation.site.sources import OwnFiles
from fedweave.federation.wire import router_facts, state_letter, to_arrays
from fedweave.methods import build_method
from fedweave.methods.base import ServerState
from fedweave.methods.fedlease import FedLEASE
from fedweave.methods.fedweave import FedWeave
from fedweave.router.mlp import RouterLayout


def check_site(settings: SiteConfig, config: Config, console: Console) -> str:
    """A table of everything that would leave; whatever is wrong with the site raises before."""
    short = replace(
        config,
        training=replace(
            config.training, local_steps=min(config.training.local_steps, config.discovery.max_buckets)
        ),
        discovery=replace(config.discovery, warmup_steps=1),
    )  # as many steps as sizes need
    models = Models()
    source = OwnFiles(settings)
    source.state = None  # a rehearsal leaves nothing behind
    site = Site(source, models, console)
    rows = [
        [step, name, what, _size(count)]
        for step, letter in rehearsal(site, short)
        for name, what, count in letter.rows()
    ]
    assert site._seat is not None
    client, backbone = site._seat[1].client, site._seat[1].bench.backbone
    held = len(client.held) if client.held is not None else 0
    head = [
        f"site {settings.name}: ready",
        f"  data    {len(client.data)} rows to train on, {held} to validate on, {len(client.buckets)} buckets",
        f"  model   {backbone.name}, fingerprint {backbone.fingerprint}",
        f"  device  {backbone.device}, {str(backbone.dtype).removeprefix('torch.')}",
        "",
        "What it would send (as many experts as it has buckets; a federation finds their number):",
        "",
    ]
    return "\n".join([*head, table(["step", "name", "what", "bytes"], rows)])


def rehearsal(site: Site, config: Config) -> Iterator[tuple[str, Letter]]:
    """The site's answers to one round of every question."""
    facts: dict[str, Any] = {"config": dump_config(config), "federation": "check", "index": 0}

    def ask(step: str, letter: Letter) -> Letter:
        answer = site.answer(Letter(letter.arrays, {**letter.facts, **facts, "step": step}))
        if "error" in answer.facts:
            raise UserError(f"the site cannot answer {step!r}: {answer.facts['error']}")
        return answer

    method = build_method(config)
    hello = ask("hello", Letter())
    yield "hello", hello
    told = ask("discover", Letter())
    yield "discover", told
    known: dict[str, Any] = told.facts | hello.facts
    experts = len(known["sizes"]) if told.arrays else 1
    facts |= {"sizes": known["sizes"], "assignment": list(range(experts))}
    rank = config.experts.rank if told.arrays else config.experts.single_rank
    layout = AdapterLayout(tuple(known["layers"]), tuple(known["inputs"]), tuple(known["outputs"]), rank, experts)
    router, phi = None, None
    if told.arrays:
        yield "start", ask("start", Letter())
        router = RouterLayout(known["width"], config.router.hidden, experts, config.router.features)
        phi = router.initial(0)
        if isinstance(method, FedWeave) and method.warm_start_rounds(experts):
            lesson = {"t": 0, "contrast": "own", **router_facts(router)}
            yield "warm", ask("warm", Letter(to_arrays({"phi": phi}), lesson))
    routers = phi.repeat(experts if isinstance(method, FedLEASE) else 1, 1) if phi is not None else None
    shares = [1 / len(routers)] * len(routers) if routers is not None else [1.0]
    state = ServerState(layout, router, layout.initial(config.seed), routers, shares)
    yield "train", ask("train", state_letter(state, 0))
    yield "evaluate", ask("evaluate", state_letter(state, 0))


def _size(count: int) -> str:
    return f"{count:,}"
