"""The attack of benchmarks/leaks.py on words finds them where they can be found."""

import numpy as np
import pytest
import torch

from benchmarks.inversion import answering, candidates, in_the_span, recovered
from fedweave.backbone.prompts import Encoded, EncodedPrompt
from fedweave.discovery.signatures import Signatures
from fedweave.experts.layout import AdapterLayout

WIDTH, TOKENS, OWN = 64, 200, 10
LAYOUT = AdapterLayout(
    ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"),
    (WIDTH, WIDTH),
    (32, 32),
    rank=16,
    experts=1,
)


@pytest.fixture
def inputs() -> torch.Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))


def members() -> np.ndarray:
    return np.arange(TOKENS) < OWN


def moved(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """An adapter that is zero but for its first layer, A [r, in] and B [r, out]."""
    theta = torch.zeros(LAYOUT.size)
    first = LAYOUT.views(theta)[0]
    first["A"].copy_(a)
    first["B"].copy_(b)
    return theta


def test_a_gradient_of_a_has_its_tokens_in_its_span(inputs):
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(16, OWN, generator=generator) @ inputs[:OWN]  # Σ_t something · x_t
    scores = in_the_span(inputs, LAYOUT, moved(gradient, torch.zeros(16, 32)))
    assert scores[:OWN].min() > 0.999 and scores[OWN:].max() < 0.7
    assert recovered(scores, members()) == {"auc": 1.0, "found": 1.0}
    noise = torch.randn(16, WIDTH, generator=generator)
    assert recovered(in_the_span(inputs, LAYOUT, moved(noise, torch.zeros(16, 32))), members())["found"] < 0.5


def test_a_gradient_of_b_answers_to_its_tokens(inputs):
    start = LAYOUT.initial(0)
    low = inputs[:OWN] @ LAYOUT.views(start)[0]["A"].T  # [tokens, r]
    b = low.T @ torch.randn(OWN, 32, generator=torch.Generator().manual_seed(2))
    signer = Signatures(LAYOUT, 0, 0)
    scores = answering(inputs, signer, start, signer.of(moved(torch.zeros(16, WIDTH), b)))
    assert recovered(scores, members())["auc"] > 0.8


def test_tokens_that_most_rows_have_are_no_candidates():
    prompt = EncodedPrompt(np.array([1]), (0, 1), False)
    rows = [Encoded(prompt, np.array(ids), 1) for ids in ([1, 2, 3], [1, 4], [1, 5])]
    tokens, own = candidates(rows, rows[1:2])
    assert tokens.tolist() == [2, 3, 4, 5] and own.tolist() == [False, False, True, False]
