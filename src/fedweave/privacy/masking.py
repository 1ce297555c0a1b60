"""Sums that nobody can take apart: masks between pairs of clients that cancel when all are added up.

The scheme is that of Bonawitz et al. (2017). For every question a client makes two X25519 keys, one for masks and
one to talk to its mates unheard, and a seed b. Client u sends

    y_u = x_u + PRG(b_u) + Σ_{v>u} PRG(k_uv) - Σ_{v<u} PRG(k_uv)      (mod 2⁶⁴)

with k_uv from the two mask keys, PRG the ChaCha20 stream, and x_u in fixed point. It deals out Shamir shares of b_u
and of its secret mask key beforehand. Of a client that has answered the others then tell their shares of b, of one
that has not those of its key, never both: so the masks come off the sum, and off the sum alone.
"""

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fedweave.errors import UserError, needed

FRACTION = 24  # bits behind the point
LIMIT = 2.0 ** (57 - FRACTION)  # what a sum stays below, 8.6e9; one that was not opened rightly is far beyond
STEP = 2.0**-FRACTION  # a client's number is off by half of it at most, 3e-8
_CLOSED = "the shares of the masks do not fit together; the sum stays closed."
KEYS = 64  # bytes: two public keys
_PIECE = 2**15  # numbers that are masked at a time
_ZEROS = bytes(8 * _PIECE)
_PRIME = 2**521 - 1  # of Shamir's field
SHARE = 66  # bytes of a number in it
SEALED = 2 * SHARE + 16  # bytes: two shares and what authenticates them


def require() -> None:
    needed("cryptography", "federation.secure_aggregation needs cryptography: pip install 'fedweave[privacy]'.")


def threshold(clients: int) -> int:
    """Of so many clients, those that must be left for their sum to open: two thirds, so that no two halves can be
    asked for different secrets; and three, since a sum of two tells each of the other."""
    return max(3, math.ceil(2 * clients / 3))


def usable(keys: bytes) -> bool:
    """Whether these are two public keys that anybody can agree with: there are a few that nobody can."""
    try:
        for key in (keys[:32], keys[32:]):
            _agreed(_new_key(), key, b"trial")
    except ValueError:
        return False
    return True


# -------------------------------------------------------------------------------------- fixed point


def encode(values: torch.Tensor, clients: int) -> torch.Tensor:
    """float64 [n] in fixed point, int64; a number whose sum over clients could overflow is refused."""
    if len(values) and not float(values.abs().max()) * clients < LIMIT:  # nor is NaN
        raise UserError(
            f"an answer holds NaN or numbers beyond {LIMIT / clients:.2g}, which no masked sum can hold."
        )
    return (values * 2.0**FRACTION).round().long()


def decode(total: torch.Tensor) -> torch.Tensor:
    """float64 [n] of a sum that has been opened; one with a wrong share in it is refused."""
    values = total.double() * STEP
    if len(values) and float(values.abs().max()) >= LIMIT:
        raise UserError(_CLOSED)
    return values


def mask(total: np.ndarray, seed: bytes, add: bool = True) -> None:
    """Add to these numbers, uint64 [n] in place, a stream that nobody without the seed tells from chance, or take
    it away. In pieces that stay in a core's cache, which is several times as fast as the whole at once."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    encryptor = Cipher(algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor()
    held = bytearray(8 * _PIECE)
    for start in range(0, len(total), _PIECE):
        part = total[start : start + _PIECE]
        size = encryptor.update_into(memoryview(_ZEROS)[: 8 * len(part)], held)
        noise = np.frombuffer(held, np.uint64, size // 8)
        (np.add if add else np.subtract)(part, noise, out=part)


# -------------------------------------------------------------------------------------- shares of a secret


def deal(secret: bytes, points: Sequence[int], needed: int) -> list[bytes]:
    """A share for every point (not 0), of which any ``needed`` give the secret and fewer tell nothing."""
    slopes = [int.from_bytes(secret, "big"), *(secrets.randbelow(_PRIME) for _ in range(needed - 1))]
    shares = []
    for x in points:
        value = 0
        for slope in reversed(slopes):
            value = (value * x + slope) % _PRIME
        shares.append(value.to_bytes(SHARE, "big"))
    return shares


def recover(shares: Mapping[int, bytes]) -> bytes:
    """The secret of 32 bytes, from enough shares by their points."""
    total = 0
    for x, share in shares.items():
        above, below = 1, 1
        for other in shares:
            if other != x:
                above, below = above * other % _PRIME, below * (other - x) % _PRIME
        total += int.from_bytes(share, "big") * above * pow(below, -1, _PRIME)
    return (total % _PRIME).to_bytes(SHARE, "big")[-32:]


# -------------------------------------------------------------------------------------- a client's part


def _agreed(own: Any, other: bytes, purpose: bytes) -> bytes:
    """32 bytes that two parties have in common, from one's secret key and the other's public one."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    shared = own.exchange(X25519PublicKey.from_public_bytes(other))
    return HKDF(SHA256(), 32, salt=None, info=b"fedweave " + purpose).derive(shared)


def _new_key() -> Any:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.generate()


def _sealer(key: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    return ChaCha20Poly1305(key)


_NONCE = bytes(12)  # every key seals one thing


class Broken(UserError):
    """Why a client does not go on: the server does not keep to the protocol, or has lost somebody."""


@dataclass
class Party:
    """Client ``index`` in one question."""

    index: int
    mask: Any = field(default_factory=_new_key)
    channel: Any = field(default_factory=_new_key)
    seed: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    keys: dict[int, bytes] = field(default_factory=dict)  # everybody's public ones
    dealt: dict[int, bytes] = field(default_factory=dict)  # what the mates have dealt it, in the open
    masked: bool = False
    told: bool = False

    def public(self) -> bytes:
        return self.mask.public_key().public_bytes_raw() + self.channel.public_key().public_bytes_raw()

    def share(self, keys: Mapping[int, bytes]) -> dict[int, bytes]:
        """Its two secrets, dealt out to all who have keys, sealed for each."""
        # a point below 1 is none: at 0 a share is the secret
        if (
            self.keys
            or keys.get(self.index) != self.public()
            or len(set(keys.values())) < len(keys)
            or min(keys) < 0
        ):
            raise Broken("these are not the keys of this question's clients")
        if len(keys) < threshold(len(keys)):
            raise Broken("a sum of fewer than three clients would tell of each")
        self.keys = dict(keys)
        points, needed = [index + 1 for index in keys], threshold(len(keys))
        own = deal(self.mask.private_bytes_raw(), points, needed)
        seeds = deal(self.seed, points, needed)
        sealed = {}
        for v, key_share, seed_share in zip(keys, own, seeds, strict=True):
            sealed[v] = self._seal(v).encrypt(_NONCE, key_share + seed_share, None)
        return sealed

    def _seal(self, to: int) -> Any:
        return _sealer(_agreed(self.channel, self.keys[to][32:], f"share {self.index} {to}".encode()))

    def hide(self, values: torch.Tensor, sealed: Mapping[int, bytes]) -> torch.Tensor:
        """int64 [n] with its masks; ``sealed`` is what every mate that goes on has dealt it."""
        from cryptography.exceptions import InvalidTag

        if self.masked or not set(sealed) <= set(self.keys) or self.index not in sealed:
            raise Broken("the clients of this question have changed")
        if len(sealed) < threshold(len(self.keys)):
            raise Broken("too few clients are left for a sum to tell of none")
        for v, box in sealed.items():
            opener = _sealer(_agreed(self.channel, self.keys[v][32:], f"share {v} {self.index}".encode()))
            try:
                self.dealt[v] = opener.decrypt(_NONCE, box, None)
            except InvalidTag:
                raise Broken("what its mates have dealt it was not sealed for it") from None
        self.masked = True
        total = values.cpu().numpy().view(np.uint64).copy()
        mask(total, self.seed)
        for v in sealed:
            if v != self.index:
                mask(total, _agreed(self.mask, self.keys[v][:32], b"mask"), add=v > self.index)
        return torch.from_numpy(total.view(np.int64))

    def tell(self, alive: Sequence[int], gone: Sequence[int]) -> dict[int, bytes]:
        """Its shares: of the seed of whoever has answered, of the mask key of whoever has not."""
        here, away = set(alive), set(gone)
        if self.told or not self.masked or here & away or here | away != set(self.dealt) or self.index not in here:
            raise Broken("the server asks for shares of both secrets, or of strangers'")
        if len(here) < threshold(len(self.keys)):
            raise Broken("too few clients have answered for their sum to tell of none")
        self.told = True
        return {v: box[SHARE:] if v in here else box[:SHARE] for v, box in self.dealt.items()}


@dataclass
class Open:
    """A client of a simulation: whoever could look at its sum plays the client, too, so that there are no masks."""

    keys: dict[int, bytes]  # of everybody in the sum; empty


# -------------------------------------------------------------------------------------- the server's part


def unmask(
    masked: torch.Tensor,  # int64 [n], the sum of what came
    keys: Mapping[int, bytes],  # public, of all who dealt
    alive: Sequence[int],
    told: Mapping[int, Mapping[int, bytes]],  # who told -> of whom -> a share
) -> torch.Tensor:
    """The sum of what the living sent, int64 [n]."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    total = masked.cpu().numpy().view(np.uint64).copy()
    for u in keys:
        secret = recover({teller + 1: shares[u] for teller, shares in told.items()})
        if u in alive:
            mask(total, secret, add=False)
            continue
        key = X25519PrivateKey.from_private_bytes(secret)
        if key.public_key().public_bytes_raw() != keys[u][:32]:
            raise UserError(_CLOSED)
        for v in alive:
            mask(total, _agreed(key, keys[v][:32], b"mask"), add=v > u)
    return torch.from_numpy(total.view(np.int64))
