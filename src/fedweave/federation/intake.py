"""The server's gate: every answer of every engine passes here before it is averaged.

A refused answer costs the round nothing but itself: averages are weighted by what was accepted. Each refusal is
one sentence with the client's name and the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedweave.config import Config
from fedweave.errors import first_line
from fedweave.federation.agreement import Agreement
from fedweave.federation.client import Member, Update
from fedweave.federation.compression import Spec
from fedweave.federation.parcel import ROUTER, Courier, Parcel

if TYPE_CHECKING:
    from fedweave.methods.base import ServerState

# AdamW moves a parameter by lr·m̂/√v̂ a step, and by Cauchy-Schwarz |m̂|/√v̂ ≤ √(Σ w²/u) for the weights w and u that
# β = (0.9, 0.999) give to past gradients: at most 7.3, and near 1 in practice.
_ADAM_REACH = 7.3
_REMEMBERED_ROUNDS = 8
_UNREADABLE = (TypeError, ValueError, AttributeError, OverflowError)  # what nonsense of the wrong type raises


class Refused(Exception):
    """Why an answer is not used, as the second half of a sentence."""


@dataclass
class RoundReport:
    """What a finished round leaves behind: figures, not vectors, so that memory does not grow with the clients."""

    t: int
    participants: Sequence[Member]
    agreement: Agreement | None = None  # who pulls with the others
    losses: dict[str, float] = field(default_factory=dict)  # mean step loss of each accepted answer
    tokens: int = 0
    accepted: set[int] = field(default_factory=set)  # client indices
    refused: list[tuple[str, str]] = field(default_factory=list)  # (client, reason)
    clipped: list[str] = field(default_factory=list)
    bytes_up: dict[str, int] = field(default_factory=dict)  # what each client sent, used or not
    bytes_down: int = 0  # what each participant received
    norms: dict[str, list[float]] = field(default_factory=lambda: {"experts": [], ROUTER: []})

    @property
    def train_loss(self) -> float:
        return float(np.mean(list(self.losses.values())))

    def sentence(self, name: str, reason: str) -> str:
        return f"{name}'s answer to round {self.t + 1} was refused: {reason}"


class Intake:
    """The gate of one round, which fills in the round's report."""

    def __init__(
        self,
        config: Config,
        courier: Courier,
        identity: dict[str, str],  # Backbone.identity of the federation
        state: ServerState,
        report: RoundReport,
    ):
        self.config, self.courier, self.identity, self.report = config, courier, identity, report
        self.asked = {client.index: client for client in report.participants}
        self.recent = {kind: state.norms.get(kind, []) for kind in report.norms}
        self.theta_norm = float(state.theta.norm())

    def updates(
        self, parcels: Iterable[Parcel], warn: Callable[[str], None] = lambda text: None
    ) -> Iterator[Update]:
        """The usable ones among ``parcels``, one by one and in their order."""
        report = self.report
        for parcel in parcels:
            name = self.asked[parcel.client].name if parcel.client in self.asked else f"client {parcel.client}"
            report.bytes_up[name] = report.bytes_up.get(name, 0) + parcel.bytes
            try:
                update = self.check(parcel)
            except (Refused, *_UNREADABLE) as reason:
                why = str(reason) if isinstance(reason, Refused) else f"it cannot be read ({first_line(reason)})"
                report.refused.append((name, why))
                warn(f"{report.sentence(name, why)}.")
                continue
            report.accepted.add(parcel.client)
            report.losses[name] = float(np.mean(parcel.losses))
            report.tokens += parcel.tokens
            if report.agreement is not None:
                report.agreement.add(update)
            yield update

    def remembered(self) -> dict[str, list[float]]:
        """``ServerState.norms`` of the next round. Whole rounds are remembered, so that the order in which answers
        arrive decides nothing."""
        return {
            kind: [*self.recent[kind], *([float(np.median(norms))] if norms else [])][-_REMEMBERED_ROUNDS:]
            for kind, norms in self.report.norms.items()
        }

    # ---------------------------------------------------------------------------------- one answer

    def check(self, parcel: Parcel) -> Update:
        """The update inside, or :class:`Refused`. Nothing in a parcel is taken for granted, types included."""
        client = self.asked.get(parcel.client)
        if client is None:
            raise Refused("it was not asked in this round")
        if parcel.round != self.report.t:
            raise Refused(f"it answers round {_shown(parcel.round, 1)}, which is not the open one")
        if parcel.client in self.report.accepted:
            raise Refused("an answer from it has been accepted already")
        check_identity(parcel.identity, self.identity)
        check_samples(parcel.samples, min(len(client), self.config.federation.max_samples))
        self._check_counts(parcel)
        check_arrays(parcel.arrays, self.courier.expected(parcel.counts))
        self._check_figures(parcel)
        parts = self.courier.decode(parcel)
        for name, part in parts.items():
            check_finite(name, part)
        return self.courier.open(parcel, self._bounded(parts, client.name))

    def _check_counts(self, parcel: Parcel) -> None:
        counts, experts = parcel.counts, self.courier.layout.experts
        if not isinstance(counts, list) or len(counts) != experts:
            raise Refused(f"it counts examples for {_length(counts)} experts, not {experts}")
        for m, count in enumerate(counts):
            if not _is_number(count) or not 0 <= count <= parcel.samples or count != int(count):
                raise Refused(f"it claims {_shown(count)} of its {parcel.samples} examples for expert {m}")
        if not any(counts):
            raise Refused("it has examples for no expert")

    def _check_figures(self, parcel: Parcel) -> None:
        losses = parcel.losses
        if not isinstance(losses, list) or not losses or not all(_is_number(x) for x in losses):
            raise Refused("its training losses are missing, NaN or infinite")
        if not isinstance(parcel.tokens, int) or not 0 <= parcel.tokens < 2**53:
            raise Refused(f"it claims {_shown(parcel.tokens)} tokens")

    def _bounded(self, parts: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
        """Experts and router within the limits on their norms, or :class:`Refused`."""
        kinds = {ROUTER: [key for key in parts if key == ROUTER], "experts": [k for k in parts if k != ROUTER]}
        norms = {
            kind: math.sqrt(sum(float(parts[key].square().sum()) for key in keys))
            for kind, keys in kinds.items()
            if keys
        }
        for kind, norm in norms.items():
            limit, whose = self._limit(kind, sum(parts[key].numel() for key in kinds[kind]))
            if norm <= limit:
                continue
            if self.config.federation.long_updates == "reject" or not math.isfinite(norm):
                raise Refused(f"its {kind} update has norm {norm:.3g}, but {whose} is {limit:.3g}")
            parts |= {key: parts[key] * (limit / norm) for key in kinds[kind]}
            norms[kind] = limit
            self.report.clipped.append(name)
        for kind, norm in norms.items():
            self.report.norms[kind].append(norm)
        return parts

    def _limit(self, kind: str, size: int) -> tuple[float, str]:
        """The tightest limit on a norm, and its name."""
        federation, training = self.config.federation, self.config.training
        if federation.norm_limit == "auto":
            rate = self.config.router.lr if kind == ROUTER else training.lr
            reach = training.local_steps * rate * _ADAM_REACH * math.sqrt(size)
            decay = training.local_steps * rate * training.weight_decay * (self.theta_norm + reach)
            limits = [(reach + decay, "the farthest that the round's steps can lead")]
        else:
            limits = [(float(federation.norm_limit), "federation.norm_limit")]
        recent = self.recent[kind]
        if federation.norm_factor and recent:
            limits.append((
                federation.norm_factor * float(np.median(recent)),
                f"the limit of {federation.norm_factor:g} times the recent median",
            ))  # fmt: skip
        return min(limits)


# -------------------------------------------------------------------------------------- checks for any message


def check_identity(given: Mapping[str, str], own: Mapping[str, str]) -> None:
    """The same backbone and the same tokenizer, or :class:`Refused`."""
    for part, name in own.items():
        if not isinstance(given, Mapping) or given.get(part) != name:
            raise Refused(f"its {part} is not the one of this federation; give the site the same model files")


def check_samples(samples: object, most: int) -> None:
    """A believable |D_i|, or :class:`Refused`."""
    if isinstance(samples, bool) or not isinstance(samples, int) or not 1 <= samples <= most:
        raise Refused(f"it claims {_shown(samples)} examples, where 1 to {most} are possible")


def check_arrays(arrays: Mapping[str, torch.Tensor], expected: Mapping[str, Spec]) -> None:
    """Exactly the expected names, shapes and dtypes, all finite, or :class:`Refused`."""
    if missing := [name for name in expected if name not in arrays]:
        raise Refused(f"{missing[0]} is missing")
    if extra := [name for name in arrays if name not in expected]:
        raise Refused(f"{_shown(extra[0])} was not asked for")
    for name, (shape, dtype) in expected.items():
        array = arrays[name]
        if not isinstance(array, torch.Tensor) or tuple(array.shape) != shape:
            raise Refused(f"{name} has shape {_length(array)}, not {list(shape)}")
        if array.dtype != dtype:
            raise Refused(f"{name} is {_dtype(array.dtype)}, not {_dtype(dtype)}")
        if dtype.is_floating_point:
            check_finite(name, array)


def check_finite(name: str, values: torch.Tensor) -> None:
    if not torch.isfinite(values).all():
        raise Refused(f"{name} holds NaN or infinity, which a lower training.lr or router.lr may mend")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _shown(value: object, add: int = 0) -> str:
    """A stranger's value, short enough for a sentence."""
    text = str(value + add) if isinstance(value, int) else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}…"


def _length(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return str(list(value.shape))
    return str(len(value)) if isinstance(value, list | tuple) else f"a {type(value).__name__} of"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
