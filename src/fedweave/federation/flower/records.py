"""Letters as Flower records: arrays in an ArrayRecord, numbers in a MetricRecord, texts in a ConfigRecord."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedweave.federation.letters import Fact, Letter

ARRAYS, NUMBERS, TEXTS = "arrays", "numbers", "texts"


def to_record(arrays: Mapping[str, np.ndarray]) -> ArrayRecord:
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def to_records(letter: Letter, arrays: ArrayRecord | None = None) -> RecordDict:
    """``arrays`` may be given ready made: a broadcast is written out once for all sites."""
    numbers = {name: fact for name, fact in letter.facts.items() if _is_numeric(fact)}
    texts = {name: fact for name, fact in letter.facts.items() if name not in numbers}
    arrays = arrays if arrays is not None else to_record(letter.arrays)
    return RecordDict({
        ARRAYS: arrays, NUMBERS: MetricRecord(numbers), TEXTS: ConfigRecord(texts),  # type: ignore
    })  # fmt: skip


def from_records(records: RecordDict) -> Letter:
    """The letter inside; a record that is missing counts as empty, and one of another name is not read."""
    arrays = {name: array.numpy() for name, array in records.array_records.get(ARRAYS, {}).items()}
    facts: dict[str, Any] = dict(records.metric_records.get(NUMBERS, {}))
    facts |= dict(records.config_records.get(TEXTS, {}))
    return Letter(arrays, facts)


def _is_numeric(fact: Fact) -> bool:
    """Flower's metrics are numbers and lists of them; a bool is a text there."""
    items = fact if isinstance(fact, list) else [fact]
    return bool(items) and all(isinstance(x, int | float) and not isinstance(x, bool) for x in items)
