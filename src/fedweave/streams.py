"""Where all randomness comes from: a seed for every purpose, from that purpose's names and never from global state.

That is what makes a resumed run exact, and lockstep training independent of how clients were grouped.
"""

import hashlib


def stream_key(*parts: int | str) -> int:
    """A 63-bit seed for one purpose, from the names of that purpose."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
