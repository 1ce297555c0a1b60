"""What a process has computed lately stands for what has the same causes, and for nothing else."""

from itertools import count

import numpy as np
import pytest

from fedweave.config import DiscoveryConfig
from fedweave.federation.recent import MOST, Recent

ROWS = np.arange(6, dtype=np.int64)
CAUSES = (1, [2, 3], DiscoveryConfig(), ROWS)


@pytest.mark.parametrize(
    "other",
    [
        (1, [2, 4], DiscoveryConfig(), ROWS),
        (1, [2, 3], DiscoveryConfig(warmup_steps=7), ROWS),
        (1, [2, 3], DiscoveryConfig(), ROWS[::-1]),
        (1, [2, 3], DiscoveryConfig(), ROWS.reshape(2, 3)),
        (1, [2, 3], DiscoveryConfig(), ROWS[:3], ROWS[3:]),
        (1, [2, 3], DiscoveryConfig(), np.zeros(2000)),
        CAUSES[:3],
    ],
)
def test_whatever_differs_is_computed(other):
    recent, made = Recent(), count()
    one = recent.of("kind", CAUSES, lambda: next(made))
    assert one == (0, False) and recent.of("kind", iter(CAUSES), lambda: next(made)) == (0, True)
    assert recent.of("kind", other, lambda: next(made)) == (1, False)
    assert recent.of("other", CAUSES, lambda: next(made)) == (2, False)


def test_long_arrays_are_compared_to_the_end():
    long, other = np.zeros(5000), np.zeros(5000)
    other[2500] = 1  # numpy shows the ends alone
    recent = Recent()
    recent.of("kind", [long], lambda: 0)
    assert recent.of("kind", [other], lambda: 1) == (1, False)


def test_the_last_ones_are_kept_and_what_was_used_counts_as_late():
    recent = Recent()
    for number in (*range(MOST), 0, MOST):
        recent.of("kind", [number], lambda: None)
    assert recent.of("kind", [0], lambda: None)[1] and not recent.of("kind", [1], lambda: None)[1]


def test_what_fails_is_not_kept():
    recent = Recent()
    with pytest.raises(ZeroDivisionError):
        recent.of("kind", [1], lambda: 1 // 0)
    assert recent.of("kind", [1], lambda: 5) == (5, False)
