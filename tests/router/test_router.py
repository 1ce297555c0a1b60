"""The flat router against nn.Sequential, sparse gates against check vectors, and the warm start."""

import pytest
import torch

from fedweave.config import WarmStartConfig
from fedweave.router.mlp import RouterLayout, sparsify
from fedweave.router.warmstart import warm_start, warm_start_client


def test_lanes_of_routers_equal_separate_modules():
    layout = RouterLayout(6, 10, 3)
    phis = torch.stack([layout.initial(s) for s in (1, 2)])
    features = torch.randn(2, 5, 6)
    logits = layout.logits(layout.views(phis), features)
    for k in range(2):
        module = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.GELU(), torch.nn.Linear(10, 3))
        views = layout.views(phis[k])
        module[0].weight.data, module[0].bias.data = views["linear1.weight"], views["linear1.bias"]
        module[2].weight.data, module[2].bias.data = views["linear2.weight"], views["linear2.bias"]
        torch.testing.assert_close(logits[k], module(features[k]))
        torch.testing.assert_close(layout.route(phis[k], features[k]), module(features[k]).softmax(-1))


@pytest.mark.parametrize(
    ("routing", "expected"),
    [
        ("soft", [0.644, 0.237, 0.087, 0.032]),
        ("sparse", [1.0, 0.0, 0.0, 0.0]),
        ("top2", [0.731, 0.269, 0.0, 0.0]),
        ("top3", [0.665, 0.245, 0.090, 0.0]),
        ("top4", [0.644, 0.237, 0.087, 0.032]),
    ],
)
def test_gates_of_the_release_check_vector(routing, expected):
    weights = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).softmax(-1)
    assert sparsify(weights, routing)[0].tolist() == pytest.approx(expected, abs=1e-3)


def test_top2_of_one_expert_is_that_expert():
    assert sparsify(torch.ones(2, 1), "top2").tolist() == [[1.0], [1.0]]


def test_unit_features_have_root_mean_square_one():
    layout = RouterLayout(16, 4, 2, scale="unit")
    assert layout.inputs(torch.randn(3, 16) * 50).square().mean(-1).tolist() == pytest.approx([1.0] * 3, rel=1e-4)


def test_warm_start_learns_the_alignment_labels_from_clients_that_each_see_a_part():
    torch.manual_seed(0)
    centres = torch.randn(3, 12) * 3
    clients = []
    for seen in ([0, 1], [1, 2], [2], [0, 2]):  # no client sees all experts
        experts = torch.tensor(seen).repeat_interleave(20)
        clients.append((centres[experts] + torch.randn(len(experts), 12), experts))
    layout = RouterLayout(12, 32, 3)
    start = layout.initial(0)
    settings = WarmStartConfig(rounds=5, steps=20, batch_size=16)

    def updates(phi, t):
        for i, (features, experts) in enumerate(clients):
            yield warm_start_client(layout, phi, features, experts, settings, 1, t, i), len(features)

    phi = warm_start(layout, start, 5, updates)
    features, experts = torch.cat([f for f, _ in clients]), torch.cat([e for _, e in clients])
    right = layout.route(phi, features).gather(1, experts[:, None])
    before = layout.route(start, features).gather(1, experts[:, None])
    assert right.mean() > 0.9 > before.mean()
    assert torch.equal(phi, warm_start(layout, start, 5, updates))
