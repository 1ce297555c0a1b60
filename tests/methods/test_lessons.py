"""What an expert that opens learns before its first round, and what it starts from."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedweave.federation.message import Message, Refused
from fedweave.federation.news import Change, Placed
from fedweave.federation.state import broadcast
from fedweave.federation.steps import Asked
from fedweave.federation.train import expert_name
from fedweave.methods import build_method
from fedweave.methods.growing import GrowRouter, grow_router
from fedweave.methods.lessons import give_lessons, shared_of
from tests.federations import changed
from tests.methods.conftest import federation


@pytest.fixture
def taught(living):
    """Experts that start at zero beside a shared part, and have two lessons."""
    return changed(
        living, experts={"start": "zero", "shared_rank": 4, "rank": 4, "dropout": 0.0},
        training={"lr": 1e-2, "batches": "mixed"}, living={"lessons": 2},
    )  # fmt: skip


def opening(config, backbone):
    """(engine, method, state before, state after, change) of an opening beside a shared part that has learned."""
    engine, method = federation(config, backbone)
    state = method.prepare(engine)
    shared = (state.layout.expert_of_column == state.layout.experts) & state.layout.is_b
    theta = state.theta.clone()
    theta[shared] = 0.05 * torch.randn(int(shared.sum()), generator=torch.Generator().manual_seed(0))
    before = replace(state, theta=theta)
    after, change = method.live(engine, before, 1)
    assert change.opened
    return engine, method, before, after, change


def new_loss(engine, state, m):
    """Mean loss of the rows of expert m, under it."""
    found = []
    for client in engine.members:
        rows = [i for b, owner in zip(client.buckets, client.assignment, strict=True) if owner == m for i in b]
        if rows:
            gates = torch.eye(state.layout.experts)[[m] * len(rows)]
            found += engine.compute.losses(
                state.layout, state.theta, [client.data.examples[i] for i in rows], gates
            ).tolist()
    return sum(found) / len(found)


def test_lessons_teach_the_new_expert_and_move_nothing_else(taught, backbone):
    engine, _, before, after, change = opening(taught, backbone)
    _, _, _, untaught, _ = opening(changed(taught, living={"lessons": 0}), backbone)
    was, now = (s.layout.unstack(s.theta) for s in (before, after))
    assert all(torch.equal(old, new) for old, new in zip(was, now, strict=False)), "old experts stay to the bit"
    assert torch.equal(shared_of(before), shared_of(after)), "and so does what they share"
    is_b = after.layout.with_experts(1).is_b
    for m in change.opened:
        assert not untaught.layout.unstack(untaught.theta)[m][is_b].any() and now[m][is_b].any()
        assert new_loss(engine, after, m) < new_loss(engine, untaught, m) - 0.05
    engine.detach()


def test_a_lesson_is_the_mean_of_its_clients_by_their_rows(taught, backbone):
    engine, _, _, after, change = opening(changed(taught, living={"lessons": 0}), backbone)
    (m,) = change.opened
    engine.members[0].assignment[-1] = m  # so that two clients have rows of it
    lesson = build_method(changed(taught, living={"lessons": 1})).living.lesson
    told = give_lessons(engine, lesson, after, [m], Change(1))
    owners = [client for client in engine.members if m in client.assignment]
    small = after.layout.narrow(1)
    start = small.stack([after.layout.unstack(after.theta)[m]], shared_of(after))
    question = broadcast(replace(after, layout=small, router=None, theta=start, phi=None), 1, torch.bfloat16)
    question.facts.update(opened=[m], turn=0)
    answers = list(lesson.answer(engine.compute, owners, question))
    rows = torch.tensor([float(answer.figures["counts"][0]) for answer in answers])
    moved = torch.stack([answer.parts[expert_name(m)] for answer in answers])
    engine.detach()
    assert len(owners) == 2 and not torch.allclose(moved[0], moved[1])
    mean = (rows / rows.sum()) @ moved
    torch.testing.assert_close(told.layout.unstack(told.theta)[m], after.layout.unstack(after.theta)[m] + mean)


def test_a_lesson_is_given_beside_what_all_experts_share(taught, backbone):
    """The same rows and steps lead elsewhere where the shared part has learned something else."""
    engine, _, _, after, change = opening(changed(taught, living={"lessons": 0}), backbone)
    (m,) = change.opened
    lesson = build_method(changed(taught, living={"lessons": 1})).living.lesson
    bare = after.theta.clone()
    bare[after.layout.expert_of_column == after.layout.experts] = 0.0
    found = [
        give_lessons(engine, lesson, replace(after, theta=theta), [m], Change(1)) for theta in (after.theta, bare)
    ]
    engine.detach()
    beside, alone = (state.layout.unstack(state.theta)[m] for state in found)
    assert not torch.allclose(beside, alone)


def test_lessons_are_counted_among_the_bytes_between_rounds(taught, backbone):
    engine, _, _, after, change = opening(taught, backbone)
    _, _, _, _, without = opening(changed(taught, living={"lessons": 0}), backbone)
    engine.detach()
    (m,) = change.opened
    one, shared = after.layout.with_experts(1).size, len(shared_of(after))
    owners = {client.name for client in engine.members if m in client.assignment}
    for name in owners:
        assert change.down[name] - without.down[name] == pytest.approx(2 * 2 * (one + shared), rel=0.01), "half"
        assert change.up[name] - without.up[name] == pytest.approx(2 * 4 * one, rel=0.01)
    assert {name: n for name, n in change.up.items() if name not in owners} == {
        name: n for name, n in without.up.items() if name not in owners
    }, "nobody else is asked"


def test_a_client_that_claims_other_rows_than_it_has_is_refused(taught, backbone):
    engine, method, _, _, change = opening(taught, backbone)
    member = next(client for client in engine.members if set(client.assignment) & set(change.opened))
    asked = Asked(member, Message(facts={"t": 1, "opened": change.opened}), engine.layers, engine.width)
    own = [sum(n for n, e in zip(member.sizes, member.assignment, strict=True) if e == m) for m in change.opened]
    lesson = method.living.lesson
    assert set(lesson.parts(asked, {"counts": own})) == {expert_name(m) for m in change.opened}
    with pytest.raises(Refused, match="other examples for a new expert"):
        lesson.parts(asked, {"counts": [own[0] + 1, *own[1:]]})
    engine.detach()


def test_an_oracle_gives_the_same_lessons(taught, backbone):
    """A bound must not lack what the method has."""
    config = changed(taught, living={"notice": "off"}, data={"changes": ["99: all lose mood"]})
    after = []
    for lessons in (0, 2):
        told = changed(config, living={"lessons": lessons})
        engine, _ = federation(told, backbone)
        for client in engine.members:
            for data in {id(d): d for d in (client.data, getattr(client.feed, "everything", client.data))}.values():
                texts = [backbone.tokenizer.decode(e.ids) for e in data.examples]
                data.features = torch.eye(2)[[int("finds" in text) for text in texts]]
        method = build_method(replace(told, method="oracle"))
        state = method.prepare(engine)
        # as after a round: the known kind's expert has learned something
        known = (state.layout.expert_of_column == 0) & state.layout.is_b
        state = replace(state, theta=torch.where(known, 0.01, state.theta))
        after.append((state, method.live(engine, state, 1)[0]))
        engine.detach()
    (_, untaught), (before, told) = after
    is_b = told.layout.with_experts(1).is_b
    assert torch.equal(told.layout.unstack(told.theta)[0], before.layout.unstack(before.theta)[0])
    assert not untaught.layout.unstack(untaught.theta)[1][is_b].any()
    assert told.layout.unstack(told.theta)[1][is_b].any()


def test_an_expert_may_start_as_a_copy_of_the_nearest(taught, backbone):
    config = changed(taught, living={"lessons": 0, "start": "nearest"})
    engine, method = federation(config, backbone)
    state = method.prepare(engine)
    theta = state.theta + torch.rand(state.layout.size, generator=torch.Generator().manual_seed(1))  # all differ
    before = replace(state, theta=theta)
    after, change = method.live(engine, before, 1)
    engine.detach()
    assert change.opened
    for m in change.opened:
        old = before.layout.unstack(before.theta)[change.nearest_of(m)]
        assert torch.equal(after.layout.unstack(after.theta)[m], old)


def test_a_router_that_is_taught_longer_is_surer_of_the_new_kind(taught, backbone):
    """Where features tell it from the others; what the router knows of old experts stays to the bit."""
    engine, _, before, _, change = opening(changed(taught, living={"lessons": 0}), backbone)
    new = torch.zeros(engine.width)
    new[:4] = 1.0
    for client in engine.members:
        sign = torch.where(client.example_experts() == change.opened[0], 1.0, -1.0)
        client.data.features = sign[:, None] * new
    found = []
    for turns in (1, 12):
        step = GrowRouter(changed(taught, living={"turns": turns}, router={"warm_start": {"lr": 1e-2}}))
        router, phi = grow_router(engine, step, before.router.trained, before.phi[0], 1, Change(1))
        views = router.views(phi)
        kept = torch.cat([views["linear1.weight"].flatten(), views["linear2.weight"][:-1].flatten()])
        found.append(
            (float(router.route(phi, new[None])[0, -1]), float(router.route(phi, -new[None])[0, -1]), kept)
        )
    engine.detach()
    (short, others, kept), (long, fewer, same) = found
    assert long > short + 0.05 and fewer < others and torch.equal(kept, same)
    auto = GrowRouter(changed(taught, router={"warm_start": {"rounds": 10}})).settings.rounds
    assert auto == 4 and step.settings.rounds == 12


def test_nearest_is_what_most_of_an_experts_rows_lie_by():
    """Not most buckets, and not those of another expert."""

    def bucket(rows: int, expert: int, nearest: int) -> Placed:
        return Placed("client", rows, expert, nearest, 0.9, 1.0, 1.0, 0.1, 1.0)

    change = Change(3, placed=[bucket(5, 4, 1), bucket(5, 4, 1), bucket(12, 4, 2), bucket(50, 5, 0)])
    assert change.nearest_of(4) == 2 and change.nearest_of(5) == 0
