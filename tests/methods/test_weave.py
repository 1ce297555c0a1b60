"""The method of the `weave` recipe: a shared part, labels by the router, chosen experts, a late rate."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedweave.config import Config, from_tree, load_config
from fedweave.errors import UserError
from fedweave.federation.admission import Door, Receipts
from fedweave.federation.message import Message
from fedweave.federation.rounds import federate
from fedweave.federation.state import router_facts
from fedweave.federation.steps import Asked
from fedweave.methods import build_method, relabel
from fedweave.settings import to_tree
from fedweave.training.narrow import Narrow
from tests.federations import make_engine, run, with_method
from tests.helpers import make_trainer

WEAVE = ("experts.shared_rank", "experts.start", "experts.labels", "router.training", "training.batches")


def weave(config: Config, **keys) -> Config:
    """The tiny config with the recipe's switches, and a shared part of twice an expert's rank."""
    recipe, tree = to_tree(load_config("weave")), to_tree(config)
    for key in (*WEAVE, "training.schedule"):
        section, name = key.split(".")
        tree[section][name] = recipe[section][name]
    tree["experts"]["shared_rank"] = 8
    for key, value in keys.items():
        section, name = key.split("__")
        tree[section][name] = value
    return from_tree(tree)


@pytest.fixture
def woven(config) -> Config:
    return weave(config)


def prepared(config, backbone):
    engine, method = make_engine(config, backbone), build_method(config)
    return engine, method, method.prepare(engine)


def test_no_client_counts_more_prompts_for_the_experts_than_it_has(woven, backbone):
    """Each of its examples is one expert's, so that none speaks for all of them with everything."""
    engine, method, state = prepared(woven, backbone)
    member = engine.members[0]
    question = Message({"phi": state.phi[0]}, {"t": 0, **router_facts(state.router)})
    asked, said = Asked(member, question, engine.layers, engine.width), []
    ((_, sent),) = engine.replies(method.relabel, [asked], question)
    greedy = [len(member)] * state.layout.experts
    for counts in (sent.facts["counts"], greedy):
        door = Door(woven, method.relabel, [asked], engine.identity, engine.device, Receipts())
        door.admit(member, Message(sent.tensors, sent.facts | {"counts": counts}), said.append)
    engine.detach()
    assert len(said) == 1 and "it counts more prompts than it has" in said[0]


def test_experts_start_at_zero_alike_and_the_shared_part_has_an_a_of_its_own(woven, backbone):
    engine, _, state = prepared(woven, backbone)
    engine.detach()
    layout = state.layout
    assert layout.shared == 8 and not state.theta[layout.is_b].any()
    assert torch.equal(state.theta, layout.initial(woven.seed))
    experts = layout.unstack(state.theta)
    assert all(torch.equal(expert, experts[0]) for expert in experts)
    first = layout.views(state.theta)[0]["A"]
    assert not torch.equal(first[-8:-4], first[:4])


def test_every_example_belongs_to_the_expert_that_the_router_picks(woven, backbone):
    engine, method, state = prepared(woven, backbone)
    engine.detach()
    counts = torch.zeros(state.layout.experts)
    for client in engine.members:
        expected = state.weights(client.data.features).argmax(1)
        assert torch.equal(method.labels(client, state), expected)
        lane = method.lane(client, state, 0)
        assert torch.equal(lane.gates, F.one_hot(expected, state.layout.experts).float()) and lane.phi is None
        own = method.counts(client, state)
        assert own.tolist() == torch.bincount(expected, minlength=state.layout.experts).tolist()
        counts += own
    assert counts.int().tolist() == state.report["router_examples"]


def test_experts_with_too_few_examples_are_dropped_and_their_prompts_go_to_the_rest(woven, backbone):
    engine, _, all_of_them = prepared(weave(woven, experts__min_share=0.0), backbone)
    engine.detach()
    share = sorted(all_of_them.report["router_examples"])[-1] / sum(all_of_them.report["router_examples"])
    few = weave(woven, experts__min_share=min(0.5, share))
    engine, method, state = prepared(few, backbone)
    kept = [m for m in range(all_of_them.layout.experts) if m not in state.report["dropped_experts"]]
    assert 0 < len(kept) == state.layout.experts == state.router.experts < all_of_them.layout.experts
    features = torch.cat([client.data.features for client in engine.members])
    before, after = all_of_them.weights(features)[:, kept], state.weights(features)
    torch.testing.assert_close(after, before / before.sum(1, keepdim=True))
    assert sum(state.report["router_examples"]) == len(features)
    assert all(m < len(kept) for client in engine.members for m in client.assignment)
    final = federate(method, engine, state, range(1), lambda *_: None)
    engine.detach()
    assert final.theta.isfinite().all()


def test_a_round_averages_the_shared_part_over_clients_and_experts_over_their_examples(
    woven, backbone, smooth_optimiser
):
    engine, method, state = prepared(woven, backbone)
    final = federate(method, engine, state, range(1), lambda *_: None)
    layout, owner = state.layout, state.layout.expert_of_column
    assert layout.experts > 1
    counts = torch.stack([
        torch.cat([method.counts(c, state), torch.tensor([float(len(c))])]) for c in engine.members
    ])  # fmt: skip
    shares = counts / counts.sum(0).clamp(min=1)
    theta = state.theta.clone()
    for client, share in zip(engine.members, shares, strict=True):
        lane = method.lane(client, state, 0)
        assert set(np.concatenate(lane.schedule)) <= set(range(len(client)))
        result = next(engine.compute.train(layout, None, [lane], "alone"))
        absent = share[owner] == 0
        assert not result.delta_theta[absent].any(), "no gradient reaches an expert that no example chose"
        theta += share[owner] * result.delta_theta
    engine.detach()
    assert (theta - final.theta).abs().max() <= 1e-5
    assert (final.theta - state.theta)[owner == layout.experts].abs().max() > 1e-3
    assert torch.equal(final.phi, state.phi), "the router stays as its warm start left it"


def test_without_a_chosen_expert_the_shared_part_learns_what_fedit_learns(woven, backbone, smooth_optimiser):
    """With all gates at zero the shared part sees what FedIT sees, at its scale: nothing to gain costs nothing."""
    engine, method, state = prepared(woven, backbone)
    layout, owner = state.layout, state.layout.expert_of_column
    alone = layout.shared_part
    for client in engine.members:
        lane = method.lane(client, state, 0)
        closed = replace(lane, gates=torch.zeros_like(lane.gates))
        result = next(engine.compute.train(layout, None, [closed], "shared"))
        single = replace(lane, gates=None, theta=state.theta[owner == layout.experts])
        expected = next(engine.compute.train(alone, None, [single], "single"))
        assert (result.delta_theta[owner == layout.experts] - expected.delta_theta).abs().max() <= 1e-5
        assert not result.delta_theta[owner < layout.experts].any()
    fedit = build_method(with_method(woven, "fedit"))
    fedit.form_buckets(engine.compute, engine.members)
    schedules = [method.lane(c, state, 0).schedule for c in engine.members]
    for client, mine in zip(engine.members, schedules, strict=True):
        theirs = fedit.lane(client, state, 0).schedule
        assert all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))
    engine.detach()


def test_the_router_picks_once_for_a_client_and_again_once_it_or_the_rows_are_others(woven, backbone, monkeypatch):
    engine, method, state = prepared(woven, backbone)
    asked, real = [], relabel.picked
    monkeypatch.setattr(relabel, "picked", lambda *given: asked.append(1) or real(*given))
    for _ in range(2):
        state = federate(method, engine, state, range(2), lambda *_: None)
    engine.detach()
    assert len(asked) == len(engine.members)
    client = engine.members[0]
    other = replace(state, phi=-state.phi)
    assert torch.equal(method.labels(client, other), real(other.router, other.phi[0], client.data.features))
    client.data = client.data.part(range(5))
    assert len(method.labels(client, other)) == 5 and len(asked) == len(engine.members) + 2


def test_messages_hold_the_shared_part_and_no_router(woven, backbone):
    """No warmup adapter is asked for, and no Δφ travels."""
    asked, method = [], build_method(woven)
    engine = make_engine(woven, backbone)
    real = engine.answers

    def spy(step, members, question):
        for client, message in real(step, members, question):
            asked.append((step.name, set(message.tensors)))
            yield client, message

    engine.answers = spy
    federate(method, engine, method.prepare(engine), range(1), lambda *_: None)
    engine.detach()
    assert "start" not in dict(asked) and {"discover", "warm", "relabel", "train"} <= set(dict(asked))
    for step, tensors in asked:
        if step == "train":
            assert "shared" in tensors and "router" not in tensors


def test_the_late_rate_is_the_same_for_half_of_the_rounds_and_then_falls(config, backbone, monkeypatch):
    from fedweave.training.lockstep import LaneGroup

    seen, step = [], LaneGroup.step

    def spy(self, batch):
        seen.append([float(group["lr"]) for group in self.optimiser.param_groups])
        return step(self, batch)

    monkeypatch.setattr(LaneGroup, "step", spy)
    tree = to_tree(with_method(config, "fedit"))
    tree["training"] |= {"rounds": 4, "local_steps": 1, "schedule": "late"}
    late = from_tree(tree)
    run(late, make_engine(late, backbone))
    assert [rate for (rate,) in seen] == pytest.approx([1e-2, 1e-2, 1e-2, 0.5e-2])


@pytest.mark.parametrize("key", WEAVE)
def test_every_switch_works_alone(key, config, backbone):
    section, name = key.split(".")
    tree = to_tree(config)
    tree[section][name] = to_tree(weave(config))[section][name]
    alone = from_tree(tree)
    start, final = run(alone, make_engine(alone, backbone))
    assert final.theta.isfinite().all() and not torch.equal(start.theta, final.theta)
    assert torch.equal(start.phi, final.phi) == (key == "router.training")


def test_an_oracle_with_the_methods_own_labels_and_router_is_the_method(woven, backbone):
    """The bound has the same start and the same budget: only what it is told differs."""
    config = with_method(weave(woven, experts__labels="buckets"), "oracle")
    engine = make_engine(config, backbone)
    for client in engine.members:
        client.data.features = F.one_hot(torch.arange(len(client.data)) % 2, 2).float()
    oracle = build_method(config)
    state = oracle.prepare(engine)
    assert torch.equal(state.theta, state.layout.initial(config.seed)) and state.layout.shared == 8
    method = build_method(with_method(config, "fedweave"))
    for client in engine.members:
        mine, bound = method.lane(client, state, 0), oracle.lane(client, state, 0)
        assert torch.equal(mine.gates, bound.gates) and mine.key == bound.key
        assert all(np.array_equal(a, b) for a, b in zip(mine.schedule, bound.schedule, strict=True))
        assert torch.equal(method.counts(client, state), oracle.counts(client, state))
    engine.detach()


def test_every_example_counts_alike_whatever_its_answers_length(config, backbone):
    """The step's loss is the mean of the examples' own, where tokens would favour long answers."""
    even = weave(config, training__weighting="example", experts__dropout=0.0)
    engine, method, state = prepared(even, backbone)
    lane = method.lane(engine.members[0], state, 0)
    lane = replace(lane, schedule=[np.arange(4)])
    found = next(engine.compute.train(state.layout, None, [lane], "even")).losses[0]
    rows = lane.examples(0)
    assert len({len(e.ids) - e.answer_start for e in rows}) > 1
    each = engine.compute.losses(state.layout, state.theta, rows, lane.gates[:4])
    engine.detach()
    assert found == pytest.approx(each.mean().item(), abs=1e-5)


def test_a_sure_gate_is_the_routers_own_weight_in_training_as_in_use(woven, backbone):
    engine, method, state = prepared(weave(woven, router__gate="sure"), backbone)
    engine.detach()
    features = engine.members[0].data.features
    weights, lane = state.weights(features), method.lane(engine.members[0], state, 0)
    top = weights.max(1)
    assert torch.equal(lane.gates.max(1).values, top.values) and top.values.min() < 1
    assert torch.equal(lane.gates.argmax(1), top.indices) and (lane.gates > 0).sum(1).eq(1).all()


def test_some_examples_rest_from_their_expert_others_each_round(woven, backbone):
    engine, method, state = prepared(weave(woven, experts__rest=0.5), backbone)
    engine.detach()
    first, second = (method.lane(engine.members[0], state, t).gates.any(1) for t in (0, 1))
    assert 0 < first.sum() < len(first) and not torch.equal(first, second)
    full = build_method(woven).lane(engine.members[0], state, 0).gates
    assert torch.equal(method.lane(engine.members[0], state, 0).gates[first], full[first])


def test_an_examples_expert_is_drawn_from_the_routers_weights_among_those_its_client_serves(woven, backbone):
    engine, method, state = prepared(weave(woven, experts__temperature=2.0, router__gate="sure"), backbone)
    engine.detach()
    client = max(engine.members, key=len)
    plain = build_method(weave(woven, router__gate="sure")).lane(client, state, 0).gates
    rounds = [method.lane(client, state, t).gates for t in range(400)]
    assert torch.equal(rounds[0], method.lane(client, state, 0).gates), "a repeated round draws the same"
    for gates in rounds:
        assert torch.equal(gates.sum(1), plain.sum(1)) and (gates > 0).sum(1).eq(1).all()
    served = method.counts(client, state) > 0
    odds = state.weights(client.data.features).sqrt() * served
    often = torch.stack([gates > 0 for gates in rounds]).float().mean(0)
    assert served.sum() > 1 and (odds.min(1).values > 0).any() | ~served.all()
    assert (often - odds / odds.sum(1, keepdim=True)).abs().max() < 0.15  # six standard deviations


def test_a_lane_holds_the_experts_that_its_examples_use_and_learns_the_same(woven, backbone, smooth_optimiser):
    engine, method, state = prepared(woven, backbone)
    wide = replace(state, layout=state.layout.narrow(5))
    wide.theta = wide.layout.initial(3)
    lanes = [method.lane(client, state, 0) for client in engine.members[:3]]
    used = [(1, 4), (4,), (0, 2)]
    for lane, experts in zip(lanes, used, strict=True):
        lane.theta, lane.gates = wide.theta, torch.zeros(len(lane.data), 5)
        rows = torch.arange(len(lane.data))
        lane.gates[rows, torch.tensor(experts)[rows % len(experts)]] = 1
        lane.opened = lane.gates.any(0)
    held = Narrow(wide.layout, lanes)
    assert held.layout.experts == 2 and [len(lane.theta) for lane in held.lanes] == [held.layout.size] * 3
    results = list(engine.compute.train(wide.layout, None, lanes, "narrow"))
    engine.detach()
    trainer, mixture = make_trainer(backbone, wide.layout, None, woven.experts.dropout, lr=woven.training.lr)
    trainer.mixture.scale = woven.experts.alpha / woven.experts.rank
    owner = wide.layout.expert_of_column
    for result, whole, experts in zip(results, trainer.train(lanes, 3), used, strict=True):
        assert (result.delta_theta - whole.delta_theta).abs().max() <= 1e-5
        for m in range(5):
            assert result.delta_theta[owner == m].any() == (m in experts)
        assert result.delta_theta[owner == 5].any()
    mixture.detach()


@pytest.mark.parametrize("key", ["router.gate=sure", "experts.rest=0.1"])
def test_doing_without_an_expert_needs_a_shared_part(key):
    with pytest.raises(UserError, match=r"needs a part that experts share: set experts\.shared_rank"):
        load_config("weave", ["experts.shared_rank=0", key])


def test_a_shared_rank_that_is_no_multiple_is_one_sentence(config):
    with pytest.raises(UserError, match=r"experts.shared_rank=6 must be a multiple of experts.rank=4"):
        weave(config, experts__shared_rank=6)


def test_an_ablation_of_the_router_needs_one_that_trains(woven):
    with pytest.raises(UserError, match=r"set router\.training=soft"):
        build_method(with_method(woven, "without-client-router"))
