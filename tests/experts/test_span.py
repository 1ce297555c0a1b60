"""Experts that see answers alone: the bare backbone reads prompts, in training, losses, decoding and bundles."""

import copy

import numpy as np
import pytest
import torch

from fedweave.backbone.packing import pack
from fedweave.bundle.load import load_bundle
from fedweave.bundle.programs import write_mlx
from fedweave.errors import UserError
from fedweave.evaluation.losses import example_losses
from fedweave.experts.layout import AdapterLayout
from fedweave.experts.mixture import Mixture
from fedweave.inference.generate import generate
from fedweave.router.mlp import RouterLayout
from fedweave.runs.use import export_as, export_run, load
from tests.helpers import PROMPTS, TARGETS, client_data, make_lanes, make_trainer, random_theta, read_json


@pytest.fixture
def apart(backbone):
    """A mixture whose span is the answer, with a part that experts share, and random experts of it."""
    layers = backbone.linear_layers(TARGETS)
    layout = AdapterLayout.of(layers, 4, 2, shared=4)
    mixture = Mixture(layers, layout, 16, "answer")
    yield mixture, random_theta(layout, 5, 0.3)
    mixture.detach()


def written_out(backbone, mixture, theta, gate, ids, start) -> torch.Tensor:
    """[T, V] of one sequence: the bare backbone reads up to ``start``, and the rest finds its keys and values."""
    weights, split = mixture.layout.views(theta[None]), start - 1
    tokens = torch.from_numpy(ids).long()[None]
    with torch.no_grad(), backbone.decoding() as model:
        read = model(tokens[:, :split], use_cache=True)
        with mixture.active(weights, gate[None, None]):
            rest = model(tokens[:, split:], past_key_values=read.past_key_values)
    return torch.cat([read.logits[0], rest.logits[0]])


def test_losses_are_those_of_a_bare_prompt(backbone, apart):
    mixture, theta = apart
    examples, gate = client_data(backbone, 4, seed=1).examples, torch.tensor([0.7, 0.3])
    found = example_losses(backbone, examples, mixture, theta, gate.expand(4, 2))
    for example, loss in zip(examples, found, strict=True):
        logits = written_out(backbone, mixture, theta, gate, example.ids, example.answer_start)
        target = torch.from_numpy(example.ids).long()[example.answer_start :]
        expected = torch.nn.functional.cross_entropy(logits[example.answer_start - 1 : -1], target)
        torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-4)
    mixture.span = "all"
    assert (example_losses(backbone, examples, mixture, theta, gate.expand(4, 2)) - found).abs().max() > 1e-3


def test_decoding_reads_prompts_bare(backbone, apart):
    mixture, theta = apart
    (prompt,) = backbone.prompts.encode_prompts(["Fix the grammar: Ada go to the park."])
    gate = torch.tensor([1.0, 0.0])
    said = generate(backbone, [prompt], 8, mixture, theta, gate[None])[0]
    ids = prompt.ids
    for _ in range(8):
        logits = written_out(backbone, mixture, theta, gate, ids, len(prompt.ids))
        ids = np.append(ids, np.int32(logits[-1].argmax()))
    expected = backbone.tokenizer.decode(ids[len(prompt.ids) :], skip_special_tokens=True).strip()
    assert said == expected


@pytest.mark.parametrize("routed", [True, False])
def test_training_moves_as_the_losses_say(backbone, routed):
    """A step's loss is the evaluation's, and what is learned does not depend on neighbours."""
    layout = AdapterLayout.of(backbone.linear_layers(TARGETS), 4, 2 if routed else 1)
    router = RouterLayout(backbone.width, 16, 2) if routed else None
    lanes = make_lanes(backbone, layout, router, clients=2, steps=2)
    for lane in lanes:
        lane.even = True
    trainer, mixture = make_trainer(backbone, layout, router)
    mixture.span = "answer"
    together, alone = list(trainer.train(lanes, 2)), list(trainer.train(copy.copy(lanes), 1))
    for lane, one, two in zip(lanes, together, alone, strict=True):
        batch = lane.schedule[0]
        gates = None
        if router is not None:
            gates = router.route(lane.phi, lane.data.features[batch])
        losses = example_losses(backbone, [lane.data.examples[i] for i in batch], mixture, lane.theta, gates)
        assert one.losses[0] == pytest.approx(losses.mean().item(), abs=1e-5)
        assert (one.delta_theta - two.delta_theta).abs().max() <= 1e-4 < one.delta_theta.abs().max()
    mixture.detach()


def test_the_last_token_of_every_sequence():
    packed = pack([[np.arange(3), np.arange(1)], [np.arange(2)]], torch.device("cpu"))
    assert packed.ends.tolist() == [False, False, True, True, False, True]


def test_a_bundle_keeps_its_span_and_other_programs_get_none(tiny_run, tmp_path):
    run = tiny_run("experts.span=answer", "training.rounds=1")
    export_run(run, tmp_path / "bundle")
    assert read_json(tmp_path / "bundle" / "fedweave.json")["span"] == "answer"
    assert "experts.span=answer" in (tmp_path / "bundle" / "README.md").read_text()
    ours, theirs = load(run), load_bundle(tmp_path / "bundle")
    assert theirs.mixture.span == "answer"
    assert ours.generate(PROMPTS, max_new_tokens=6) == theirs.generate(PROMPTS, max_new_tokens=6)
    with pytest.raises(UserError, match="see answers alone"):
        export_as(write_mlx, tmp_path / "bundle", tmp_path / "mlx")
