"""Places for new experts where one client brings ever more kinds: it has its own, and takes nobody else's."""

from __future__ import annotations

import pytest
import torch

from fedweave.federation.news import Change, Placed
from fedweave.methods import build_method
from fedweave.methods.newcomers import held_alone, openers, placed_lines
from tests.federations import changed, make_engine


def test_buckets_of_a_client_that_go_one_way_are_one_line():
    figures = {"loss": 1.0, "usual": 1.5, "doubt": 0.5, "strange": 1.0}
    placed = [Placed("a", rows, 2, 0, distance, **figures) for rows, distance in ((4, 0.9), (6, 0.8), (5, 0.85))]
    change = Change(1, placed=[*placed, Placed("b", 7, -1, 1, 0.7, **figures, waits="living.alone=2")], opened=[2])
    change.limit = 0.5
    first, second = placed_lines(change)
    assert first.startswith("before round 2: 15 rows of a in 3 buckets lie 0.80 to 0.90 from expert 0 (limit 0.50;")
    assert first.endswith("strange 100%) → expert 2, which opens")
    assert "7 rows of b lie 0.70 from expert 1" in second
    assert second.endswith("→ kept apart; resume with living.alone=2 to open an expert")


@pytest.fixture
def places(living):
    return changed(living, living={"least": 6}, data={"alpha": 100.0})  # all clients have rows enough


class Bringing:
    """A federation whose clients say of their largest bucket that it is of this or that kind."""

    def __init__(self, config, backbone):
        self.engine, self.config, self.said = make_engine(config, backbone), config, []
        self.state = build_method(config).prepare(self.engine)
        self.engine.console.say = self.said.append
        self.aligned = self.state.layout.experts

    def live(self, t: int, kinds: dict[int, int], **settings):
        """Before round t these clients bring these kinds."""
        method = build_method(changed(self.config, **settings))
        read = method.living.sign.read

        def signed(asked, parts, figures):
            found = read(asked, parts, figures)
            if (kind := kinds.get(asked.member.index)) is not None:
                torch.manual_seed(kind)
                found.signatures = torch.randn(1, found.signatures.shape[1]).expand(len(found.signatures), -1)
            return found

        method.living.sign.read = signed
        for index in kinds:
            member = self.engine.members[index]
            member.assignment = [-1 if size == max(member.sizes) else m for size, m in
                                 zip(member.sizes, member.assignment, strict=True)]  # fmt: skip
        self.state, change = method.live(self.engine, self.state, t)
        return change


def test_a_hostile_client_cannot_keep_what_others_bring_from_opening(places, backbone):
    """It brings another kind before every round, and no longer feeds the one before."""
    federation = Bringing(places, backbone)
    room = {"max_experts": federation.aligned + 3}
    opened = [len(federation.live(t, {2: t}, alignment=room).opened) for t in (1, 2, 3)]
    assert opened == [1, 0, 0] and openers(federation.state) == [""] * federation.aligned + ["client_2"]
    assert sum("kept apart; resume with living.alone=2 to open an expert" in line for line in federation.said) == 1
    change = federation.live(4, {0: 9, 1: 9, 2: 4}, alignment=room)
    assert change.opened == [federation.aligned + 1] and change.opened_by(change.opened[0]) == ""
    assert {b.client for b in change.placed if b.expert in change.opened} == {"client_0", "client_1"}
    assert held_alone(federation.state, federation.engine.members) == {"client_2": 1}
    assert len(federation.live(5, {0: 11, 1: 11}, alignment=room).opened) == 1, "the last place, too"
    federation.engine.detach()


def test_each_client_may_bring_a_kind_of_its_own(places, backbone):
    federation = Bringing(places, backbone)
    change = federation.live(1, {0: 1, 1: 2, 2: 3})
    federation.engine.detach()
    assert len(change.opened) == 3 and not any(bucket.waits for bucket in change.placed)


@pytest.mark.parametrize("why", ["operator", "others bring it", "others feed the first"])
def test_what_waits_opens_when(places, backbone, why):
    federation = Bringing(places, backbone)
    (lone,) = federation.live(1, {2: 1}).opened
    assert {bucket.waits for bucket in federation.live(2, {2: 2}).placed} == {"living.alone=2"}
    assert not federation.live(3, {}), "nobody is asked twice"
    if why == "operator":
        change = federation.live(4, {2: 2}, living={"alone": 2})
    elif why == "others bring it":
        change = federation.live(4, {1: 2, 2: 2})
    else:
        federation.engine.members[0].assignment[0] = lone
        change = federation.live(4, {2: 2})
    federation.engine.detach()
    assert change.opened == [lone + 1] and "client_2" in {b.client for b in change.placed if b.expert == lone + 1}
    assert not federation.state.report["waiting"]


@pytest.mark.parametrize("notice", ["open", "ask"])
def test_who_is_silent_when_asked_is_asked_again(places, backbone, notice):
    federation = Bringing(places, backbone)
    ask = federation.engine.ask
    federation.engine.ask = lambda step, members, *rest: ask(
        step, [m for m in members if step.name != "sign" or m.index], *rest
    )
    change = federation.live(1, {0: 1, 1: 2}, living={"notice": notice})
    assert {bucket.client for bucket in change.placed} == {"client_1"}
    federation.engine.ask = ask
    change = federation.live(2, {0: 1}, living={"notice": notice})
    federation.engine.detach()
    assert {bucket.client for bucket in change.placed} == {"client_0"}


def test_merged_experts_are_one_clients_where_both_were(places, backbone):
    federation = Bringing(places, backbone)
    (first,) = federation.live(1, {2: 1}).opened
    federation.live(2, {2: 2}, living={"alone": 2})
    signatures = federation.state.signatures
    signatures[first] = signatures[first] / signatures[first].norm()
    signatures[first + 1] = signatures[first]
    change = federation.live(3, {}, living={"merge": True, "alone": 2})
    federation.engine.detach()
    assert change.merged == [first, first + 1] and openers(federation.state)[first:] == ["client_2"]
