"""Teacher-forced losses equal what transformers computes with labels on the answer alone."""

import torch
import torch.nn.functional as F

from fedweave.evaluation.losses import example_losses
from fedweave.experts.layout import AdapterLayout
from fedweave.experts.mixture import Mixture
from tests.conftest import FAMILIES
from tests.helpers import TARGETS, client_data, random_theta


def test_bare_losses_equal_the_models_own(backbone_of):
    for family in FAMILIES:
        backbone = backbone_of(family)
        examples = client_data(backbone, 6, seed=3).examples
        ours = example_losses(backbone, examples)
        for example, loss in zip(examples, ours, strict=True):
            ids = torch.from_numpy(example.ids).long()[None]
            with torch.no_grad(), backbone.decoding() as model:
                logits = model(ids).logits[0, example.answer_start - 1 : -1]
            expected = F.cross_entropy(logits, ids[0, example.answer_start :])
            torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-4)


def test_one_hot_gates_equal_that_expert_alone(backbone):
    layout = AdapterLayout.of(backbone.linear_layers(TARGETS), 4, 3)
    theta = random_theta(layout, 1, 0.3)
    examples = client_data(backbone, 5, seed=4).examples
    mixture = Mixture(backbone.linear_layers(TARGETS), layout, 16)
    gates = F.one_hot(torch.tensor([2, 0, 1, 2, 1]), 3).float()
    mixed = example_losses(backbone, examples, mixture, theta, gates)
    mixture.detach()
    single = layout.with_experts(1)
    for m, alone in enumerate(layout.unstack(theta)):
        mixture = Mixture(backbone.linear_layers(TARGETS), single, 16)
        losses = example_losses(backbone, examples, mixture, alone)
        mixture.detach()
        rows = gates[:, m] == 1
        torch.testing.assert_close(mixed[rows], losses[rows], atol=1e-5, rtol=1e-5)
