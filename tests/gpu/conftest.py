"""What tests of training on a GPU share."""

from __future__ import annotations

from functools import partial

import pytest
import torch


@pytest.fixture
def smooth_optimiser(monkeypatch):
    """AdamW divides a gradient by its own size, so one that is rounding alone moves its weight as far as any other,
    in whichever direction rounding points. A larger ε leaves such weights where they are."""
    monkeypatch.setattr(torch.optim, "AdamW", partial(torch.optim.AdamW, eps=1e-4))
