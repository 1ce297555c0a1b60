"""Each baseline against the property that defines it."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedweave.cli import main
from fedweave.federation.rounds import federate, one_round
from fedweave.federation.state import broadcast
from fedweave.methods import METHODS, build_method
from tests.federations import make_engine, run, with_method

pytestmark = pytest.mark.usefixtures("smooth_optimiser")


def test_fedit_is_the_sample_weighted_mean_of_lone_clients(config, backbone):
    config = with_method(config, "fedit")
    engine = make_engine(config, backbone)
    method = build_method(config)
    state = method.prepare(engine)
    assert state.layout.experts == 1 and state.layout.rank == 32 and state.router is None
    final = federate(method, engine, state, range(1), lambda *_: None)
    expected = state.theta.clone()
    for client in engine.members:
        result = next(engine.compute.train(state.layout, None, [method.lane(client, state, 0)], "alone"))
        expected += len(client) / sum(map(len, engine.members)) * result.delta_theta
    engine.detach()
    assert (final.theta - expected).abs().max() <= 1e-5 and (final.theta - state.theta).abs().max() > 1e-3


def test_ffa_never_moves_a(config, backbone):
    start, final = run(with_method(config, "ffa-lora"), make_engine(config, backbone))
    is_b = start.layout.is_b
    assert torch.equal(start.theta[~is_b], final.theta[~is_b])
    assert (start.theta[is_b] != final.theta[is_b]).any()


def test_fedsa_keeps_every_b_at_home(config, backbone):
    """A client that sits a round out keeps its B bit for bit, whatever the others train; A is shared by all."""
    config = with_method(config, "fedsa-lora")
    engine = make_engine(config, backbone)
    method = build_method(config)
    state = method.prepare(engine)
    state = federate(method, engine, state, range(1), lambda *_: None)
    is_b = state.layout.is_b
    before = state.private[0].clone()
    others = engine.members[1:]
    others[0].buckets = [others[0].buckets[0][:1]]  # the rest of its rows has gone
    after, _ = one_round(method, engine, state, others, 1)
    engine.detach()
    for client in engine.members:
        client.memory.begin(2)
    assert torch.equal(after.private[0][is_b], before[is_b])
    assert not torch.equal(after.private[1][is_b], state.private[1][is_b])
    lanes = [method.lane(client, after, 2) for client in engine.members]
    assert all(torch.equal(lane.theta[~is_b], after.theta[~is_b]) for lane in lanes)
    assert torch.equal(lanes[0].theta[is_b], before[is_b])
    sizes = torch.tensor([float(len(c)) for c in engine.members])
    mean = (sizes[:, None] * after.private).sum(0) / sizes.sum()
    torch.testing.assert_close(after.theta[is_b], mean[is_b])


def test_what_a_client_has_for_itself_outlives_a_round_in_which_it_diverges(config, backbone):
    config = with_method(config, "fedsa-lora")
    engine, method = make_engine(config, backbone), build_method(config)
    state, real = method.prepare(engine), method.local_updates

    def diverging(*asked):
        for update in real(*asked):
            yield replace(update, delta_theta=update.delta_theta * (math.nan if update.client == 1 else 1.0))

    method.local_updates = diverging
    after, report = one_round(method, engine, state, engine.members, 0)
    assert 1 not in report.receipts.accepted and after.theta.isfinite().all(), "the mean of all B is of numbers"
    assert torch.equal(after.private[1], state.private[1])
    method.local_updates = real
    _, report = one_round(method, engine, after, engine.members, 1)
    engine.detach()
    assert 1 in report.receipts.accepted


def test_local_only_communicates_nothing(config, backbone):
    config = with_method(config, "local-only")
    engine = make_engine(config, backbone)
    method = build_method(config)
    state = method.prepare(engine)
    start = state.private[1].clone()
    engine.members[1].memory.begin(0)
    alone = next(engine.compute.train(state.layout, None, [method.lane(engine.members[1], state, 0)], "alone"))
    final = federate(method, engine, state, range(1), lambda *_: None)
    engine.detach()
    assert (final.private[1] - (start + alone.delta_theta)).abs().max() <= 1e-5
    assert torch.equal(final.theta, state.theta) and len(method.served(final)) == len(engine.members)


def fedlease_with_two_clusters(config, backbone):
    """Three clients make three prototypes; two of them end in one cluster."""
    config = with_method(config, "fedlease")
    engine = make_engine(config, backbone)
    method = build_method(config)
    return engine, method, method.prepare(engine)


def test_who_is_in_quarantine_moves_no_other_clusters_router(config, backbone):
    config = with_method(config, "fedlease")
    engine, method = make_engine(config, backbone), build_method(config)
    state = method.prepare(engine)
    updates = [update for _, update in engine.ask(method.train, engine.members, broadcast(state, 0))]
    engine.detach()
    (muted, *_) = [update for update in updates if not update.counts[0]]
    without = method.aggregate(engine, state, [update for update in updates if update is not muted])
    muted.counts[:] = 0  # as a round does it (RoundReport.listen)
    assert torch.equal(method.aggregate(engine, state, updates).phi, without.phi)


def test_fedlease_trains_only_its_own_cluster(config, backbone):
    engine, method, state = fedlease_with_two_clusters(config, backbone)
    assert state.layout.experts == 2 and state.phi.shape[0] == 2 and sum(state.shares) == pytest.approx(1.0)
    owner = state.layout.expert_of_column
    for client in engine.members:
        lane = method.lane(client, state, 0)
        result = next(engine.compute.train(state.layout, state.router, [lane], "alone"))
        mine = owner == client.assignment[0]
        assert not result.delta_theta[~mine].any() and result.delta_theta[mine].any()
    lonely = next(c for c in engine.members if [d.assignment for d in engine.members].count(c.assignment) == 1)
    update = next(iter(method.local_updates(engine.compute, state, [lonely], 0)))
    after = method.aggregate(engine, state, [update])
    engine.detach()
    cluster = lonely.assignment[0]
    assert torch.equal(after.phi[1 - cluster], state.phi[1 - cluster])
    torch.testing.assert_close(after.phi[cluster], state.phi[cluster] + update.delta_phi)


def test_without_prototype_expert_every_client_moves_every_expert(config, backbone):
    config = with_method(config, "without-prototype-expert")
    engine = make_engine(config, backbone)
    method = build_method(config)
    state = method.prepare(engine)
    updates = list(method.local_updates(engine.compute, state, engine.members, 0))
    after = method.aggregate(engine, state, iter(updates))
    engine.detach()
    sizes = torch.tensor([float(len(c)) for c in engine.members])
    mean = (sizes[:, None] * torch.stack([u.delta_theta for u in updates])).sum(0) / sizes.sum()
    torch.testing.assert_close(after.theta, state.theta + mean, atol=1e-6, rtol=1e-5)


def test_without_client_router_resets_per_bucket_and_keeps_the_mismatch(config, backbone):
    config = with_method(config, "without-client-router")
    engine = make_engine(config, backbone)
    method = build_method(config)
    state = method.prepare(engine)
    client = max(engine.members, key=lambda c: len(c.buckets))
    assert len(client.buckets) > 1
    plain = build_method(with_method(config, "fedweave"))
    experts = next(iter(plain.local_updates(engine.compute, state, [client], 0)))
    update = next(iter(method.local_updates(engine.compute, state, [client], 0)))
    assert (update.delta_theta - experts.delta_theta).abs().max() <= 1e-6, "experts train as in FedWeave"
    expected = torch.zeros_like(update.delta_phi)
    for c, bucket in enumerate(client.buckets):
        lane = method._reset_lane(client, c, state, experts, 0)
        assert torch.equal(lane.phi, state.forgetting().phi[0]) and set(np.concatenate(lane.schedule)) <= set(
            bucket
        )
        result = next(engine.compute.train(state.layout, state.router, [lane], "reset"))
        assert not result.delta_theta.any(), "experts are frozen"
        expected += len(bucket) / len(client) * result.delta_phi
    engine.detach()
    assert (update.delta_phi - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs_and_resumes_from_the_command_line(tmp_path, model_folder, name):
    settings = [
        f"backbone.model={model_folder('llama')}", "backbone.device=cpu", "backbone.max_length=128",
        f"method={name}", "data.clients=4", "data.train=8", "data.validation=2", "data.test=2",
        "discovery.warmup_steps=1", "training.rounds=2", "training.local_steps=2", "training.batch_size=2",
        "router.hidden=8", "experts.single_rank=8", "evaluation.max_new_tokens=2", f"output={tmp_path / 'run'}",
    ]  # fmt: skip
    assert main(["run", "quickstart", *settings, "--quiet"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["method"] == name and np.isfinite(summary["test"]["best"]["loss"]["sparse"]["macro"])
    if name == "oracle":
        assert all(max(row) > 0.999 for row in summary["test"]["best"]["routing"].values())
    assert main(["resume", str(tmp_path / "run"), "training.rounds=3", "--quiet"]) == 0
    assert main(["generate", str(tmp_path / "run"), "How many?", "--max-new-tokens", "2"]) == (
        2 if name == "oracle" else 0
    )
