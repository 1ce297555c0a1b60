"""DP-SGD: no example moves a step's sum by more than the clip, and the noise is as large as it is said to be."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedweave.config_method import WarmStartConfig
from fedweave.experts.layout import AdapterLayout
from fedweave.methods.warm_start import LabelledFeatures, warm_start_clients
from fedweave.router.mlp import RouterLayout
from fedweave.training.batch import Shield
from fedweave.training.lockstep import LockstepTrainer
from fedweave.training.private import PrivateTrainer, noised
from fedweave.training.schedule import drawn_schedule
from tests.helpers import TARGETS, make_lanes, make_trainer

pytestmark = pytest.mark.usefixtures("smooth_optimiser")


@pytest.fixture
def setup(backbone):
    """(lanes of two clients, trainers of both kinds)"""
    layout = AdapterLayout.of(backbone.linear_layers(TARGETS), 4, 2)
    router = RouterLayout(backbone.width, 16, 2)
    lanes = make_lanes(backbone, layout, router, clients=2, steps=2)
    private, mixture = make_trainer(backbone, layout, router, kind=PrivateTrainer)
    free = replace(private.config, clip=1e9)
    yield lanes, LockstepTrainer(backbone, mixture, router, free, 0.0, private.router_rate), private
    mixture.detach()


def sums(trainer, lanes, clip, drawn):
    """A step's sums of the first lane, which draws these examples."""
    lane = replace(lanes[0], schedule=[np.array(drawn)])
    found, _ = trainer._sums([lane], 0, [lane.theta[None], lane.phi[None]], clip)
    return torch.cat([part[0] for part in found])


def test_without_clip_and_noise_a_step_is_the_ordinary_one(setup):
    lanes, plain, private = setup
    for lane in (replace(lane, even=True, schedule=lane.schedule[:1]) for lane in lanes):
        shield = Shield(0.0, 1e9, float(len(lane.schedule[0])), key=1)
        (mine,) = private.train([replace(lane, shield=shield)], 1)
        (theirs,) = plain.train([lane], 1)
        assert (mine.delta_theta - theirs.delta_theta).abs().max() <= 1e-5 < theirs.delta_theta.abs().max()
        assert (mine.delta_phi - theirs.delta_phi).abs().max() <= 1e-5 < theirs.delta_phi.abs().max()
        assert mine.losses == pytest.approx(theirs.losses, rel=1e-4) and mine.tokens == theirs.tokens


def test_one_example_more_or_less_moves_a_sum_by_no_more_than_the_clip(setup):
    lanes, _, private = setup
    everybody = list(range(8))
    for clip in (1e-3, 0.1):
        whole = sums(private, lanes, clip, everybody)
        for gone in everybody:
            rest = sums(private, lanes, clip, [i for i in everybody if i != gone])
            assert (whole - rest).norm() <= clip * (1 + 1e-4)
        assert whole.norm() > 0
    alone = [sums(private, lanes, 0.1, [i]) for i in everybody]
    assert torch.allclose(torch.stack(alone).sum(0), sums(private, lanes, 0.1, everybody), atol=1e-5)


def test_experts_and_router_share_one_clip(setup):
    lanes, _, private = setup
    assert sums(private, lanes, 1e-3, [3]).norm() == pytest.approx(1e-3, rel=1e-2)


def test_noise_is_as_large_as_solved_and_another_in_every_step():
    shields = [Shield(noise=3.0, clip=0.5, expected=4.0, key=k) for k in (1, 2)]
    first, second = (noised(torch.zeros(2, 50_000), shields, step, "theta") for step in (0, 1))
    for made in (first, second):
        assert made.std(1).tolist() == pytest.approx([3.0 * 0.5 / 4.0] * 2, rel=0.02)
        assert made.mean(1).abs().max() < 0.01
    rows = torch.cat([first, second, noised(torch.zeros(2, 50_000), shields, 0, "phi")])
    assert (torch.corrcoef(rows) - torch.eye(6)).abs().max() < 0.03
    assert torch.equal(first, noised(torch.zeros(2, 50_000), shields, 0, "theta"))


def test_noise_enters_every_step_of_experts_and_router(setup):
    lanes, _, private = setup
    ends = []
    for key in (1, 2):
        empty = replace(lanes[0], schedule=[np.array([], dtype=int)] * 3, shield=Shield(1.0, 1.0, 4.0, key))
        (end,) = private.train([empty], 1)  # an empty draw moves as any other does
        assert (end.delta_theta != 0).all() and (end.delta_phi != 0).all()
        ends.append(end)
    assert not torch.equal(ends[0].delta_theta, ends[1].delta_theta)


def test_what_is_frozen_gets_no_noise(setup, backbone):
    lanes, _, private = setup
    trainable = torch.arange(len(lanes[0].theta)) % 2 == 0
    lane = replace(lanes[0], trainable=trainable, shield=Shield(1.0, 1.0, 4.0, 1))
    (end,) = private.train([lane], 1)
    assert not end.delta_theta[~trainable].any() and (end.delta_theta[trainable] != 0).all()


def test_every_example_is_drawn_by_itself_with_its_probability():
    drawn = drawn_schedule(np.arange(50), 4000, 0.2, key=5)
    inside = np.zeros((4000, 50))
    for step, batch in enumerate(drawn):
        inside[step, batch] = 1
    assert np.abs(inside.mean(0) - 0.2).max() < 0.03
    assert inside.sum(1).var() == pytest.approx(50 * 0.2 * 0.8, rel=0.1), "sizes vary as those of Poisson draws do"


# -------------------------------------------------------------------------------------- the router's warm start


def test_the_length_of_a_router_gradient_is_that_of_autograd():
    router = RouterLayout(12, 8, 3)
    phi, x, labels = router.initial(0), torch.randn(5, 12), torch.tensor([0, 1, 2, 1, 0])
    with torch.no_grad():
        logits = router.logits(router.views(phi[None]), x[None])
        errors = logits.softmax(-1) - F.one_hot(labels, 3)
        found = router.gradient_norms(router.views(phi[None]), x[None], errors)[0]
    for i in range(5):
        own = phi.clone().requires_grad_()
        loss = F.cross_entropy(router.logits(router.views(own[None]), x[None, i : i + 1])[0], labels[i : i + 1])
        (grad,) = torch.autograd.grad(loss, own)
        assert found[i].item() == pytest.approx(grad.norm().item(), rel=1e-4)


def test_one_example_moves_the_warm_start_by_no_more_than_the_clip(monkeypatch):
    """One step of plain gradient descent shows the gradient itself."""
    monkeypatch.setattr(torch.optim, "AdamW", lambda params, lr, weight_decay: torch.optim.SGD(params, lr=1.0))
    router, config = RouterLayout(12, 8, 3), WarmStartConfig(steps=1)
    x = 30 * torch.randn(6, 12, generator=torch.Generator().manual_seed(0))
    phi, labels = router.initial(0), torch.tensor([0, 1, 2, 1, 0, 2])

    def gradient(rows, noise=0.0, clip=0.1):
        shield = Shield(noise, clip, expected=float(len(rows)), key=3)
        lesson = LabelledFeatures(x[rows], labels[rows], (0, 0, 0), shield)
        return -len(rows) * warm_start_clients(router, phi, [lesson], config, "all")[0]

    whole = gradient(list(range(6)))
    for gone in range(6):
        rest = gradient([i for i in range(6) if i != gone])
        assert (whole - rest).norm() <= 0.1 * (1 + 1e-3)
    assert gradient([0]).norm() == pytest.approx(0.1, rel=1e-2), "such long features are clipped"
    noise = gradient(list(range(6)), noise=200.0) - whole
    assert noise.std().item() == pytest.approx(200 * 0.1, rel=0.15)


def test_gradients_that_do_not_fit_are_taken_of_fewer_examples_at_once(setup, monkeypatch):
    lanes, _, private = setup
    sizes = []

    def gradients(given, drawn, step, rows):
        if len(drawn) > 3:
            raise torch.OutOfMemoryError
        sizes.append(len(drawn))
        return [torch.tensor([[float(i)] for _, i in drawn])], torch.zeros(len(drawn))

    monkeypatch.setattr(private, "_gradients", gradients)
    lane = replace(lanes[0], schedule=[np.arange(8)])
    assert torch.cat(list(private.gradients(lane)))[:, 0].tolist() == list(range(8))
    assert max(sizes) <= 3
