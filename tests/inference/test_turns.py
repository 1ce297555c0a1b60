"""Conversations that change the subject: the last question decides who answers."""

from itertools import permutations

import numpy as np
import pytest

from fedweave.backbone.features import compute_features
from fedweave.backbone.prompts import PromptFormat
from fedweave.config import BackboneConfig
from fedweave.data.sample import make_sample
from fedweave.runs.use import load


def chat(*texts: str) -> tuple[dict[str, str], ...]:
    """User and assistant by turns."""
    return tuple({"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts))


@pytest.fixture(scope="module")
def routed(tiny_run):
    """A federation of one task a client, whose router tells the tasks apart."""
    more = ["data.partition=pure", "data.clients=4", "router.warm_start.steps=200", "router.lr=1e-2"]
    return load(tiny_run(*more), device="cpu")


def read(model, prompts, **settings) -> list[int]:
    """Who answers prompts that are read with these settings."""
    form = PromptFormat(model.backbone.tokenizer, BackboneConfig(prompt="plain", max_length=400, **settings))
    return model.weights(compute_features(model.backbone, form.encode_prompts(prompts))).argmax(1).tolist()


def test_the_last_turn_decides_who_answers(routed):
    pools, _ = make_sample(20, seed=3)
    pairs = [
        (first, then)
        for one, other in permutations(pools, 2)
        for first, then in zip(pools[one][:10], pools[other][10:], strict=True)
    ]
    alone = read(routed, [then.prompt for _, then in pairs])
    assert len(set(alone)) > 1, "one expert for all would test nothing"
    changed = [i for i, first in enumerate(read(routed, [a.prompt for a, _ in pairs])) if first != alone[i]]
    chats = [chat(a.prompt, a.response, b.prompt) for a, b in (pairs[i] for i in changed)]
    wanted = np.array(alone)[changed]
    assert len(chats) >= 40
    assert np.mean(read(routed, chats) == wanted) >= 0.95
    assert np.mean(read(routed, chats, turns="all") == wanted) < 0.8  # what reading all turns would do
    assert np.mean(routed.route(chats).argmax(1).numpy() == wanted) >= 0.95
    answer = routed.generate(chats[:1], max_new_tokens=2)[0]
    assert answer.expert == wanted[0]
