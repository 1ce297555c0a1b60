"""FedWeave's promises: it never sees a label, and a round is what the equations say."""

import dataclasses
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedweave.aggregation.standing import Standing, left_out
from fedweave.backbone.prompts import Encoded
from fedweave.config import from_tree
from fedweave.federation import compute as computes
from fedweave.federation.admission import Receipts
from fedweave.federation.client import Client
from fedweave.federation.news import Change
from fedweave.federation.rounds import federate, sample_clients
from fedweave.methods import METHODS, build_method
from fedweave.methods.warm_start import warm_up_router
from fedweave.settings import to_tree
from fedweave.training.batch import ClientData
from fedweave.training.lockstep import LockstepTrainer
from tests.federations import changed, make_engine, run


def test_labels_never_reach_the_method(config, backbone):
    """What a method is handed has no place for a label, and other labels give bit-identical results."""
    names = {f.name for cls in (Encoded, ClientData, Client) for f in dataclasses.fields(cls)}
    assert not names & {"task", "label", "labels", "origin"}
    _, true = run(config, make_engine(config, backbone))
    _, false = run(config, make_engine(config, backbone, shuffle_labels=True))
    assert torch.equal(true.theta, false.theta) and torch.equal(true.phi, false.phi)


def test_experts_start_as_the_mean_of_their_buckets_warmup_adapters(config, backbone, monkeypatch):
    engine = make_engine(config, backbone)
    adapters = []
    train = LockstepTrainer.train

    def spy(self, lanes, *args, **kwargs):
        for lane, result in zip(lanes, train(self, lanes, *args, **kwargs), strict=True):
            adapters.append(lane.theta + result.delta_theta)
            yield result

    monkeypatch.setattr(LockstepTrainer, "train", spy)
    state = build_method(config).prepare(engine)
    engine.detach()
    owners = [m for client in engine.members for m in client.assignment]
    assert len(owners) == len(adapters) == state.report["prototypes"]
    for m, expert in enumerate(state.layout.unstack(state.theta)):
        mean = torch.stack([a for a, owner in zip(adapters, owners, strict=True) if owner == m]).mean(0)
        torch.testing.assert_close(expert, mean)


def test_the_warmup_can_have_a_rate_of_its_own(config, backbone, monkeypatch):
    """The warmup alone: rounds keep training.lr."""
    rates, train = [], LockstepTrainer.train

    def spy(self, lanes, *args, **kwargs):
        rates.append(self.config.lr)
        return train(self, lanes, *args, **kwargs)

    monkeypatch.setattr(LockstepTrainer, "train", spy)
    starts = []
    for rate in ("auto", 1e-3):
        own = dataclasses.replace(config, discovery=dataclasses.replace(config.discovery, warmup_lr=rate))
        starts.append(run(own, make_engine(own, backbone))[0].theta)
    assert rates == [1e-2, 1e-2, 1e-3, 1e-2] and not torch.equal(*starts)


def test_how_many_march_together_is_decided_once(config, backbone, monkeypatch):
    """Later rounds find less memory free, since the first one's parameters stay there: that must change nothing."""
    asked, real = [], computes.lanes_that_fit
    monkeypatch.setattr(
        computes, "lanes_that_fit", lambda b, l, lanes, t: asked.append(len(lanes)) or real(b, l, lanes, t)
    )
    own = dataclasses.replace(config, training=dataclasses.replace(config.training, rounds=3))
    state, _ = run(own, make_engine(own, backbone))
    assert asked == [state.report["prototypes"], 3]  # the warmup's buckets, and the clients of all rounds


def test_a_round_is_the_asymmetric_average_of_lone_clients(config, backbone, smooth_optimiser):
    """Each client trained alone, then both sums written out, equals one federated round."""
    engine = make_engine(config, backbone)
    method = build_method(config)
    state = method.prepare(engine)
    final = federate(method, engine, state, range(1), lambda state, report: None)
    layout, owner = state.layout, state.layout.expert_of_column
    theta, phi = state.theta.clone(), state.forgetting().phi.clone()
    counts = [method.counts(c, state) for c in engine.members]
    for client, n in zip(engine.members, counts, strict=True):
        lane = method.lane(client, state, 0)
        result = next(engine.compute.train(layout, state.router, [lane], "alone"))
        share = torch.tensor([n[m] / sum(c[m] for c in counts) if sum(c[m] for c in counts) else 0.0
                              for m in range(layout.experts)])  # fmt: skip
        theta += share[owner] * result.delta_theta
        phi += len(client) / sum(map(len, engine.members)) * result.delta_phi
    engine.detach()
    assert (theta - final.theta).abs().max() <= 1e-5 and (phi - final.forgetting().phi).abs().max() <= 1e-5
    trained = phi.shape[1]
    assert torch.equal(final.phi[:, trained:], state.phi[:, trained:]), "what is familiar stands still"
    assert final.phi.shape[1] > trained and (final.theta - state.theta).abs().max() > 1e-3


def test_every_example_counts_for_exactly_one_expert(config, backbone):
    engine = make_engine(config, backbone)
    method = build_method(config)
    state = method.prepare(engine)
    engine.detach()
    for client in engine.members:
        counts = method.counts(client, state)
        assert counts.sum() == len(client)
        assert torch.bincount(client.example_experts(), minlength=state.layout.experts).tolist() == counts.tolist()


@pytest.mark.parametrize(("asked", "count"), [(1.0, 10), (0.3, 3), (0.01, 1), (4, 4), (99, 10)])
def test_participation_is_a_fraction_or_a_count(config, asked, count):
    clients = [Client(i, ClientData(str(i), [], torch.zeros(0, 1))) for i in range(10)]
    tree = to_tree(config)
    tree["training"]["participation"] = asked
    rounds = [sample_clients(clients, from_tree(tree), t) for t in range(6)]
    assert all(len(chosen) == count == len({c.index for c in chosen}) for chosen in rounds)
    if count < 10:
        assert len({tuple(c.index for c in chosen) for chosen in rounds}) > 1
    assert rounds == [sample_clients(clients, from_tree(tree), t) for t in range(6)]


def test_one_pattern_everywhere_still_trains(config, backbone):
    """Identical prompts: one bucket a client, too little to align with two clients, and no NaN."""
    engine = make_engine(config, backbone)
    engine.members = engine.members[:2]
    for client in engine.members:
        client.data.features[:] = 1.0
    state, final = run(config, engine)
    assert [len(c.buckets) for c in engine.members] == [1, 1] and state.layout.experts == 1
    assert np.isfinite(final.theta.numpy()).all()


def test_the_router_starts_over_without_those_whom_round_1_has_shown(config, backbone):
    """They taught it before anybody could know."""
    wary = changed(config, federation={"rule": "agreement"}, data={"clients": 5, "train": 30})
    engine, method = make_engine(wary, backbone), build_method(wary)
    state = method.prepare(engine)
    assert set(state.report["left_out"]) == set(left_out(state.standing, wary.federation.hostile))
    state.report["left_out"] = []
    liar = engine.members[1]
    standing = {member.name: -1.0 if member is liar else 1.0 for member in engine.members}
    shown = replace(state, phi=state.phi + 9.0, standing=standing, norms={"router": [1e-9]})
    asked, change = dict(engine.answered[liar.name]), Change(1)
    again = method.reconsider(engine, shown, change)
    assert change.restarted and liar.name not in change.up and set(change.up) == set(change.down)
    assert engine.answered[liar.name] == asked, "it is not asked"
    assert again.norms == {} and torch.equal(again.theta, shown.theta) and again.standing == shown.standing
    engine.members.remove(liar)
    nobody, router = Standing(engine.members, wary), state.router.trained
    first = router.initial(wary.seed + 1)
    alone = warm_up_router(engine, method.warm, router, first, Receipts(), nobody, known=True)
    engine.detach()
    torch.testing.assert_close(again.phi[0, : router.size], alone)
    assert torch.equal(again.phi[:, router.size :], shown.phi[:, router.size :]), "what is familiar stays so"
    told = replace(shown, report=shown.report | {"left_out": [liar.name]})
    assert method.reconsider(engine, told, Change(1)) is told, (
        "where the warm start did without it there is no need"
    )
    for other in (
        {"router": {"warm_start": {"enabled": False}}},
        {"privacy": {"level": "client"}, "discovery": {"max_buckets": 1, "sketch": 4}},
    ):
        assert build_method(changed(wary, **other)).reconsider(engine, shown, Change(1)) is shown
    untold = replace(shown, report={key: value for key, value in shown.report.items() if key != "left_out"})
    assert method.reconsider(engine, untold, Change(1)) is untold, "another rule, or a bundle"


def test_every_method_has_a_summary():
    from fedweave.methods import method_class

    assert all(method_class(name).summary for name in METHODS)
