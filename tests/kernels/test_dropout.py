"""Dropout by key: what it depends on, and how much it drops."""

import pytest
import torch

from fedweave.kernels.dropout import DropoutKeys, keep_mask


def test_dropout_depends_on_lane_and_token_but_not_on_neighbours():
    cpu = torch.device("cpu")
    alone = DropoutKeys.of(0.3, [11], [50], 50, cpu)
    beside = DropoutKeys.of(0.3, [99, 11], [20, 50], 75, cpu)
    kept = keep_mask(alone, 40, 4)
    assert torch.equal(kept, keep_mask(beside, 40, 4)[20:70])
    assert not torch.equal(kept, keep_mask(alone, 40, 5)), "layers drop different numbers"
    assert not torch.equal(kept[0], kept[1]), "tokens drop different numbers"


@pytest.mark.parametrize("rate", [0.05, 0.5])
def test_dropout_keeps_the_rate_in_both_directions(rate):
    dropped = (~keep_mask(DropoutKeys.of(rate, [5], [2000], 2000, torch.device("cpu")), 512, 0)).float()
    assert abs(dropped.mean().item() - rate) < 2e-3
    assert dropped.mean(0).std() < 1.3 * (rate * (1 - rate) / 2000) ** 0.5, "some channel is dropped too often"
    assert dropped.mean(1).std() < 1.3 * (rate * (1 - rate) / 512) ** 0.5, "some token is dropped too often"
