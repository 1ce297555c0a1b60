"""Routing-weighted contamination of experts (paper, Appendix C.2).

A unit u is a bucket (i, c): it belongs to client i, is aligned to expert a(u) and holds a share of the client's
steps. ω[u, k, m] is the weight with which unit u's examples of pattern k move expert m: how often the bucket is
sampled, how much of the client's upload counts, and how far the router opens the gate.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

from fedweave.analysis.diagnosis import ContaminationParts, Number


def routed_weight(
    gates: np.ndarray,  # [n, M] r_m(x) of every training example
    unit: np.ndarray,  # [n] its bucket
    pattern: np.ndarray,  # [n] its pattern
    step_share: np.ndarray,  # [U] share of the client's steps that draw from the bucket
    upload: np.ndarray,  # [U, M] weight of the client's upload in the average of expert m
    patterns: int,
) -> np.ndarray:
    """ρ_m ω[u, k, m] before normalising, [U, K, M]; its sum over u and k is ρ_m, expert m's total routed weight."""
    sums = np.zeros((len(step_share), patterns, gates.shape[1]))
    np.add.at(sums, (unit, pattern), gates)
    sizes = np.bincount(unit, minlength=len(step_share)).clip(min=1)
    return sums / sizes[:, None, None] * step_share[:, None, None] * upload[:, None, :]


@dataclass
class Matching:
    """Which pattern an expert is for, and which expert a pattern's oracle is."""

    target: np.ndarray  # [M] κ_m
    oracle: np.ndarray  # [K] ψ(k)
    clean: bool  # as many patterns as experts, one to one: what the theorems assume


def match_patterns(counts: np.ndarray) -> Matching:
    """κ and ψ from how many examples of pattern k lie in buckets aligned to expert m, counts [K, M].

    One to one with the largest total where K = M; elsewhere an expert's target is its commonest pattern, and a
    pattern's oracle the expert that holds most of it.
    """
    patterns, experts = counts.shape
    if patterns == experts:
        rows, columns = linear_sum_assignment(-counts)
        oracle = columns[np.argsort(rows)]
        return Matching(np.argsort(oracle), oracle, True)
    return Matching(counts.argmax(0), counts.argmax(1), False)


def contamination(
    weight: np.ndarray,  # [U, K, M] as from routed_weight
    dominant: np.ndarray,  # [U] k(u), the bucket's dominant pattern
    anchor: np.ndarray,  # [U] a(u), the expert it is aligned to
    target: np.ndarray,  # [M] κ_m
) -> ContaminationParts:
    """χ_m and the three parts that bound it, of every expert that has routed weight."""
    patterns, experts = weight.shape[1:]
    total = weight.sum((0, 1))
    omega = np.divide(weight, total, out=np.full_like(weight, np.nan), where=total > 0)  # [U, K, M]
    k = np.arange(patterns)
    off_target = k[:, None] != target  # [K, M]
    impure = dominant[:, None] != k  # [U, K]
    misaligned = dominant != target[anchor]  # [U]
    leaked = anchor[:, None] != np.arange(experts)  # [U, M]
    chi, local = (omega * off_target).sum((0, 1)), (omega * impure[:, :, None]).sum((0, 1))
    misalignment = (omega * misaligned[:, None, None]).sum((0, 1))
    leakage = (omega * leaked[:, None, :]).sum((0, 1))
    return {
        "chi": numbers(chi),
        "local": numbers(local),
        "misalignment": numbers(misalignment),
        "leakage": numbers(leakage),
        "lemma_holds": bool((chi <= local + misalignment + leakage + 1e-9)[total > 0].all()),
    }


def mixture_contamination(
    mixtures: np.ndarray,  # [clients, K] examples of every pattern
    aligned: np.ndarray,  # [clients, M] examples in buckets of every expert
    target: np.ndarray,  # [M]
) -> np.ndarray:
    """Off-target share when a whole client, unrouted, is the unit of the expert that most of it is aligned to; [M],
    NaN for an expert that no client has."""
    home = aligned.argmax(1)
    shares = np.full(len(target), np.nan)
    for m, k in enumerate(target):
        members = mixtures[home == m]
        if len(members):
            shares[m] = 1.0 - members[:, k].sum() / members.sum()
    return shares


def effective_budget(weight_by_round: dict[int, np.ndarray], rounds: int, steps: int, rate: float) -> np.ndarray:
    """A_{m,U} = η Σ_u ρ_m^u over all U = rounds · steps local steps, [M].

    ``weight_by_round`` gives ρ [M] of the states that were kept; a round trains from the state before it, and
    between kept states ρ is taken from a straight line.
    """
    known = sorted(weight_by_round)
    values = np.stack([weight_by_round[t] for t in known])  # [states, M]
    at = np.arange(rounds)
    return rate * steps * np.stack([np.interp(at, known, column).sum() for column in values.T])


def numbers(values: np.ndarray) -> list[Number]:
    """As every reader of JSON takes them: null for what is not a number."""
    return [x if math.isfinite(x) else None for x in values.tolist()]
