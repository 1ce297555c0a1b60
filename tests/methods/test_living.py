"""Experts that open in mid-run: what is new starts from its warmups, and what is old does not move."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedweave.errors import UserError
from fedweave.federation.client import Client, examples_of
from fedweave.federation.message import Message
from fedweave.federation.rounds import federate
from fedweave.federation.steps import Asked
from fedweave.methods import build_method
from fedweave.methods.newcomers import apart, sizes_apart
from fedweave.methods.prototypes import first_adapter
from fedweave.router.mlp import RouterLayout
from tests.federations import changed, make_engine
from tests.methods.conftest import Arriving, federation


def test_an_expert_opens_for_a_kind_that_comes_and_old_ones_stay(living, backbone):
    engine, method = federation(living, backbone)
    before = method.prepare(engine)
    m = before.layout.experts
    assert len(before.signatures) == m and len(before.report["own_distances"])
    opened, change = method.live(engine, replace(before, norms={"router": [1e-9]}), 1)
    assert not opened.norms, "what earlier rounds moved by limits nobody who has far to go"
    assert change.opened and opened.layout.experts == m + len(change.opened)
    assert set(change.came) == {"client_0", "client_1"} and not change.went
    # to the bit: experts, what the router thinks of them, signatures
    for old, new in zip(before.layout.unstack(before.theta), opened.layout.unstack(opened.theta), strict=False):
        assert torch.equal(old, new)
    old, new = (s.router.views(s.phi[0]) for s in (before, opened))
    assert all(torch.equal(old[name], new[name][: len(old[name])]) for name in old if name.startswith("linear"))
    assert len(new["linear2.bias"]) == opened.layout.experts and new["linear2.bias"][m:].any()
    assert torch.equal(opened.signatures[:m][0], before.signatures[0]) or change.placed[0].expert == 0
    # the new expert is the mean of its buckets' warmup adapters
    adapters = engine.compute.adapters
    for expert in change.opened:
        own = [
            adapters.read((client.index, c))
            for client in engine.members
            for c, owner in enumerate(client.assignment)
            if owner == expert
        ]
        torch.testing.assert_close(opened.layout.unstack(opened.theta)[expert], torch.stack(own).mean(0))
    assert all(sum(c.sizes) + len(c.waiting) == len(c.data) for c in engine.members), "every row has its place"
    engine.detach()


def test_an_oracle_starts_a_kind_that_comes_as_it_started_the_others(living, backbone):
    """It is told the kinds: a column for each. Sums come to two clients."""
    config = changed(living, living={"notice": "off"}, data={"changes": ["99: all lose mood"]})
    engine, _ = federation(config, backbone)
    for client in engine.members:
        for data in {id(d): d for d in (client.data, getattr(client.feed, "everything", client.data))}.values():
            texts = [backbone.tokenizer.decode(e.ids) for e in data.examples]
            data.features = torch.eye(2)[[int("finds" in text) for text in texts]]
    method = build_method(replace(config, method="oracle"))
    state = method.prepare(engine)
    is_b = state.layout.with_experts(1).is_b
    known, unknown = state.layout.unstack(state.theta)
    assert known[is_b].any() and not unknown[is_b].any()
    after, _ = method.live(engine, state, 1)
    adapters = [engine.compute.adapters.read((i, engine.members[i].assignment.index(1))) for i in (0, 1)]
    engine.detach()
    old, new = after.layout.unstack(after.theta)
    assert torch.equal(old, known)
    torch.testing.assert_close(new, torch.stack(adapters).mean(0))


def test_who_feeds_an_expert_no_more_leaves_it_as_it_is(living, backbone):
    """Rows of one kind go away everywhere; the experts that only they fed do not change by a bit."""
    engine, method = federation(living, backbone)
    state = method.prepare(engine)
    state, _ = method.live(engine, state, 1)
    keep = set(engine.members[0].assignment)
    for client in engine.members:
        client.feed = None
        kept = [c for c, m in enumerate(client.assignment) if m in keep]
        client.buckets, client.assignment = [client.buckets[c] for c in kept], [client.assignment[c] for c in kept]
    unfed = set(range(state.layout.experts)) - keep
    final = federate(method, engine, state, range(2, 4), lambda state, report: None)
    engine.detach()
    assert unfed, "some expert is not client 0's"
    for m, (old, new) in enumerate(zip(*(s.layout.unstack(s.theta) for s in (state, final)), strict=True)):
        assert torch.equal(old, new) == (m in unfed)


def test_a_client_brings_no_more_buckets_than_new_rows_can_form(living, backbone):
    """However often it is asked: not hundreds, which all would have to be signed."""
    engine, method = federation(living, backbone)
    state = method.prepare(engine)
    member, most = engine.members[0], living.discovery.max_buckets
    asked = Asked(member, Message(facts={"t": 1, "experts": state.layout.experts}), engine.layers, engine.width)
    engine.detach()
    member.assignment = [0] * 50  # as it would have said the round before
    limit = method.news.figures(asked)["sizes"].length[1]
    assert len(set(member.assignment)) + most <= limit <= 2 * max(most, state.layout.experts + 1)


def test_a_bucket_has_the_same_signature_at_any_time(living, backbone):
    """Warmups start from the common A₀, not from what has been trained since: signatures stay comparable."""
    engine, method = federation(living, backbone)
    state = method.prepare(engine)
    units = [(engine.members[2], 0)]
    (first,) = method.discover.warm_up(engine.compute, units)
    state = federate(method, engine, state, range(2), lambda state, report: None)
    (later,) = method.discover.warm_up(engine.compute, units)
    engine.detach()
    assert torch.equal(first, later)
    assert not torch.equal(state.layout.unstack(state.theta)[0], first_adapter(state.layout.with_experts(1), 42))


@pytest.mark.parametrize("training", ["soft", "chosen"])
def test_asked_the_operator_decides(living, backbone, training):
    """Rows of a new kind are kept apart, train nobody, and are told of once; with open the expert opens."""
    living = changed(living, router={"training": training})
    asking = changed(living, living={"notice": "ask"})
    engine, method = federation(asking, backbone)
    state = method.prepare(engine)
    m = state.layout.experts
    after, change = method.live(engine, state, 1)
    kept = [bucket for bucket in change.placed if bucket.expert < 0]
    assert kept and not change.opened and after.layout.experts == m
    assert {bucket.client for bucket in kept} == set(after.report["asked"])
    client = next(c for c in engine.members if apart(c))
    assert len(client) < len(client.data) and all(m >= 0 for m in method.labels(client, after)[client.served[0]])
    reports = []
    after = federate(method, engine, after, range(2, 3), lambda state, report: reports.append(report))
    assert len(reports[0].receipts.accepted) == 3, "and the others train"
    again, quiet = method.live(engine, after, 3)
    assert not quiet and again.layout.experts == m, "nobody is asked twice"
    opened, change = build_method(living).live(engine, again, 4)
    waiting = sum(sum(sizes_apart(member)) for member in engine.members)
    assert change.opened and not opened.report["asked"] and waiting < living.living.least, "for more of their kind"
    engine.detach()


def test_nobody_is_asked_about_an_expert_that_cannot_open(living, backbone):
    """With ask as with open: where there is no room for another, what is far joins the nearest."""
    placed = {}
    for notice in ("open", "ask"):
        full = changed(living, living={"notice": notice}, alignment={"max_experts": 2})
        engine, method = federation(full, backbone)
        said: list[str] = []
        engine.console.say = said.append
        _, change = method.live(engine, method.prepare(engine), 1)
        engine.detach()
        far = [bucket for bucket in change.placed if bucket.distance > change.limit]
        told = [
            line for line in said if "although far: a new one has too few rows (living.least) or no room" in line
        ]
        assert far and {line.split(" rows of ")[1].split()[0] for line in told} == {b.client for b in far}
        placed[notice] = [bucket.expert for bucket in change.placed]
    assert placed["ask"] == placed["open"] and min(placed["ask"]) >= 0


def test_few_rows_wait_for_more(living, backbone):
    patient = changed(living, living={"least": 1000})
    engine, method = federation(patient, backbone)
    state = method.prepare(engine)
    after, change = method.live(engine, state, 1)
    engine.detach()
    assert change.came and not change.placed and after is state
    assert all(len(client.waiting) for client in engine.members[:2])


def test_nothing_is_asked_where_nothing_can_change(config, backbone):
    engine = make_engine(config, backbone)
    method = build_method(config)
    state = method.prepare(engine)
    engine.ask = None
    assert method.live(engine, state, 3)[0] is state
    assert "own_distances" not in state.report and state.signatures is None
    assert {"news", "sign", "grow"} & {step.name for step in method.steps()} == {"news"}
    engine.detach()


def test_a_router_that_takes_prompts_for_strange_learns_the_new_ones(living, backbone):
    weave = changed(
        living, router={"training": "chosen", "familiar": 0.95}, experts={"labels": "router", "start": "zero"}
    )
    engine, method = federation(weave, backbone)
    state = method.prepare(engine)
    opened, change = method.live(engine, state, 1)
    assert isinstance(opened.router, RouterLayout) and opened.router.axes and change.opened
    state, report = None, []
    final = federate(method, engine, opened, range(2, 3), lambda state, r: report.append(r))
    engine.detach()
    assert final.layout.experts == opened.layout.experts and len(report) == 1


@pytest.mark.parametrize("familiar", [0.95, 1.0])
def test_a_kind_whose_prompts_are_strange_is_new_though_signatures_do_not_say_so(living, backbone, familiar):
    """No signature lies beyond a limit of 2. Only a router that knows familiar prompts sees what is strange."""
    config = changed(
        living, router={"training": "chosen", "familiar": familiar}, experts={"labels": "router", "start": "zero"}
    )
    engine, method = federation(config, backbone)
    state = method.prepare(engine)
    _, change = method.live(engine, replace(state, report=state.report | {"halfway": 2.0}), 1)
    engine.detach()
    assert change.limit == 2.0 and change.placed
    assert bool(change.opened) == (familiar < 1) == any(bucket.strange > 0.5 for bucket in change.placed)


# -------------------------------------------------------------------------------------- merging and closing


def test_two_experts_that_are_alike_become_their_mean(living, backbone):
    """An expert that opened is given the signature of another: both close, and their mean opens."""
    strict = changed(living, living={"merge": True}, router={"training": "chosen", "familiar": 0.95})
    engine, method = federation(strict, backbone)
    state, _ = method.live(engine, method.prepare(engine), 1)
    last, fed = state.layout.experts - 1, examples_of(engine.members, state.layout.experts)
    state.signatures[last] = state.signatures[0] / state.signatures[0].norm()
    state.signatures[0] = state.signatures[last]
    before = state.layout.unstack(state.theta)
    merged, change = method.live(engine, state, 2)
    assert change.merged == [0, last] and merged.layout.experts == last
    after, feeding = merged.layout.unstack(merged.theta), examples_of(engine.members, last)
    assert all(torch.equal(old, new) for old, new in zip(before[1:last], after, strict=False))
    assert feeding == [*fed[1:last], fed[0] + fed[last]]
    mean = (fed[0] * before[0] + fed[last] * before[last]) / (fed[0] + fed[last])
    torch.testing.assert_close(after[-1], mean)
    known = [s.phi[0][s.router.trained.size :] for s in (state, merged)]
    assert merged.router.axes and torch.equal(*known), "what is familiar stays so"
    assert len(merged.signatures) == len(merged.report["born"]) == len(merged.report["signed_buckets"]) == last
    federate(method, engine, merged, range(3, 4), lambda state, report: None)
    engine.detach()


def test_an_expert_that_nobody_feeds_is_retired_where_that_is_asked_for(living, backbone):
    engine, method = federation(changed(living, living={"retire": 2}), backbone)
    state, _ = method.live(engine, method.prepare(engine), 1)
    lost, experts = engine.members[2].assignment[0], state.layout.experts
    for client in engine.members:
        kept = [c for c, m in enumerate(client.assignment) if m != lost]
        client.buckets, client.assignment = [client.buckets[c] for c in kept], [client.assignment[c] for c in kept]
    engine.members = [client for client in engine.members if client.buckets]
    before = state.layout.unstack(state.theta)
    counts = []
    for t in range(2, 5):
        state, change = method.live(engine, state, t)
        counts.append(state.layout.experts)
    engine.detach()
    assert counts == [experts, experts, experts - 1] and change.retired == [lost]
    kept = [one for m, one in enumerate(before) if m != lost]
    assert all(torch.equal(old, new) for old, new in zip(kept, state.layout.unstack(state.theta), strict=True))
    assert state.router.experts == len(state.signatures) == experts - 1
    assert all(max(client.assignment) < experts - 1 for client in engine.members)


def test_an_expert_that_loses_its_last_rows_is_told_of_also_when_another_one_closes(living, backbone):
    engine, method = federation(changed(living, living={"retire": 1}), backbone)
    said: list[str] = []
    engine.console.say = said.append
    state, _ = method.live(engine, method.prepare(engine), 1)

    def nobody_has(lost: int) -> None:
        for client in engine.members:
            kept = [c for c, m in enumerate(client.assignment) if m != lost]
            client.buckets = [client.buckets[c] for c in kept]
            client.assignment = [client.assignment[c] for c in kept]

    nobody_has(0)
    state, change = method.live(engine, state, 2)
    assert (change.unfed, change.retired) == ([0], [])
    nobody_has(state.layout.experts - 1)
    state, change = method.live(engine, state, 3)
    engine.detach()
    assert (change.unfed, change.retired) == ([state.layout.experts - 1], [0]), "by the number that it has now"
    assert said.count(f"before round 4: nobody who is here feeds expert {change.unfed[0]}; it stays as it is") == 1


def test_a_round_without_any_row_is_one_sentence(living, backbone):
    engine, method = federation(living, backbone)
    state = method.prepare(engine)
    for client in engine.members:
        client.feed = Arriving(client, np.arange(len(client.data)))
        client.feed.everything = client.data.part(np.arange(0))
    with pytest.raises(UserError, match="nobody has rows to train on in round 2: they are gone"):
        federate(method, engine, state, range(2), lambda state, report: None)
    engine.detach()


class Leaving:
    """A client whose rows are gone in rounds 1 to 3, and back from round 4 on."""

    def __init__(self, client: Client):
        self.everything = client.data

    def version(self, t: int) -> int:
        return (t > 0) + (t > 3)

    def data(self, version: int):
        return self.everything.part(np.arange(0 if version == 1 else len(self.everything)))


def test_rows_that_return_after_their_expert_has_closed_open_it_again(living, backbone):
    """The only client with sums loses them, and waits without any row until they are back."""
    engine = make_engine(changed(living, living={"retire": 1, "least": 4}), backbone)
    for client in engine.members:
        texts = [backbone.tokenizer.decode(e.ids) for e in client.data.examples]
        client.data = client.data.part(np.flatnonzero([("finds" in text) == (client.index == 2) for text in texts]))
    owner = engine.members[2]
    owner.feed = Leaving(owner)
    method = build_method(engine.config)
    reports = []
    state = method.prepare(engine)
    alone = set(owner.assignment) - {m for client in engine.members[:2] for m in client.assignment}
    federate(method, engine, state, range(6), lambda _, report: reports.append(report))
    engine.detach()
    changes = [report.change for report in reports]
    assert alone and [set(change.retired) for change in changes] == [set(), set(), alone, set(), set(), set()]
    assert [owner.name in {p.name for p in report.participants} for report in reports] == [True] + 3 * [
        False
    ] + 2 * [True]
    assert changes[4].came == {owner.name: len(owner.data)} and changes[4].opened


class Vanishing:
    """Rows of one kind go before round 1, those that are late come before round 2."""

    def __init__(self, client: Client, gone: np.ndarray, late: np.ndarray):
        self.everything = client.data
        self.here = [np.flatnonzero(~late), np.flatnonzero(~late & ~gone), np.flatnonzero(~gone)]

    def version(self, t: int) -> int:
        return min(t, 2)

    def data(self, version: int):
        return self.everything.part(self.here[version])


@pytest.mark.parametrize("known", [True, False], ids=["no expert opens", "an expert opens"])
def test_what_was_familiar_stays_so_until_an_expert_opens_that_nobody_can_tell_from_it(living, backbone, known):
    """Nobody has moods any more when sums come and familiar prompts are learned anew."""
    config = changed(living, router={"training": "chosen", "familiar": 0.95}, data={"train": 60})
    config = changed(config, alignment={"max_experts": 3}) if known else config  # no room: it is a known one's
    engine, method = make_engine(config, backbone), build_method(config)
    moods, said = [], []
    engine.console.say = said.append
    for client in engine.members:
        texts = [backbone.tokenizer.decode(e.ids) for e in client.data.examples]
        gone, late = (np.array([word in text for text in texts]) for word in ("review", "finds"))
        moods.append(client.data.features[torch.from_numpy(gone)])
        client.feed = Vanishing(client, gone, late)
        client.data = client.feed.data(0)
    states, opened = [method.prepare(engine)], []
    for t in (1, 2, 3):
        state, change = method.live(engine, states[-1], t)
        states.append(state)
        opened.append(bool(change.opened))
    engine.detach()
    assert opened == [False, not known, False]
    familiar = [float(state.weights(torch.cat(moods)).any(1).float().mean()) for state in states]
    assert min(familiar[:2]) > 0.9
    assert (familiar[3] > 0.9) == known, "with the rows that are left alone moods are strange"
    assert any("count as strange from now on" in line for line in said) != known
    assert torch.equal(states[1].known, states[0].known) and not torch.equal(states[2].known, states[1].known)


@pytest.mark.parametrize("silent", ["one", "all"])
def test_a_client_that_does_not_say_what_is_familiar_loses_nothing(living, backbone, silent):
    """Sums come, and the only client with moods does not answer the question that follows, or nobody does."""
    config = changed(living, router={"training": "chosen", "familiar": 0.95}, data={"train": 60})
    engine, method = make_engine(config, backbone), build_method(config)
    kinds = [[backbone.tokenizer.decode(e.ids) for e in client.data.examples] for client in engine.members]
    moods, sums = ([np.array([word in text for text in own]) for own in kinds] for word in ("review", "finds"))
    alone = max(range(3), key=lambda i: moods[i].sum())
    known = engine.members[alone].data.features[torch.from_numpy(moods[alone])]
    for i, client in enumerate(engine.members):
        client.data = client.data.part(np.flatnonzero(~sums[i] if i == alone else ~moods[i]))
        if i != alone:
            client.feed = Arriving(client, np.flatnonzero(~sums[i][~moods[i]]))
            client.data = client.feed.data(0)
    before, replies = method.prepare(engine), engine.replies

    def some(step, asked, question):
        quiet = {alone, *(range(3) if silent == "all" else ())} if step.name == "moments" else set()
        return replies(step, [one for one in asked if one.member.index not in quiet], question)

    engine.replies = some
    after, change = method.live(engine, before, 1)
    engine.detach()
    assert change.opened and len(known) > 20
    familiar = [float(state.weights(known).any(1).float().mean()) for state in (before, after)]
    assert min(familiar) > 0.9 and after.router.axes, "and the router still knows what is strange"
    assert torch.equal(before.known, after.known) == (silent == "all")
