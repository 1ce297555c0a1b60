"""Our decoding equals transformers' own greedy generation, for every family and every kind of routing."""

import pytest
import torch

from fedweave.experts.layout import AdapterLayout
from fedweave.experts.mixture import Mixture
from fedweave.inference.generate import generate
from fedweave.inference.model import FedWeaveModel
from fedweave.router.mlp import RouterLayout, sparsify
from fedweave.router.routed import RoutedExperts
from tests.conftest import FAMILIES
from tests.helpers import TARGETS, random_theta

PROMPTS = [
    "Fix the grammar: Ada go to the park.",
    "Mood of the review, one word:",
    "How many?",
    "Ben has 3 coins and finds 4 more. How many coins in all? " * 2,
]


def reference(backbone, encoded, new_tokens, mixture, weights, gates):
    """One prompt at a time through transformers."""
    texts = []
    for prompt, gate in zip(encoded, gates, strict=True):
        ids = torch.from_numpy(prompt.ids).long()[None]
        ends = list({backbone.prompts.end_id, backbone.tokenizer.eos_token_id})
        with torch.no_grad(), backbone.decoding() as model, mixture.active(weights, gate[None, None]):
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                do_sample=False,
                eos_token_id=ends,
                pad_token_id=backbone.tokenizer.pad_token_id,
            )
        texts.append(backbone.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip())
    return texts


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("routing", ["sparse", "soft"])
def test_a_mixed_batch_equals_one_prompt_at_a_time(backbone_of, family, routing):
    backbone = backbone_of(family)
    layers = backbone.linear_layers(("all-linear",))
    layout = AdapterLayout.of(layers, 4, 3)
    mixture = Mixture(layers, layout, 16)
    theta = random_theta(layout, 5, 0.2)
    gates = sparsify(torch.rand(4, 3, generator=torch.Generator().manual_seed(1)).softmax(-1), routing)
    encoded = backbone.prompts.encode_prompts(PROMPTS)
    ours = generate(backbone, encoded, 24, mixture, theta, gates, batch_size=3)
    theirs = reference(backbone, encoded, 24, mixture, layout.views(theta[None]), gates)
    mixture.detach()
    assert ours == theirs
    assert len(set(ours)) > 1


def test_every_row_has_its_own_limit_in_common_batches(backbone):
    encoded = backbone.prompts.encode_prompts(PROMPTS)
    limits = [3, 12, 1, 12]
    alone = [generate(backbone, [prompt], limit)[0] for prompt, limit in zip(encoded, limits, strict=True)]
    assert generate(backbone, encoded, limits, batch_size=3) == alone
    assert generate(backbone, encoded, 12)[1] == alone[1] and generate(backbone, encoded, 12)[0] != alone[0]


def test_an_end_token_stops_a_row_and_nothing_after_it_is_kept(backbone):
    """Declare the third token of an answer to be the end: the answer is cut there."""
    encoded = backbone.prompts.encode_prompts(["How many?"])
    ids = torch.from_numpy(encoded[0].ids).long()[None]
    with torch.no_grad(), backbone.decoding() as model:
        third = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)[0, -1]
    free = generate(backbone, encoded, 20)[0]
    old, backbone.prompts.end_id = backbone.prompts.end_id, int(third)
    try:
        stopped = generate(backbone, encoded, 20)[0]
    finally:
        backbone.prompts.end_id = old
    assert free.startswith(stopped) and len(stopped) < len(free)


def test_answers_carry_expert_and_weights(backbone):
    layout = AdapterLayout.of(backbone.linear_layers(TARGETS), 4, 2)
    mixture = Mixture(backbone.linear_layers(TARGETS), layout, 16)
    router = RouterLayout(backbone.width, 8, 2)
    experts = RoutedExperts(layout, router, random_theta(layout, 1), router.initial(0)[None])
    model = FedWeaveModel(backbone, mixture, experts)
    answers = model.generate(PROMPTS[:2], "sparse", max_new_tokens=4)
    assert torch.equal(torch.tensor([a.weights for a in answers]), model.route(PROMPTS[:2]))
    assert all(a.expert == max(range(2), key=a.weights.__getitem__) for a in answers)
    mixture.detach()
