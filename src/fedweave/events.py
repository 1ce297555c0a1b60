"""The lines of metrics.jsonl: what a run logs, event by event. Plain JSON, as all of :mod:`fedweave.schema`."""

from typing import Literal, TypedDict

from typing_extensions import NotRequired

from fedweave.schema import ByTask


class Refusal(TypedDict):
    client: str
    reason: str


class RoundEvent(TypedDict):
    event: Literal["round"]
    round: int
    train_loss: float | None  # None: under differential privacy nobody tells
    tokens: int
    participants: list[str]
    refused: list[Refusal]
    clipped: list[str]
    bytes_up: dict[str, int]  # by client
    bytes_down: int  # to each participant
    client_losses: dict[str, float]
    agreement: dict[str, float | None]  # cosine of a client's update with the others'
    left_out: NotRequired[list[str]]  # clients that counted nothing in it: they have pulled against the others
    quarantined: NotRequired[list[str]]  # clients, and their buckets of an expert, that count no more from here on
    epsilon: NotRequired[float]  # spent so far, where there is differential privacy


class ValidationEvent(TypedDict):
    """``tasks`` to ``scores`` where the validation set is here, ``sites`` where every site has its own."""

    event: Literal["validation"]
    round: int
    loss: float  # over all examples
    router_entropy: float | None
    tasks: NotRequired[ByTask]
    expert_load: NotRequired[list[float]]  # share of prompts that sparse routing sends to each
    expert_weight: NotRequired[list[float]]  # mean router weight of each
    scores: NotRequired[ByTask]
    sites: NotRequired[dict[str, float]]  # none: nobody measured, and ``loss`` only counts rounds down


class SetbackEvent(TypedDict):
    """No better loss for ``training.patience`` rounds: back to the best state, or the end."""

    event: Literal["setback"]
    round: int  # after which that was noticed
    best_round: int
    pace: float  # share of the learning rates from here on
    ended: bool


class PlacedBucket(TypedDict):
    """Rows that arrived, and where they went (federation/news.py)."""

    client: str
    rows: int
    expert: int  # -1: kept apart
    nearest: int
    distance: float
    loss: float
    usual: float
    doubt: float
    strange: float
    waits: NotRequired[str]  # the settings with which an expert would open for it; none: too few rows so far


class ChangeEvent(TypedDict):
    """What changed before a round: rows, and the experts for them."""

    event: Literal["change"]
    round: int  # the one that came after it
    came: dict[str, int]  # client -> rows
    went: dict[str, int]
    placed: list[PlacedBucket]
    opened: list[int]  # experts
    merged: list[int]  # two that became one, by the numbers that they had
    retired: list[int]  # experts, by the numbers that they had
    unfed: NotRequired[list[int]]  # experts that nobody who is here feeds any more: rows are gone, or sites away
    fed_again: NotRequired[list[int]]
    closed: NotRequired[list[int]]  # experts that lost a vote, by the numbers that they had
    restarted: NotRequired[bool]  # the router has started over, without those who count nothing
    born: list[int]  # of every expert from here on: the round before which it opened, 0 at alignment
    limit: float | None  # distance beyond which a bucket belongs to no expert
    experts: int  # from here on
    fed: list[int]  # examples of every expert
    feeders: NotRequired[list[list[str]]]  # the clients that have them
    bytes_up: dict[str, int]  # by client
    bytes_down: dict[str, int]


class AskedEvent(TypedDict):
    """What it took to ask before a round where nothing came of it."""

    event: Literal["asked"]
    round: int
    bytes_up: dict[str, int]  # by client
    bytes_down: dict[str, int]


Event = RoundEvent | ValidationEvent | SetbackEvent | ChangeEvent | AskedEvent
