"""Teacher-forced losses equal what transformers computes with labels on the answer alone."""

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fedweave.backbone.packing import pack
from fedweave.evaluation import losses
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
        found = example_losses(backbone, examples, mixture, alone)
        mixture.detach()
        rows = gates[:, m] == 1
        torch.testing.assert_close(mixed[rows], found[rows], atol=1e-5, rtol=1e-5)


def test_a_gpu_is_waited_for_once(backbone, monkeypatch):
    """Between batches the host goes on: no operation has a result that it must know first."""
    layout = AdapterLayout.of(backbone.linear_layers(TARGETS), 4, 3)
    examples = client_data(backbone, 60, seed=4).examples
    mixture, theta = Mixture(backbone.linear_layers(TARGETS), layout, 16), random_theta(layout, 1, 0.3)
    gates = torch.rand(60, 3, generator=torch.Generator().manual_seed(0))
    batches, fetched, real = [], [], torch.Tensor.cpu
    monkeypatch.setattr(losses, "pack", lambda *given: batches.append(given) or pack(*given))
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: fetched.append(x) or real(x))
    with Waits() as waits:
        found = example_losses(backbone, examples, mixture, theta, gates)
    assert len(batches) > 1 and len(fetched) == 1 and not waits.seen
    alone = torch.cat(
        [example_losses(backbone, [e], mixture, theta, gates[i : i + 1]) for i, e in enumerate(examples)]
    )
    mixture.detach()
    torch.testing.assert_close(found, alone, atol=1e-5, rtol=1e-5)
    assert example_losses(backbone, []).shape == (0,)


class Waits(TorchDispatchMode):
    """Operations for which a GPU makes the host wait."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if any(name in str(operation) for name in ("_local_scalar_dense", "nonzero", "bincount")):
            self.seen.append(operation)
        return operation(*args, **(kwargs or {}))
