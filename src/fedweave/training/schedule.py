"""A client's local schedule: how many steps each bucket gets, in which order, on which examples, at which rate."""

from collections.abc import Iterator, Sequence

import numpy as np

from fedweave.streams import stream_key


def pace(schedule: str, t: int, rounds: int) -> float:
    """Round t's share of the learning rates; ``late`` is constant for half of the rounds, then falls to 0."""
    return 1.0 if schedule == "constant" else min(1.0, 2 * (1 - t / rounds))


def allot_steps(sizes: Sequence[int], steps: int) -> list[int]:
    """Split E steps over buckets: one for every non-empty bucket, the rest by largest remainder of size.

    With fewer steps than buckets the largest buckets get one each.
    """
    filled = [c for c, size in enumerate(sizes) if size > 0]
    by_size = sorted(filled, key=lambda c: (-sizes[c], c))
    budget = [0] * len(sizes)
    for c in by_size[:steps]:
        budget[c] = 1
    rest = steps - len(filled)
    if rest > 0:
        total = sum(sizes)
        shares = {c: rest * sizes[c] / total for c in filled}
        for c in filled:
            budget[c] += int(shares[c])
        left = rest - sum(int(share) for share in shares.values())
        for c in sorted(filled, key=lambda c: (-(shares[c] % 1), -sizes[c], c))[:left]:
            budget[c] += 1
    return budget


def interleave(budget: Sequence[int]) -> list[int]:
    """Order the steps by smooth weighted round-robin, so that every stretch mirrors the whole.

    Each step every bucket that has steps left gains its budget; the highest score is taken (then the one
    with most steps left, then the first) and pays the total.
    """
    score, left, total = [0] * len(budget), list(budget), sum(budget)
    order = []
    for _ in range(total):
        for c, remaining in enumerate(left):
            if remaining:
                score[c] += budget[c]
        chosen = max((c for c in range(len(left)) if left[c]), key=lambda c: (score[c], left[c], -c))
        score[chosen] -= total
        left[chosen] -= 1
        order.append(chosen)
    return order


def bucket_batches(bucket: np.ndarray, batch_size: int, key: int) -> Iterator[np.ndarray]:
    """Endless mini-batches: shuffled passes over the bucket, reshuffled when exhausted."""
    rng = np.random.default_rng(key)
    while True:
        shuffled = rng.permutation(bucket)
        for start in range(0, len(shuffled), batch_size):
            yield shuffled[start : start + batch_size]


def drawn_schedule(pool: np.ndarray, steps: int, rate: float, key: int) -> list[np.ndarray]:
    """Batches to which every example of the pool belongs with this probability, by itself."""
    rng = np.random.default_rng(key)
    return [pool[rng.random(len(pool)) < rate] for _ in range(steps)]


def local_schedule(buckets: Sequence[np.ndarray], steps: int, batch_size: int, *key: int | str) -> list[np.ndarray]:
    """The batches of one client and round: bucket-homogeneous, interleaved. Depends on ``key`` alone, never
    on which clients share a forward pass."""
    order = interleave(allot_steps([len(b) for b in buckets], steps))
    streams = [
        bucket_batches(bucket, batch_size, stream_key("batches", *key, c)) for c, bucket in enumerate(buckets)
    ]
    return [next(streams[c]) for c in order]
