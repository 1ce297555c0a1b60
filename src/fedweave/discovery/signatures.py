"""Warmup signatures: one short LoRA per bucket, all from the same start; its B factors are the signature."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
import torch

from fedweave.experts.dropout import stream_key
from fedweave.experts.layout import AdapterLayout
from fedweave.training.batch import ClientData, Lane
from fedweave.training.schedule import bucket_batches


def warmup_lane(
    data: ClientData, bucket: np.ndarray, start: torch.Tensor, steps: int, batch_size: int, *key: int | str
) -> Lane:
    """The job that warms one bucket up, from the common initialisation ``start`` [P of one expert]."""
    batches = bucket_batches(bucket, batch_size, stream_key("warmup", *key))
    return Lane(data, list(islice(batches, steps)), start, None, ("warmup", *key))


def signature(layout: AdapterLayout, adapter: torch.Tensor) -> list[torch.Tensor]:
    """s(i,c): the B block of every adapted layer, flattened; adapter [P of one expert]."""
    return layout.b_blocks(adapter)


def stack_signatures(signatures: Sequence[list[torch.Tensor]]) -> list[np.ndarray]:
    """Per block one matrix over all prototypes, [prototypes, size]."""
    return [torch.stack(blocks).double().cpu().numpy() for blocks in zip(*signatures, strict=True)]
