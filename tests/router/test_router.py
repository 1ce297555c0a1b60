"""The flat router against nn.Sequential, sparse gates against check vectors, and the warm start."""

import pytest
import torch

from fedweave.aggregation.rules import ClientAverage
from fedweave.config_method import WarmStartConfig
from fedweave.methods.warm_start import LabelledFeatures, contrast_of, warm_start_clients
from fedweave.router.mlp import RouterLayout, sparsify


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


@pytest.mark.parametrize("contrast", ["own", "all"])
def test_warm_start_learns_the_alignment_labels_from_clients_that_each_see_a_part(contrast):
    torch.manual_seed(0)
    centres = torch.randn(3, 12) * 3
    clients = []
    for seen in ([0, 1], [1, 2], [2], [0, 2]):  # no client sees all experts
        experts = torch.tensor(seen).repeat_interleave(20)
        clients.append((centres[experts] + torch.randn(len(experts), 12), experts))
    layout = RouterLayout(12, 32, 3)
    start = layout.initial(0)
    settings = WarmStartConfig(rounds=10, steps=20, batch_size=16)

    def warm_start():
        phi = start
        for t in range(settings.rounds):
            lessons = [LabelledFeatures(*client, (1, t, i)) for i, client in enumerate(clients)]
            average = ClientAverage(layout.size, phi.device)
            for delta, lesson in zip(
                warm_start_clients(layout, phi, lessons, settings, contrast), lessons, strict=True
            ):
                average.add(delta, len(lesson.features))
            phi = phi + average.step()
        return phi

    phi = warm_start()
    features, experts = torch.cat([f for f, _ in clients]), torch.cat([e for _, e in clients])
    right = layout.route(phi, features).gather(1, experts[:, None])
    before = layout.route(start, features).gather(1, experts[:, None])
    assert right.mean() > 0.9 > before.mean()
    assert torch.equal(phi, warm_start())


def test_a_client_does_not_unlearn_experts_that_it_has_no_example_of():
    """One client of three owns expert 2; the two others must leave its logit alone."""
    torch.manual_seed(0)
    layout = RouterLayout(6, 16, 3)
    start = layout.initial(0)
    features = torch.randn(40, 6)
    pupil = LabelledFeatures(features, (features[:, 0] > 0).long(), (0,))  # experts 0 and 1

    def change(contrast):
        settings = WarmStartConfig(rounds=1, steps=30)
        moved = layout.views(warm_start_clients(layout, start, [pupil], settings, contrast)[0])
        return moved["linear2.bias"].abs(), moved["linear2.weight"].abs().amax(1)

    bias, weight = change("own")
    assert bias[2] == weight[2] == 0 and weight[:2].min() > 1e-3
    bias, weight = change("all")
    assert bias[2] > 1e-3 and weight[2] > 1e-3
    alone = LabelledFeatures(features, torch.full((40,), 2), (0,))  # one expert: nothing to tell apart
    assert not warm_start_clients(layout, start, [alone], WarmStartConfig(rounds=1, steps=3), "own").any()


@pytest.mark.parametrize(
    ("assignments", "found"),
    [
        ([[0, 1], [1, 2]], "own"),  # 0 and 2 are linked through 1
        ([[0, 1], [2, 2]], "all"),  # nobody can tell 2 from the others
        ([[0], [1], [2]], "all"),
        ([[0, 1], [2], [2, 0]], "own"),
        ([[0, 1, 2, -1], [-1], []], "own"),  # buckets that were kept apart, a client without any
        ([[0, 2], [2]], "own"),  # 1 is an expert of nobody
    ],
)
def test_clients_contrast_their_own_experts_where_that_links_all(assignments, found):
    assert contrast_of(assignments) == found
    assert contrast_of(assignments, "all") == "all" and contrast_of(assignments, "own") == "own"


def test_clients_that_warm_up_together_do_as_each_would_alone():
    """Also one with fewer examples than a batch, and with other experts: its filling must not count."""
    torch.manual_seed(1)
    layout, settings = RouterLayout(8, 6, 3), WarmStartConfig(rounds=1, steps=7, batch_size=10)
    phi = layout.initial(0)
    sizes = ((30, 0, 2), (4, 1, 3), (12, 0, 3))  # examples, and from which expert to which
    pupils = [
        LabelledFeatures(torch.randn(n, 8), torch.randint(a, b, (n,)), (0, i)) for i, (n, a, b) in enumerate(sizes)
    ]
    together = warm_start_clients(layout, phi, pupils, settings, "own")
    alone = torch.cat([warm_start_clients(layout, phi, [pupil], settings, "own") for pupil in pupils])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)
    assert together.abs().max() > 1e-3


# -------------------------------------------------------------------------------------- growing


def test_a_grown_router_forgets_nothing():
    layout = RouterLayout(6, 10, 3)
    phi, features = layout.initial(0), torch.randn(50, 6)
    wide, grown = layout.grown(phi, 2)
    before, after = (r.logits(r.views(p[None]), features[None])[0] for r, p in ((layout, phi), (wide, grown)))
    assert wide.experts == 5
    torch.testing.assert_close(after[:, :3], before)
    assert not after[:, 3:].any()
    assert len(wide.outputs(3)) == 2 * 11 and len(wide.outputs(0)) == 5 * 11
    kept = torch.ones(wide.size, dtype=torch.bool)
    kept[wide.outputs(3)] = False
    assert torch.equal(grown[kept], phi), "what was there is there to the bit"


def test_only_new_outputs_learn_and_they_learn_the_new_kind():
    """One client has an old kind and the new one, another only old ones; both teach, and old outputs stay as they
    are to the bit."""
    generator = torch.Generator().manual_seed(0)
    layout = RouterLayout(8, 32, 2)
    centres = 3 * torch.eye(8)[:3]

    def rows(kind: int) -> torch.Tensor:
        return centres[kind] + 0.3 * torch.randn(40, 8, generator=generator)

    labels = [torch.full((40,), kind) for kind in range(3)]
    old = LabelledFeatures(torch.cat([rows(0), rows(1)]), torch.cat(labels[:2]), (0,))
    phi = layout.initial(0)
    phi = phi + warm_start_clients(layout, phi, [old], WarmStartConfig(steps=100, lr=1e-2), "all")[0]
    wide, grown = layout.grown(phi, 1)
    taught = [
        LabelledFeatures(torch.cat([rows(0), rows(2)]), torch.cat([labels[0], labels[2]]), (1,)),
        LabelledFeatures(torch.cat([rows(0), rows(1)]), torch.cat(labels[:2]), (2,)),
    ]
    after = grown
    for _ in range(5):
        after = after + warm_start_clients(wide, after, taught, WarmStartConfig(steps=30, lr=1e-2), "own", 2).mean(
            0
        )
    kept = torch.ones(wide.size, dtype=torch.bool)
    kept[wide.outputs(2)] = False
    assert torch.equal(after[kept], grown[kept]) and not torch.equal(after, grown)
    for kind in range(3):
        assert (wide.choose(after, rows(kind)) == kind).float().mean() > 0.9
