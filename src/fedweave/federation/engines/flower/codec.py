"""Messages as Flower records: tensors in an ArrayRecord, numbers in a MetricRecord, texts in a ConfigRecord."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedweave.federation.message import Facts, Message

ARRAYS, NUMBERS, TEXTS = "arrays", "numbers", "texts"
_BF16 = ":bf16"  # numpy has no bfloat16; its bits travel as int16 under a marked name


def to_record(tensors: Mapping[str, torch.Tensor]) -> ArrayRecord:
    arrays = {}
    for name, tensor in tensors.items():
        flat = tensor.detach().cpu().contiguous()
        if flat.dtype == torch.bfloat16:
            name, flat = name + _BF16, flat.view(torch.int16)
        arrays[name] = Array(flat.numpy())
    return ArrayRecord(arrays)


def to_records(message: Message, arrays: ArrayRecord | None = None) -> RecordDict:
    """``arrays`` may be given ready made: a broadcast is written out once for all sites."""
    numbers = {name: fact for name, fact in message.facts.items() if _is_numeric(fact)}
    texts = {name: fact for name, fact in message.facts.items() if name not in numbers}
    arrays = arrays if arrays is not None else to_record(message.tensors)
    return RecordDict({ARRAYS: arrays, NUMBERS: MetricRecord(numbers), TEXTS: ConfigRecord(texts)})


def from_records(records: RecordDict) -> Message:
    """The message inside; a record that is missing counts as empty, and one of another name is not read."""
    tensors = {}
    for name, array in records.array_records.get(ARRAYS, {}).items():
        tensor = torch.from_numpy(np.array(array.numpy()))  # a copy: what came over the network may be read-only
        if name.endswith(_BF16) and tensor.dtype == torch.int16:
            name, tensor = name.removesuffix(_BF16), tensor.view(torch.bfloat16)
        tensors[name] = tensor
    facts: Facts = dict(records.metric_records.get(NUMBERS, {}))
    return Message(tensors, facts | dict(records.config_records.get(TEXTS, {})))


def _is_numeric(fact: Any) -> bool:
    """Flower's metrics are numbers and lists of them; a bool is a text there."""
    items = fact if isinstance(fact, list) else [fact]
    return bool(items) and all(isinstance(x, int | float) and not isinstance(x, bool) for x in items)
