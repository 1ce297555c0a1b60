"""RoLoRA, FedSVD, centralised, IFCA and FedRouter, each against the property that defines it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedweave.config import from_tree
from fedweave.evaluation.losses import example_losses
from fedweave.experts.layout import AdapterLayout
from fedweave.federation.client import Client
from fedweave.federation.rounds import federate, one_round
from fedweave.methods import build_method
from fedweave.methods.several import by_share, nearest_router
from fedweave.methods.single import refactored
from fedweave.router.mlp import RouterLayout
from fedweave.settings import to_tree
from fedweave.training.batch import ClientData
from tests.federations import make_engine, run, with_method
from tests.helpers import random_theta

pytestmark = pytest.mark.usefixtures("smooth_optimiser")


def products(layout, theta):
    return torch.cat([(layer["B"].T @ layer["A"]).flatten() for layer in layout.views(theta)])


def prepared(config, backbone, method):
    config = with_method(config, method)
    engine, built = make_engine(config, backbone), build_method(config)
    return engine, built, built.prepare(engine)


# ------------------------------------------------------------------------------------------ RoLoRA


def test_rolora_moves_one_factor_a_round_and_so_averages_products(config, backbone):
    engine, method, state = prepared(config, backbone, "rolora")
    is_b, shares = state.layout.is_b, [len(c) for c in engine.members]
    for t, moves in enumerate((is_b, ~is_b, is_b)):
        updates = list(method.local_updates(engine.compute, state, engine.members, t))
        after, report = one_round(method, engine, state, engine.members, t)
        assert not any(u.delta_theta[~moves].any() for u in updates)
        assert torch.equal(after.theta[~moves], state.theta[~moves]) and (after.theta != state.theta)[moves].any()
        ends = [products(state.layout, state.theta + u.delta_theta) for u in updates]
        mean = sum(n * end for n, end in zip(shares, ends, strict=True)) / sum(shares)
        assert (products(state.layout, after.theta) - mean).abs().max() <= 1e-6
        assert set(report.receipts.bytes_up.values()) == {4 * int(moves.sum())}
        state = after
    engine.detach()


def test_fedit_does_not_average_products(config, backbone):
    """What RoLoRA is for: the same check fails once both factors move."""
    engine, method, state = prepared(config, backbone, "fedit")
    state = federate(method, engine, state, range(1), lambda *_: None)
    updates = list(method.local_updates(engine.compute, state, engine.members, 1))
    after = method.aggregate(engine, state, iter(updates))
    engine.detach()
    ends = [u.samples * products(state.layout, state.theta + u.delta_theta) for u in updates]
    mean = sum(ends) / sum(len(c) for c in engine.members)
    assert (products(state.layout, after.theta) - mean).abs().max() > 1e-4


# ------------------------------------------------------------------------------------------ FedSVD


@pytest.mark.parametrize("rank", [4, 10])  # 10 is more than a layer gives out
def test_refactoring_keeps_every_product_and_makes_a_orthonormal(rank):
    layout = AdapterLayout(("a", "b"), (12, 12), (16, 8), rank=rank, experts=1)
    theta = random_theta(layout, 3, 0.5)
    new = refactored(layout, theta)
    torch.testing.assert_close(products(layout, new), products(layout, theta), atol=1e-5, rtol=1e-4)
    for layer in layout.views(new):
        torch.testing.assert_close(layer["A"] @ layer["A"].T, torch.eye(rank), atol=1e-5, rtol=0)
    start = layout.initial(0)
    for old, layer in zip(layout.views(start), layout.views(refactored(layout, start)), strict=True):
        assert not layer["B"].any()
        torch.testing.assert_close(layer["A"] @ layer["A"].T, torch.eye(rank), atol=1e-5, rtol=0)
        inside = old["A"] @ layer["A"].T @ layer["A"]
        torch.testing.assert_close(inside, old["A"], atol=1e-5, rtol=1e-4)  # the directions that A had


def test_fedsvd_uploads_b_and_is_ffa_before_the_refactoring(config, backbone):
    engine, method, state = prepared(config, backbone, "fedsvd")
    is_b = state.layout.is_b
    after, report = one_round(method, engine, state, engine.members, 0)
    assert set(report.receipts.bytes_up.values()) == {4 * int(is_b.sum())} and report.bytes_down == 4 * len(is_b)
    plain = build_method(with_method(config, "ffa-lora"))
    expected, _ = one_round(plain, engine, state, engine.members, 0)
    engine.detach()
    torch.testing.assert_close(
        products(state.layout, after.theta), products(state.layout, expected.theta), atol=1e-5, rtol=1e-4
    )
    assert not torch.equal(after.theta[~is_b], expected.theta[~is_b])


# ------------------------------------------------------------------------------------------ centralised


def test_centralised_is_fedit_with_one_client_that_has_everything_and_takes_all_steps(config, backbone):
    central = with_method(config, "centralised")
    engine = make_engine(central, backbone)
    parts = [client.data for client in engine.members]
    everything = ClientData(
        "everybody", [e for p in parts for e in p.examples], torch.cat([p.features for p in parts]), len(parts)
    )
    engine.members = [Client(0, everything)]
    _, final = run(central, engine)
    tree = to_tree(with_method(config, "fedit"))
    tree["training"]["local_steps"] *= len(parts)
    fedit = from_tree(tree)
    engine = make_engine(fedit, backbone)
    engine.members = [Client(0, replace(everything, gathered=1))]
    _, expected = run(fedit, engine)
    assert torch.equal(final.theta, expected.theta)


# ------------------------------------------------------------------------------------------ IFCA


def with_adapters(config, count):
    tree = to_tree(config)
    tree["alignment"]["max_experts"] = count
    return from_tree(tree)


def test_ifca_takes_the_adapter_with_the_lowest_loss_and_moves_no_other(config, backbone):
    engine, method, state = prepared(with_adapters(config, 3), backbone, "ifca")
    owner, client = state.layout.expert_of_column, engine.members[0]
    state = replace(state, theta=state.theta + random_theta(state.layout, 5, 0.3))
    mixture = engine.compute.mixture(state.layout)
    losses = [
        example_losses(backbone, client.data.examples, mixture, state.theta, g.expand(len(client), -1)).mean()
        for g in torch.eye(3)
    ]
    (update,) = method.local_updates(engine.compute, state, [client], 1)
    best = int(torch.stack(losses).argmin())
    assert update.counts.tolist() == [len(client) * (m == best) for m in range(3)]
    assert update.delta_theta[owner == best].any() and not update.delta_theta[owner != best].any()
    after = method.aggregate(engine, state, iter([update]))
    engine.detach()
    assert torch.equal(after.theta[owner != best], state.theta[owner != best])
    torch.testing.assert_close(after.weights(client.data.features[:1])[0], F.one_hot(torch.tensor(best), 3).float())


def test_ifca_with_one_adapter_is_fedit(config, backbone):
    one = with_adapters(config, 1)
    _, ifca = run(with_method(one, "ifca"), make_engine(one, backbone))
    _, fedit = run(with_method(one, "fedit"), make_engine(one, backbone))
    assert torch.equal(ifca.theta, fedit.theta)


def test_ifca_begins_with_a_draw_that_does_not_collapse(config, backbone):
    """All adapters are alike at first: the lowest loss would be everybody's first adapter for ever."""
    engine, method, state = prepared(with_adapters(config, 2), backbone, "ifca")
    clients = [replace(engine.members[0], index=i) for i in range(16)]
    draws = method.choices(engine.compute, state, clients, 0)
    engine.detach()
    assert set(draws) == {0, 1}


def test_clients_of_ifca_choose_each_for_itself(config, backbone):
    engine, method, state = prepared(with_adapters(config, 3), backbone, "ifca")
    state = replace(state, theta=state.theta + random_theta(state.layout, 5, 0.3))
    together = method.choices(engine.compute, state, engine.members, 1)
    alone = [method.choices(engine.compute, state, [client], 1)[0] for client in engine.members]
    engine.detach()
    assert together == alone


# ------------------------------------------------------------------------------------------ FedRouter


def test_the_nearest_centre_is_what_the_router_picks():
    generator = torch.Generator().manual_seed(1)
    centres, points = torch.randn(5, 7, generator=generator), torch.randn(200, 7, generator=generator)
    router, phi = nearest_router(centres)
    expected = torch.cdist(points, centres).argmin(1)
    assert torch.equal(router.route(phi, points).argmax(1), expected) and len(expected.unique()) == 5


def test_adapters_that_nobody_took_have_equal_weights():
    router = RouterLayout(4, 1, 3)
    for taken, expected in (([1.0, 3.0, 0.0], [0.25, 0.75, 0.0]), ([0.0] * 3, [1 / 3] * 3)):
        weights = router.route(by_share(router, torch.tensor(taken)), torch.randn(2, 4))
        assert torch.allclose(weights, torch.tensor([expected] * 2), atol=1e-6)


def test_fedrouter_trains_one_bucket_a_round_with_its_own_expert(config, backbone):
    engine, method, state = prepared(with_adapters(config, 3), backbone, "fedrouter")
    owner, client = state.layout.expert_of_column, max(engine.members, key=lambda c: len(c.buckets))
    assert len(client.buckets) > 1
    for t in range(len(client.buckets)):
        lane, m = method.lane(client, state, t), client.assignment[t]
        assert set(np.concatenate(lane.schedule)) <= set(client.buckets[t])
        (update,) = method.local_updates(engine.compute, state, [client], t)
        assert update.counts.nonzero().tolist() == [[m]] and update.counts[m] == len(client.buckets[t])
        assert not update.delta_theta[owner != m].any() and update.delta_theta[owner == m].any()
    engine.detach()


def test_nothing_but_centroids_leaves_a_client_of_fedrouter_at_discovery(config, backbone):
    from sklearn.cluster import KMeans

    config = with_adapters(with_method(config, "fedrouter"), 3)
    engine, method, sent = make_engine(config, backbone), build_method(config), {}
    real = engine.answers

    def spy(step, members, question):
        for client, message in real(step, members, question):
            sent[client.index] = message
            yield client, message

    engine.answers = spy
    state = method.prepare(engine)
    engine.detach()
    centroids = []
    for client in engine.members:
        assert set(sent[client.index].tensors) == {"signatures"}
        means = torch.stack([client.data.features[b].mean(0) for b in client.buckets])
        torch.testing.assert_close(sent[client.index].tensors["signatures"], means)
        centroids.append(means)
    theirs = KMeans(3, n_init=10, random_state=config.seed).fit(torch.cat(centroids).double().numpy()).labels_
    mine = np.array(state.report["prototype_labels"])
    assert ((mine[:, None] == mine) == (theirs[:, None] == theirs)).all()
