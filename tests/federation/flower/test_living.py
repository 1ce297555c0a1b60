"""Sites whose files grow in mid-run: a kind that they bring opens an expert, and no restart forgets it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array

from fedweave.config import dump_config
from fedweave.console import Console
from fedweave.data import load_data
from fedweave.federation.engines.flower.transport import ARRAYS, NUMBERS, TEXTS
from fedweave.federation.message import Message
from fedweave.federation.rounds import federate
from fedweave.federation.site.settings import Floors, SiteConfig
from fedweave.federation.site.site import Site
from fedweave.federation.site.source import OwnFiles
from fedweave.methods import build_method
from fedweave.runs.workspace import prepare
from tests.federation.flower.conftest import Federation, carried
from tests.federation.flower.test_one_truth import changed as with_rounds
from tests.federations import changed

pytestmark = pytest.mark.usefixtures("smooth_optimiser")


@pytest.fixture
def living(config):
    return changed(
        with_rounds(config, rounds=3), discovery={"warmup_steps": 6, "warmup_lr": 1e-2},
        living={"notice": "open", "least": 6, "lessons": 1}, data={"train": 30},
    )  # fmt: skip


def rows_of(config) -> dict[str, dict[str, list[dict]]]:
    """client -> task -> rows as a site's file has them."""
    found: dict[str, dict[str, list[dict]]] = {}
    for name, rows in load_data(config).clients.items():
        for row in rows:
            own = found.setdefault(name, {}).setdefault(row.task, [])
            own.append({"prompt": row.prompt, "response": row.response})
    return found


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def own_sites(config, tmp_path, models) -> tuple[list[Site], dict[str, list[dict]]]:
    """Three sites with files of their own and no sums yet, and the sums of each."""
    sites, sums = [], {}
    for name, kinds in rows_of(config).items():
        sums[name] = kinds.pop("sum", [])
        write(tmp_path / f"{name}.jsonl", [row for rows in kinds.values() for row in rows])
        settings = SiteConfig(
            name, str(tmp_path / f"{name}.jsonl"), state=str(tmp_path / name), floors=Floors(batch=1, clip=0.0),
            backbone=config.backbone,
        )  # fmt: skip
        sites.append(Site(OwnFiles(settings), models, build_method, Console(quiet=True)))
    return sites, sums


def grow(tmp_path: Path, sums: dict[str, list[dict]], name: str) -> None:
    with open(tmp_path / f"{name}.jsonl", "a") as out:
        out.writelines(json.dumps(row) + "\n" for row in sums[name])


def test_a_schedule_gives_the_model_of_the_in_process_run(living, models):
    """News, signatures, opening and teaching over Flower's messages are those of one process."""
    config = changed(living, data={"changes": ["2: client_0, client_1 gain sum", "3: all lose mood"]})
    federation = Federation(config, models)
    _, final, reports = federation.run()
    engine = prepare(config, Console(quiet=True)).build(Console(quiet=True)).engine
    method = build_method(config)
    expected = federate(method, engine, method.prepare(engine), range(3), lambda state, report: None)
    engine.detach()
    assert reports[1].change.opened and final.layout == expected.layout
    assert (final.theta - expected.theta).abs().max() <= 1e-5 and (final.phi - expected.phi).abs().max() <= 1e-5
    assert "warning" not in federation.said


@pytest.mark.parametrize("restart", [False, True], ids=["stays", "restarts"])
def test_a_file_that_grows_brings_a_kind(living, tmp_path, models, restart):
    """The site may even be restarted in between: it finds its buckets again, and no row leaves."""
    living = changed(living, router={"familiar": 1.0})  # two dozen rows tell their sums once
    sites, sums = own_sites(living, tmp_path, models)
    federation = Federation(living, models, sites)
    most = max(sums, key=lambda name: len(sums[name]))

    def fate(step, node, t):
        site = sites[node - 100]
        if step == "evaluate" or site.source.name != most:
            return "answers"
        if (step, t) == ("train", 0):
            grow(tmp_path, sums, most)
        if restart and step in ("news", "train") and t:
            site.session = None
        return "answers"

    federation.grid.fate = fate
    before, final, reports = federation.run()
    change = reports[1].change
    assert change.opened and set(change.came) == {most}
    assert final.layout.experts == before.layout.experts + len(change.opened)
    assert f"new rows at {most}" in federation.said and "warning" not in federation.said
    assert not any(reports[2].change.came.values()), "they came once"
    assert all(len(report.receipts.accepted) == 3 for report in reports)
    unfed = final.layout.unstack(final.theta)[change.opened[0]]
    assert torch.isfinite(unfed).all()
    sent = "".join(str(message.facts) for way, _, message in federation.grid.sent if way == "up")
    assert not any(row["prompt"] in sent for row in sums[most])
    kept = list((tmp_path / most).rglob("rows-*.json"))
    assert kept and all(row["prompt"] not in path.read_text() for path in kept for row in sums[most])


def test_a_server_that_resumes_from_before_an_opening_opens_it_again(living, tmp_path, models):
    """The site has formed buckets of which the server, gone back, knows nothing: their rows wait again."""
    sites, sums = own_sites(living, tmp_path, models)
    federation = Federation(living, models, sites)
    most = max(sums, key=lambda name: len(sums[name]))
    method = build_method(living)
    federation.engine.enrol(3)
    state = method.prepare(federation.engine)
    records = [site.record() for site in federation.engine.members]
    grow(tmp_path, sums, most)
    first, change = method.live(federation.engine, state, 1)
    again = Federation(living, models, sites)
    again.engine.meet()
    again.engine.restore(records, {})
    second, repeated = method.live(again.engine, state, 1)
    assert change.opened == repeated.opened and first.layout == second.layout
    assert (first.theta - second.theta).abs().max() <= 1e-6


def swap(tmp_path: Path, site: Site, sums: dict[str, list[dict]]) -> None:
    """The rows of the site's first bucket go from its file, and its sums come."""
    session, name = site.session, site.source.name
    gone = set(session.client.buckets[0].tolist())
    rows = [row for i, row in enumerate(session.feed.rows) if i not in gone]
    texts = [{"prompt": row.prompt, "response": row.response} for row in [*rows, *session.feed.held_rows]]
    write(tmp_path / f"{name}.jsonl", [*texts, *sums[name]])


@pytest.mark.parametrize("fault", ["none", "answer lost", "answer lost and site restarted", "server back"])
def test_buckets_keep_their_experts_where_the_server_has_not_heard_of_a_change(living, tmp_path, models, fault):
    """A bucket went and others came. Asked once more, the site starts from the buckets that the server knows, and
    all comes out as if nothing had been wrong."""
    living = changed(living, router={"familiar": 1.0})  # two dozen rows tell their sums once
    sites, sums = own_sites(living, tmp_path, models)
    federation, method = Federation(living, models, sites), build_method(living)
    federation.engine.enrol(3)
    state = method.prepare(federation.engine)
    most = max(range(3), key=lambda i: len(sums[sites[i].source.name]))
    known = federation.engine.members[most]
    records, buckets = [member.record() for member in federation.engine.members], len(known.sizes)
    swap(tmp_path, sites[most], sums)
    if fault.startswith("answer lost"):
        news = Message(facts={"t": 1, "experts": state.layout.experts})
        sites[most].answer(known.addressed(news, "news", dump_config(living), "test"))
    elif fault == "server back":
        method.live(federation.engine, state, 1)
        federation = Federation(living, models, sites)
        federation.engine.meet()
        federation.engine.restore(records, {})
    sites[most].session = None if fault.endswith("restarted") else sites[most].session
    _, change = method.live(federation.engine, state, 1)
    found = federation.engine.members[most]
    assert change.opened and len(found.sizes) != buckets and found.version == 1
    # its second and third bucket are the first ones now; what came is a new expert's, and in no old one's bucket
    assert found.sizes[: buckets - 1] == records[most]["sizes"][1:]
    assert found.assignment[: buckets - 1] == records[most]["assignment"][1:]
    assert set(change.opened) <= set(found.assignment[buckets - 1 :])
    assert sum(found.sizes) == len(sites[most].session.client.data) and "warning" not in federation.said


@pytest.mark.parametrize("own", [False, True], ids=["held out", "own file"])
def test_a_site_validates_after_a_restart_and_on_nothing_that_is_gone(living, tmp_path, models, own):
    """Whether its rows to validate on are some of its file's or have a file of their own."""
    (site, *_), _ = own_sites(living, tmp_path, models)
    settings = site.source.site
    if own:
        write(tmp_path / "held.jsonl", [{"prompt": f"What is {i}?", "response": "It is."} for i in range(4)])
        settings = replace(settings, validation=str(tmp_path / "held.jsonl"))
    federation = Federation(living, models, [Site(OwnFiles(settings), models, build_method, Console(quiet=True))])
    engine, method, (site,) = federation.engine, build_method(living), federation.sites
    engine.enrol(1)
    state = method.prepare(engine)
    held = len(site.session.feed.held)
    site.session = None
    method.live(engine, state, 1)
    assert len(site.session.feed.held) == held > 1
    first = site.session.feed.held_rows[0].prompt
    path = Path(settings.data)
    write(path, [row for row in map(json.loads, path.read_text().splitlines()) if row["prompt"] != first])
    method.live(engine, state, 2)
    assert len(site.session.feed.held) == (held if own else held - 1)


def test_a_late_site_with_a_kind_of_its_own_opens_an_expert(living, tmp_path, models):
    sites, sums = own_sites(living, tmp_path, models)
    late = max(sums, key=lambda name: len(sums[name]))
    write(tmp_path / f"{late}.jsonl", sums[late])
    federation = Federation(living, models, sites)
    node = next(number for number, site in zip(range(100, 103), sites, strict=True) if site.source.name == late)
    absent = federation.grid.nodes.pop(node)

    def fate(step, node_, t):
        if (step, t) == ("train", 0):
            federation.grid.nodes[node] = absent
        return "answers"

    federation.grid.fate = fate
    before, final, reports = federation.run(sites=2)
    assert any(report.change.opened for report in reports[1:]) and final.layout.experts > before.layout.experts
    assert f"site {late} joins" in federation.said


def test_a_site_that_brings_ever_more_kinds_leaves_places_to_others(living, tmp_path, models):
    """Whatever it says of them: it opens one expert, and what two others bring after that opens theirs."""
    config = with_rounds(living, rounds=5)
    sites, _ = own_sites(config, tmp_path, models)
    federation, liar = Federation(config, models, sites), 102
    push = federation.grid.push_messages

    def pushed(messages):
        numbers = push(messages)
        for asked, number in zip(messages, numbers, strict=True):
            if asked.content.config_records[TEXTS]["step"] == "sign":
                (reply,) = federation.grid.replies[number]
                arrays, t = reply.content.array_records[ARRAYS], asked.content.metric_records[NUMBERS]["t"]
                kind = np.random.default_rng(t if asked.metadata.dst_node_id == liar else 99)
                shape = arrays["signatures"].numpy().shape
                said = np.repeat(kind.standard_normal((1, shape[1]), dtype=np.float32), shape[0], 0)
                arrays["signatures"] = Array(said)
                federation.grid.replies[number] = [carried(reply)]
        return numbers

    def fate(step, node, t):
        if step == "train" and (t == 2 if node != liar else t < 3):
            rows = [{"prompt": f"In round {t}, {i}?", "response": f"{i}"} for i in range(8)]
            grow(tmp_path, {sites[node - 100].source.name: rows}, sites[node - 100].source.name)
        return "answers"

    federation.grid.push_messages, federation.grid.fate = pushed, fate
    _, _, reports = federation.run()
    changes, hostile = [report.change for report in reports], sites[liar - 100].source.name
    assert [[change.opened_by(m) for m in change.opened] for change in changes] == [[], [hostile], [], [""], []]
    assert {b.client for b in changes[2].placed if b.waits == "living.alone=2"} == {hostile}
    assert "kept apart; resume with living.alone=2 to open an expert" in federation.said


def test_a_site_that_leaves_with_the_only_rows_of_an_expert_is_told_of(living, tmp_path, models):
    """Its expert stays as it is to the bit, and is retired where that is asked for."""
    leaving = changed(with_rounds(living, rounds=5), living={"retire": 1})
    sites, sums = own_sites(leaving, tmp_path, models)
    federation = Federation(leaving, models, sites)
    alone = max(sums, key=lambda name: len(sums[name]))
    node = next(number for number, site in enumerate(sites, 100) if site.source.name == alone)

    def fate(step, node_, t):
        if (step, t, node_) == ("train", 0, node):
            grow(tmp_path, sums, alone)
        if (step, t) == ("train", 2):
            federation.grid.nodes.pop(node, None)
        return "answers"

    federation.grid.fate = fate
    before, final, reports = federation.run()
    (opened,) = reports[1].change.opened
    assert [report.change.retired for report in reports] == [[], [], [], [], [opened]]
    assert final.layout.experts == before.layout.experts
    alone_in_it = reports[3].change
    assert alone_in_it.unfed == [opened] and not alone_in_it, "told, and no other rows"
    for told in (
        f"nobody who is here feeds expert {opened}",
        f"nobody feeds expert {opened} any more; it is retired",
    ):
        assert federation.said.count(told) == 1


def test_a_file_that_is_being_written_is_read_later(living, tmp_path, models):
    sites, sums = own_sites(living, tmp_path, models)
    federation = Federation(living, models, sites)
    most = max(sums, key=lambda name: len(sums[name]))

    def fate(step, node, t):
        if (step, t, node) == ("train", 0, 100):
            grow(tmp_path, sums, most)
            with open(tmp_path / f"{most}.jsonl", "a") as out:
                out.write('{"prompt": "half a')
        if (step, t, node) == ("train", 1, 100):
            text = (tmp_path / f"{most}.jsonl").read_text()
            (tmp_path / f"{most}.jsonl").write_text(text.removesuffix('{"prompt": "half a'))
        return "answers"

    federation.grid.fate = fate
    _, _, reports = federation.run()
    assert not reports[1].change.came and reports[2].change.opened
    assert all(len(report.receipts.accepted) == 3 for report in reports)


@pytest.mark.parametrize("long_answers", ["error", "skip"])
def test_a_new_row_that_cannot_be_used_is_told_once_and_is_no_news(living, tmp_path, models, long_answers):
    """Its answer leaves no room. Skipped, the others come; else the site goes on, and takes all of them when it is
    mended."""
    config = changed(with_rounds(living, rounds=5), data={"long_answers": long_answers}, router={"familiar": 1.0})
    sites, sums = own_sites(config, tmp_path, models)
    federation = Federation(config, models, sites)
    most, told = max(sums, key=lambda name: len(sums[name])), []
    site = next(site for site in sites if site.source.name == most)
    site.console.warn = told.append
    file, spoilt = tmp_path / f"{most}.jsonl", {"prompt": "How long?", "response": "very " * 5000}

    def fate(step, node, t):
        if (step, t, node) == ("train", 0, 100):
            grow(tmp_path, {most: [*sums[most], spoilt]}, most)
        if (step, t, node) == ("train", 2, 100):
            write(file, [json.loads(line) for line in file.read_text().splitlines() if "very very" not in line])
        return "answers"

    federation.grid.fate = fate
    _, _, reports = federation.run()
    came = [report.change.came.get(most, 0) for report in reports]
    rows = len(sums[most])
    assert len(told) == 1 and all(len(report.receipts.accepted) == 3 for report in reports)
    assert [bool(n) for n in came] == [False, long_answers == "skip", False, long_answers == "error", False]
    assert 0 < max(came) <= rows and site.session.feed.number == 1
