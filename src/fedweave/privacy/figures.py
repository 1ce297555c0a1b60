"""What runs write down of their privacy: a part of :mod:`fedweave.schema`."""

from typing import TypedDict


class PrivacyFigures(TypedDict):
    """A run's differential privacy."""

    level: str  # client or example
    epsilon: float  # what it was solved for
    delta: float
    clip: float
    noise: list[float]  # least and most over clients, in rounds, as multiples of the clip
    spent: float  # ε of the client that has spent most
