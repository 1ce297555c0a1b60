"""A privacy budget: the noise that a target (ε, δ) takes, and what is spent of it; dp-accounting does the sums.

Everything that is protected leaves as a sum with Gaussian noise. A client is in every sum that it is asked for: who
takes part follows from the run's seed, which all know, so that drawing clients hides nobody. An example is in a sum
with the probability that its client, which tells nobody, draws it with (Poisson sampling). Two neighbouring
federations differ by one client, or by one example, that is there or not.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fedweave.config import Config
from fedweave.errors import needed
from fedweave.registry import PRIVATE

# Of Rényi divergences; whole ones have a closed form, whose length is the order.
_FEW = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_ALL = (*range(2, 65), 80, 128, 256, 512, 1024)

Sums = tuple[tuple[float, int], ...]  # (probability of an example, how many noised sums)


def accounting() -> Any:
    """dp-accounting, which few runs need."""
    return needed("dp_accounting", "privacy.level needs dp-accounting: pip install 'fedweave[privacy]'.")


def planned(config: Config) -> dict[str, int]:
    """How often a client is asked what, at most: what the noise is solved for."""
    rounds = config.training.rounds
    asked = {"discover": 1}
    if config.experts.start == "warmup" or config.method == "fedlease":
        asked["start"] = 1
    if config.router.warm_start.enabled:
        asked["warm"] = config.router.warm_start.rounds
    before = {step: asked[step] for step in PRIVATE[config.method] if step in asked}
    return {**before, "train": rounds, "evaluate": 1 + math.ceil(rounds / config.evaluation.every)}


@dataclass(frozen=True)
class Budget:
    """What a run of this config may spend. ``examples`` is |D_i|, which counts as known."""

    config: Config

    def sums(self, step: str, examples: int) -> tuple[float, int]:
        """(probability of an example, noised sums) of one answer."""
        if self.config.privacy.level == "client" or step == "evaluate":
            return 1.0, 1
        warm, discovery, training = self.config.router.warm_start, self.config.discovery, self.config.training
        batch, steps = {
            "discover": (examples, 1),  # a signature is one sum over all
            "start": (discovery.warmup_batch, discovery.warmup_steps),
            "warm": (warm.batch_size, warm.steps),
            "train": (training.batch_size, training.local_steps),
        }[step]
        return min(1.0, batch / max(1, examples)), steps

    def noise(self, step: str, examples: int = 0) -> float:
        """The standard deviation of the noise in this step's sums, as a multiple of the clip."""
        private = self.config.privacy
        group = next(group for group in self._groups() if step in group)
        return _noise(self._spent(group, planned(self.config), examples), private.epsilon, private.delta)

    def spent(self, answers: Mapping[str, int], examples: int = 0) -> float:
        """ε of so many answers, at the config's δ."""
        found = [0.0]
        for group in self._groups():
            if sums := self._spent(group, answers, examples):
                found.append(_epsilon(sums, self.noise(group[0], examples), self.config.privacy.delta))
        return max(found)

    def limit(self, step: str) -> float:
        """How often a client answers this question at most. Without experts to align, the first one asks for
        nothing but how many examples there are."""
        plan = planned(self.config)
        free = "discover" not in PRIVATE[self.config.method] and step == "discover"
        return math.inf if free else plan.get(step, 0)

    def terms(self) -> str:
        """What the noise follows from."""
        plan = planned(self.config)
        return repr((self.config.method, self.config.privacy, plan, [self.sums(step, 10**9) for step in plan]))

    def _groups(self) -> list[tuple[str, ...]]:
        """Questions whose answers add up. An example either trains or validates, so that these do not."""
        trained = ("train", "discover", "start", "warm")
        if self.config.privacy.level == "client":
            return [(*trained, "evaluate")]
        return [trained, ("evaluate",)]

    def _spent(self, group: tuple[str, ...], answers: Mapping[str, int], examples: int) -> Sums:
        found, plan = [], planned(self.config)
        for step in group:
            if step not in plan:
                continue
            rate, count = self.sums(step, examples)
            if count * answers.get(step, 0):
                found.append((rate, count * answers[step]))
        return tuple(found)


@lru_cache(maxsize=4096)
def _noise(sums: Sums, epsilon: float, delta: float) -> float:
    dp = accounting()
    if not sums:
        return 0.0
    if all(rate >= 1 for rate, _ in sums):
        return dp.get_sigma_gaussian(epsilon, delta) * math.sqrt(sum(count for _, count in sums))
    # The best order of sums over all is 1 + 2 log(1/δ) / ε, and that of drawn ones not far from it.
    if 2 * math.log(1 / delta) > 0.75 * _FEW[-1] * epsilon:
        return _solved(_ALL, sums, epsilon, delta)
    few = _solved(_FEW, sums, epsilon, delta)
    return _solved(_near(sums, few, delta), sums, epsilon, delta)


def _solved(orders: Sequence[int], sums: Sums, epsilon: float, delta: float) -> float:
    """The least noise by these orders; any orders bound ε."""
    from dp_accounting import rdp

    return accounting().calibrate_dp_mechanism(
        lambda: rdp.RdpAccountant(orders), lambda noise: _event(sums, noise), epsilon, delta
    )


@lru_cache(maxsize=4096)
def _epsilon(sums: Sums, noise: float, delta: float) -> float:
    dp = accounting()
    if all(rate >= 1 for rate, _ in sums):  # n sums with this noise are one with 1/√n of it, exactly
        return dp.get_epsilon_gaussian(noise / math.sqrt(sum(count for _, count in sums)), delta)
    return float(_ledger(_near(sums, noise, delta), sums, noise).get_epsilon(delta))


def _near(sums: Sums, noise: float, delta: float) -> Sequence[int]:
    """The orders among which the one of the least ε is: ε over them has one valley, and most of the time goes into
    the largest."""
    _, best = _ledger(_FEW, sums, noise).get_epsilon_and_optimal_order(delta)
    at = _FEW.index(int(best))
    return _ALL if best == _FEW[-1] else range(_FEW[max(0, at - 1)], _FEW[at + 1] + 1)


def _ledger(orders: Sequence[int], sums: Sums, noise: float) -> Any:
    """Rényi accounting: an upper bound, in milliseconds."""
    from dp_accounting import rdp

    return rdp.RdpAccountant(orders).compose(_event(sums, noise))


def _event(sums: Sums, noise: float) -> Any:
    dp = accounting()
    one = dp.GaussianDpEvent(noise)
    return dp.ComposedDpEvent([
        dp.SelfComposedDpEvent(one if rate >= 1 else dp.PoissonSampledDpEvent(rate, one), count)
        for rate, count in sums
    ])  # fmt: skip
