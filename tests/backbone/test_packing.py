"""Packed passes equal one-by-one passes of the model as transformers ships it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedweave.backbone.packing import attend, pack, packed_attention, token_budget_batches
from tests.conftest import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_hidden_states_equal_each_sequence_alone(backbone_of, family):
    backbone = backbone_of(family)
    rng = np.random.default_rng(1)
    rows = [rng.integers(4, len(backbone.tokenizer), n).astype(np.int32) for n in (5, 17, 1, 14, 30)]
    packed = pack([rows[:2], rows[2:]], backbone.device)
    with torch.no_grad():
        hidden = backbone.hidden(packed)
        torch.testing.assert_close(hidden, backbone.hidden(replace(packed, similar=None)), atol=2e-5, rtol=1e-4)
        with backbone.decoding() as model:
            alone = [model.base_model(torch.from_numpy(r).long()[None]).last_hidden_state[0] for r in rows]
    torch.testing.assert_close(hidden, torch.cat(alone), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_gradients_equal_each_sequence_alone(backbone_of, family):
    """Garbage beyond a short sequence's end must not leak into gradients either."""
    backbone = backbone_of(family)
    embed = backbone.model.get_input_embeddings().weight
    rng = np.random.default_rng(2)
    rows = [rng.integers(4, len(backbone.tokenizer), n).astype(np.int32) for n in (3, 14, 9)]
    direction = torch.randn(sum(map(len, rows)), backbone.width, generator=torch.Generator().manual_seed(0))
    embed.requires_grad_()
    try:
        packed = pack([rows], backbone.device)
        (backbone.hidden(packed) * direction).sum().backward()
        together, embed.grad = embed.grad.clone(), None
        with backbone.decoding() as model:
            for row, part in zip(rows, direction.split([len(r) for r in rows]), strict=True):
                (model.base_model(torch.from_numpy(row).long()[None]).last_hidden_state[0] * part).sum().backward()
        torch.testing.assert_close(together, embed.grad, atol=1e-4, rtol=1e-3)
    finally:
        embed.requires_grad_(False)
        embed.grad = None


def test_sequences_of_similar_length_share_a_block():
    packed = pack([[np.arange(n) for n in (8, 100, 7, 110, 10)]], torch.device("cpu"))
    assert [(len(index), length) for index, length in packed.blocks.parts] == [(16, 8), (16, 16), (240, 120)]
    tokens = torch.cat([index for index, _ in packed.blocks.parts])
    assert tokens[packed.blocks.real].tolist() == list(range(235))
    assert len(replace(packed, similar=None).blocks.parts) == 1


def test_attention_does_not_depend_on_who_is_packed_beside():
    generator = torch.Generator().manual_seed(0)
    lengths = [5, 60, 17, 64, 3]
    parts = [[torch.randn(n, 2, 8, generator=generator) for n in lengths] for _ in "qkv"]

    def attended(rows):
        packed = pack([[np.zeros(lengths[i], int) for i in rows]], torch.device("cpu"))
        q, k, v = (torch.cat([part[i] for i in rows]) for part in parts)
        return attend(q, k, v, packed, None, None).split([lengths[i] for i in rows])

    together = attended([0, 1, 2, 3, 4])
    for i, whole in enumerate(together):
        for beside in ([i], [i, 3]):
            torch.testing.assert_close(attended(beside)[0], whole, atol=1e-6, rtol=1e-6)


def test_how_far_a_sequence_is_padded_does_not_depend_on_who_is_packed_beside():
    """So that attention's sums have the same order."""

    def padded(lengths):
        blocks = pack([[np.zeros(n, int) for n in lengths]], torch.device("cpu")).blocks
        ends = np.cumsum([len(index) for index, _ in blocks.parts])
        firsts = blocks.real.numpy()[np.cumsum(lengths) - lengths]  # where every sequence begins
        return [blocks.parts[i][1] for i in np.searchsorted(ends, firsts, side="right")]

    assert padded([5, 60, 17, 64, 3]) == [padded([n])[0] for n in (5, 60, 17, 64, 3)]


@pytest.mark.parametrize("window", [None, 20])
def test_a_decoding_step_sees_its_row_so_far_and_within_its_window(window):
    gen = torch.Generator().manual_seed(3)
    rows, heads, kv, length, width = 5, 6, 2, 48, 8
    query = torch.randn(rows, heads, 1, width, generator=gen)
    key, value = torch.randn(2, rows, kv, length, width, generator=gen)
    last = torch.tensor([0, 7, 19, 33, 47])
    out, _ = packed_attention(None, query, key, value, None, sliding_window=window, last=last)
    for row, end in enumerate(last.tolist()):
        seen = slice(max(0, end + 1 - (window or length)), end + 1)
        for head in range(heads):
            k, v = key[row, head // (heads // kv), seen], value[row, head // (heads // kv), seen]
            weights = (k @ query[row, head, 0] / width**0.5).softmax(0)
            torch.testing.assert_close(out[row, 0, head], weights @ v)


def test_token_budget_batches_cover_everything_once_within_budget():
    lengths = [5, 100, 3, 40, 40, 7, 1]
    batches = token_budget_batches(lengths, budget=60)
    assert sorted(i for b in batches for i in b) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in b) <= 60 or len(b) == 1 for b in batches)
