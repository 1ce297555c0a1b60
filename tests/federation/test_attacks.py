"""What hostile clients of a simulation send, and what becomes of it."""

from dataclasses import replace

import pytest
import torch

from fedweave.cli import main
from fedweave.data.hostile import hostile_clients
from fedweave.federation.hostile import BOAST, boast
from fedweave.federation.rounds import one_round
from fedweave.methods import build_method
from tests.federations import changed, make_engine, run
from tests.helpers import events

pytestmark = pytest.mark.usefixtures("smooth_optimiser")


def first_round(config, backbone):
    """(θ before and after a round, its report, the engine)"""
    engine, method = make_engine(config, backbone), build_method(config)
    for client in engine.members:
        client.boast = boast(config, client.index)
    state = method.prepare(engine)
    moved, report = one_round(method, engine, state, engine.members, 0)
    engine.detach()
    return state.theta, moved.theta, report, engine


@pytest.fixture
def plain(config):
    return changed(config, method="fedit", training={"rounds": 1, "local_steps": 2}, data={"clients": 5})


def test_whoever_flips_sends_the_opposite_of_what_was_learned(plain, backbone):
    start, honest, _, engine = first_round(plain, backbone)
    config = changed(plain, attack={"kind": "flip", "clients": 1.0})
    _, flipped, report, _ = first_round(config, backbone)
    torch.testing.assert_close(flipped - start, start - honest, atol=1e-7, rtol=1e-5)
    assert len(report.receipts.accepted) == len(engine.members), "nothing of it looks wrong"


@pytest.mark.parametrize("kind", ["flip", "claim"])
def test_an_attack_may_begin_later(plain, backbone, kind):
    """Until then everything is as with honest clients, the warm start included."""
    config = changed(plain, method="fedweave", training={"rounds": 2}, federation={"rule": "clip"})
    later = changed(config, attack={"kind": kind, "clients": 0.4, "after": 1})
    thetas = {}
    for name, one in (("honest", config), ("later", later)):
        engine, method = make_engine(one, backbone), build_method(one)
        state = method.prepare(engine)
        first, _ = one_round(method, engine, state, engine.members, 0)
        second, report = one_round(method, engine, first, engine.members, 1)
        engine.detach()
        thetas[name] = (state.phi, first.theta, second.theta)
    for t, (was, found) in enumerate(zip(*thetas.values(), strict=True)):
        assert torch.equal(was, found) == (t < 2)
    assert bool(report.receipts.refused) == (kind == "claim")


def test_whoever_shouts_is_let_in(plain, backbone):
    config = changed(plain, attack={"kind": "shout", "clients": 0.2})
    start, honest, calm, _ = first_round(plain, backbone)
    _, shouted, report, engine = first_round(config, backbone)
    assert len(report.receipts.accepted) == len(engine.members) and not report.receipts.refused
    longest, usual = max(report.receipts.norms["experts"]), max(calm.receipts.norms["experts"])
    assert 1.2 * usual < longest <= 8.01 * usual
    assert (shouted - start) @ (honest - start) < 0.9 * (honest - start).square().sum(), "it pulls back"


def test_a_thousand_times_the_examples_are_believed_and_held_down_by_the_ceiling(plain, backbone):
    config = changed(plain, attack={"kind": "inflate", "clients": 0.2})
    start, honest, _, _ = first_round(plain, backbone)
    _, taken, report, engine = first_round(config, backbone)
    (hostile,) = hostile_clients(config)
    assert len(engine.members[hostile]) == BOAST * len(engine.members[hostile].data)
    assert not report.receipts.refused
    capped = changed(config, federation={"rule": "clip", "max_share": 0.2})
    _, held, _, _ = first_round(capped, backbone)
    moves = [torch.cosine_similarity(theta - start, honest - start, dim=0) for theta in (taken, held)]
    assert moves[0] < 0 < moves[1]


@pytest.mark.parametrize("method", ["without-prototype-expert", "without-client-router", "fedrouter"])
def test_whatever_the_method_a_thousand_times_the_examples_contradict_nothing(method, config, backbone):
    config = changed(config, method=method, attack={"kind": "inflate", "clients": 0.4})
    _, _, report, engine = first_round(config, backbone)
    (hostile,) = hostile_clients(config)
    assert len(report.receipts.accepted) == len(engine.members) and not report.receipts.refused
    *counts, samples = report.agreement._counts[hostile]
    assert max(counts) <= samples and max(counts) >= BOAST, "it is believed"


@pytest.mark.parametrize("labels", ["buckets", "router"])
def test_who_claims_experts_that_it_was_not_given_is_refused(labels, config, backbone):
    """Where the router labels examples any of them may be any expert's, but each is one's alone."""
    config = changed(
        config, attack={"kind": "claim", "clients": 0.2}, data={"clients": 5, "partition": "pure"},
        training={"rounds": 1}, discovery={"max_buckets": 1}, federation={"rule": "clip"},
        experts={"labels": labels, "shared_rank": 8 * (labels == "router")},
    )  # fmt: skip
    _, _, report, engine = first_round(config, backbone)
    (hostile,) = hostile_clients(config)
    ((name, why),) = report.receipts.refused
    assert name == engine.members[hostile].name and "claims" in why


def test_who_is_refused_in_round_1_has_taught_the_router_for_nothing(config, backbone):
    """What it sent in the warm start was let in: the router starts over without it."""
    config = changed(
        config, attack={"kind": "claim", "clients": 0.2}, data={"clients": 5}, training={"rounds": 2},
        federation={"rule": "agreement", "contested": "keep"}, alignment={"max_experts": 2},
    )  # fmt: skip
    engine, method = make_engine(config, backbone), build_method(config)
    liar = engine.members[next(iter(hostile_clients(config)))].name
    state = method.prepare(engine)
    state.report["left_out"] = []  # had it been honest in the warm start
    state = replace(state, standing={member.name: 0.1 for member in engine.members})
    moved, report = one_round(method, engine, state, engine.members, 0)
    assert [name for name, _ in report.receipts.refused] == [liar] and report.left_out == [liar]
    again, change = method.live(engine, moved, 1)
    engine.detach()
    assert change.restarted and liar not in change.up and not torch.equal(again.phi, moved.phi)


def test_quarantine_may_begin_and_end_when_a_run_is_resumed(tmp_path, small, says):
    """The operator sees who pulls against the others only when it has happened."""
    attacked = [
        "method=fedit", "data.clients=5", "training.local_steps=2", "attack.kind=flip", "attack.clients=0.2",
        "federation.quarantine=2", "training.rounds=3", f"output={tmp_path / 'run'}",
    ]  # fmt: skip
    assert main(["run", "quickstart", *small, *attacked, "--quiet"]) == 0
    for quarantine, rounds in ((0, 4), (1, 5)):
        again = [f"federation.quarantine={quarantine}", f"training.rounds={rounds}", "--quiet"]
        assert main(["resume", str(tmp_path / "run"), *again]) == 0
    rounds = events(tmp_path / "run", "round")
    (liar,) = rounds[1]["quarantined"]
    assert [liar in event["participants"] for event in rounds] == [True, True, False, True, False]
    assert f"round 2: {liar} in quarantine" in says("watch", tmp_path / "run", "--once")


def test_who_is_absent_is_as_if_it_were_not_there(config, backbone):
    plain = changed(config, data={"clients": 5}, training={"rounds": 1, "local_steps": 2})
    absent = changed(plain, attack={"kind": "absent", "clients": 0.2})
    (gone,) = hostile_clients(absent)
    engine = make_engine(absent, backbone)
    _, found = run(absent, engine)
    assert gone not in [client.index for client in engine.members]
    without = make_engine(plain, backbone)
    del without.members[gone]
    _, wanted = run(plain, without)
    torch.testing.assert_close(found.theta, wanted.theta)
    torch.testing.assert_close(found.phi, wanted.phi)
