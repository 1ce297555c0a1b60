"""Masked sums: exact to their stated error whoever drops out, and closed to whoever cheats."""

import numpy as np
import pytest
import torch

from fedweave.errors import UserError
from fedweave.privacy import masking
from fedweave.privacy.masking import Party, deal, decode, encode, recover, threshold, unmask

pytest.importorskip("cryptography", reason="pip install 'fedweave[privacy]'")


class Sum:
    """One masked sum of n clients with real keys."""

    def __init__(self, n: int, size: int = 50):
        rng = np.random.default_rng(n)
        self.values = {i: torch.from_numpy(rng.normal(size=size) * 10.0 ** rng.integers(-4, 5)) for i in range(n)}
        self.parties = {i: Party(i) for i in range(n)}
        self.keys = {i: party.public() for i, party in self.parties.items()}

    def share(self, among):
        sealed = {i: self.parties[i].share(self.keys) for i in among}
        return {i: {v: sealed[v][i] for v in among} for i in among}  # to each what all have dealt it

    def hide(self, i, boxes):
        return self.parties[i].hide(encode(self.values[i], len(self.keys)), boxes[i])


@pytest.mark.parametrize(
    "n, no_shares, no_answer, no_last_word",
    [
        (3, [], [], []),
        (5, [], [2], []),
        (5, [], [], [1]),
        (7, [1], [], [6]),
        (9, [0], [4, 8], []),
        (20, [3], [5, 11], [7]),
    ],
)
def test_the_sum_is_exact_to_its_stated_error_whoever_drops_out_when(n, no_shares, no_answer, no_last_word):
    one = Sum(n)
    mates = [i for i in range(n) if i not in no_shares]
    boxes = one.share(mates)
    alive = [i for i in mates if i not in no_answer]
    total = torch.zeros(50, dtype=torch.int64)
    for i in alive:
        total = total + one.hide(i, boxes)
    told = {i: one.parties[i].tell(alive, no_answer) for i in alive if i not in no_last_word}
    found = decode(unmask(total, {i: one.keys[i] for i in mates}, alive, told))
    expected = torch.stack([one.values[i] for i in alive]).sum(0)
    assert (found - expected).abs().max() <= len(alive) * masking.STEP / 2 + 1e-12 * expected.abs().max()


def test_a_masked_answer_looks_like_chance_and_the_same_twice_does_not_look_the_same():
    seen = []
    for _ in range(2):
        one = Sum(3, 20_000)
        one.values[0][:] = 0.0
        seen.append(one.hide(0, one.share([0, 1, 2])))
    bits = np.unpackbits(torch.stack(seen).numpy().view(np.uint8))
    assert abs(bits.mean() - 0.5) < 0.005 and (seen[0] != seen[1]).all()


def test_fewer_shares_than_the_threshold_do_not_open_a_secret():
    secret = bytes(range(32))
    shares = dict(zip(range(1, 8), deal(secret, range(1, 8), 5), strict=True))
    assert recover({x: shares[x] for x in (1, 3, 4, 6, 7)}) == secret
    assert recover({x: shares[x] for x in (1, 3, 4, 6)}) != secret
    assert [threshold(n) for n in (3, 4, 5, 20, 200)] == [3, 3, 4, 14, 134]


def test_fixed_point_is_off_by_half_a_step_and_refuses_what_it_cannot_hold():
    values = torch.from_numpy(np.random.default_rng(0).normal(size=1000) * 1e3)
    assert (decode(encode(values, 20)) - values).abs().max() <= masking.STEP / 2
    for bad in (float("nan"), float("inf"), -float("inf"), masking.LIMIT / 19):
        with pytest.raises(UserError, match="which no masked sum can hold"):
            encode(torch.tensor([0.0, bad, 1.0], dtype=torch.float64), 20)


def test_a_client_tells_of_another_one_secret_and_never_both():
    one = Sum(4)
    boxes = one.share(range(4))
    for i in range(4):
        one.hide(i, boxes)
    party = one.parties[0]
    for alive, gone in (([0, 1, 2], [2, 3]), ([0, 1, 2], []), ([1, 2, 3], [0]), ([0, 1], [2, 3])):
        with pytest.raises(UserError):
            party.tell(alive, gone)  # both, not all, not itself, too few
    party.tell([0, 1, 2], [3])
    with pytest.raises(UserError, match="both secrets"):
        party.tell([0, 1, 3], [2])


def test_a_client_does_not_go_on_among_too_few_or_with_keys_that_are_not_its_own():
    one = Sum(6)
    with pytest.raises(UserError, match="fewer than three"):
        Sum(2).share([0])
    with pytest.raises(UserError, match="not the keys"):  # its share would be the secret itself
        one.parties[1].share({**one.keys, -1: Party(9).public()})
    swapped = {**one.keys, 0: Party(0).public()}
    with pytest.raises(UserError, match="not the keys"):
        one.parties[0].share(swapped)
    boxes = one.share(range(6))
    with pytest.raises(UserError, match="too few clients are left"):
        one.parties[0].hide(encode(one.values[0], 6), {v: boxes[0][v] for v in (0, 1, 2)})
    one.hide(0, boxes)
    with pytest.raises(UserError, match="have changed"):
        one.hide(0, boxes)  # a second answer under the same masks would tell the difference


def test_shares_are_sealed_for_one_mate():
    one = Sum(3)
    boxes = one.share(range(3))
    boxes[0][1] = boxes[2][1]  # what 1 has dealt 2
    with pytest.raises(UserError, match="not sealed for it"):
        one.hide(0, boxes)


def test_shares_that_do_not_fit_leave_the_sum_closed():
    one = Sum(5)
    boxes = one.share(range(5))
    total = sum((one.hide(i, boxes) for i in range(4)), torch.zeros(50, dtype=torch.int64))
    told = {i: one.parties[i].tell([0, 1, 2, 3], [4]) for i in range(4)}
    told[2] = {**told[2], 4: bytes(66)}
    with pytest.raises(UserError, match="do not fit together"):
        unmask(total, one.keys, [0, 1, 2, 3], told)


def test_a_wrong_share_of_a_seed_leaves_the_sum_closed_too():
    one = Sum(3)
    boxes = one.share(range(3))
    total = sum((one.hide(i, boxes) for i in range(3)), torch.zeros(50, dtype=torch.int64))
    told = {i: one.parties[i].tell([0, 1, 2], []) for i in range(3)}
    told[1] = {**told[1], 0: bytes(66)}
    with pytest.raises(UserError, match="do not fit together"):
        decode(unmask(total, one.keys, [0, 1, 2], told))


def test_keys_that_nobody_can_agree_with_are_told_apart():
    assert masking.usable(Party(0).public()) and not masking.usable(bytes(64))


def test_a_stream_is_chacha20():
    """Of the zero key, as in RFC 8439."""
    total = np.zeros(1, dtype=np.uint64)
    masking.mask(total, bytes(32))
    assert total.tobytes().hex() == "76b8e0ada0f13d90"


def test_a_mask_goes_on_and_comes_off_whatever_its_length():
    """It is laid on in pieces; the stream is that of the whole."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    for size in (0, 1, 2**15 - 1, 2**15, 2**15 + 1, 100_000):
        values, seed = np.arange(size, dtype=np.uint64), bytes(range(32))
        total = values.copy()
        masking.mask(total, seed)
        stream = Cipher(algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor().update(bytes(8 * size))
        assert (total == values + np.frombuffer(stream, np.uint64)).all()
        masking.mask(total, seed, add=False)
        assert (total == values).all()
