"""Audits that need labels, which no method ever saw: how buckets, experts and routing meet tasks and kinds."""

from collections.abc import Sequence

import numpy as np
import torch

from fedweave.schema import Agreement, Audit


def purity(clusters: Sequence[int], labels: Sequence[int | str]) -> float:
    """Share of examples that carry their cluster's dominant label (paper, Eq. 9)."""
    from sklearn.metrics.cluster import contingency_matrix

    table = contingency_matrix(np.asarray(labels), np.asarray(clusters))
    return float(table.max(0).sum() / table.sum())


def agreement(clusters: Sequence[int], labels: Sequence[int | str]) -> Agreement:
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score  # a second to import

    return {
        "purity": purity(clusters, labels),
        "nmi": float(normalized_mutual_info_score(labels, clusters)),
        "ari": float(adjusted_rand_score(labels, clusters)),
    }


def alignment_audit(
    buckets: Sequence[Sequence[np.ndarray]],  # [client][bucket] of example indices
    assignment: Sequence[Sequence[int]],  # [client][bucket] the expert
    labels: Sequence[Sequence[str]],  # [client][example] the task, or the kind
) -> Audit:
    """Local: buckets against labels within each client, averaged by client size. Global: experts against labels."""
    local: list[Agreement] = []
    sizes, experts, tasks = [], [], []
    for members, owners, truth in zip(buckets, assignment, labels, strict=True):
        bucket_of = [c for c, rows in enumerate(members) for _ in rows]  # rows that wait have none
        if not bucket_of:
            continue
        own = [truth[i] for rows in members for i in rows]
        experts += [m for rows, m in zip(members, owners, strict=True) for _ in rows]
        tasks += own
        local.append(agreement(bucket_of, own))
        sizes.append(len(own))
    mean: Agreement = {
        "purity": float(np.average([one["purity"] for one in local], weights=sizes)),
        "nmi": float(np.average([one["nmi"] for one in local], weights=sizes)),
        "ari": float(np.average([one["ari"] for one in local], weights=sizes)),
    }
    return {"local": mean, "global": agreement(experts, tasks)}


def routing_table(weights: torch.Tensor, labels: Sequence[str]) -> dict[str, list[float]]:
    """Mean router weight of every expert for every task: weights [n, M] to {task: [M]}. A row sums up to
    the share of the task's prompts that are familiar: a strange one has no weight."""
    tasks = list(dict.fromkeys(labels))
    rows = np.asarray(labels)
    return {t: weights[torch.from_numpy(rows == t)].mean(0).tolist() for t in tasks}


def decided(weights: torch.Tensor, kinds: Sequence[str]) -> dict[str, float]:
    """The share of every kind's prompts whose first choice is the kind's most frequent one; weights [n, M]. No
    weight at all is a choice, too: what all experts share answers alone."""
    chosen = weights.argmax(1).where(weights.any(1), torch.tensor(weights.shape[1]))
    rows = np.asarray(kinds)
    counts = {kind: chosen[torch.from_numpy(rows == kind)].bincount() for kind in dict.fromkeys(kinds)}
    return {kind: (count.max() / count.sum()).item() for kind, count in counts.items()}


def per_task(values: torch.Tensor, labels: Sequence[str]) -> dict[str, float]:
    """Mean of ``values`` [n] for every task, and their unweighted mean as ``macro``."""
    rows = np.asarray(labels)
    means = {t: values[torch.from_numpy(rows == t)].mean().item() for t in dict.fromkeys(labels)}
    return {**means, "macro": float(np.mean(list(means.values())))}
