"""What a run writes down for its readers: how discovery went, a map of prompts, who did what in a round.

Labels only sort what is written here; nothing in this file is read back by a method.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import torch

from fedweave.evaluation.audit import alignment_audit, per_task
from fedweave.events import AskedEvent, ChangeEvent, RoundEvent, ValidationEvent
from fedweave.federation.client import Member, examples_of
from fedweave.federation.news import Change
from fedweave.federation.rounds import RoundReport
from fedweave.federation.state import ServerState
from fedweave.runs.workspace import TestSet, Workspace
from fedweave.schema import LabelRecord, PromptMap
from fedweave.streams import stream_key

MAPPED = 1000  # prompts on the map
AXES = 16  # principal axes kept of each


def round_record(report: RoundReport) -> RoundEvent:
    """One round: losses, tokens, upload, and how each client agreed with the others."""
    cosines, receipts = report.agreement.cosines(), report.receipts
    names = {client.index: client.name for client in report.participants}
    record: RoundEvent = {
        "event": "round",
        "round": report.t + 1,
        "train_loss": report.train_loss,
        "tokens": report.tokens,
        "participants": list(names.values()),
        "refused": [{"client": name, "reason": reason} for name, reason in receipts.refused],
        "clipped": receipts.clipped,
        "bytes_up": receipts.bytes_up,  # by client
        "bytes_down": report.bytes_down,  # each participant
        "client_losses": dict(sorted(report.losses.items())),
        "agreement": {names[index]: cosine for index, cosine in cosines.items()},
    }
    if report.left_out:
        record["left_out"] = list(report.left_out)
    if report.quarantined:
        record["quarantined"] = list(report.quarantined)
    return record


def change_record(change: Change, state: ServerState, members: Sequence[Member]) -> ChangeEvent | AskedEvent | None:
    """What changed before a round, and how many examples every expert has from then on, and whose; None where
    nobody was asked."""
    if not change.told:
        asked = AskedEvent(event="asked", round=change.t + 1, bytes_up=change.up, bytes_down=change.down)
        return asked if change.up else None
    experts, unfed = range(state.layout.experts), state.report.get("unfed", [])  # also those whose sites are away
    feeding = {member.name: examples_of([member], state.layout.experts) for member in members}
    feeders = [[name for name, own in feeding.items() if own[m] and m not in unfed] for m in experts]
    changed: ChangeEvent = {
        "event": "change",
        "round": change.t + 1,
        "came": change.came,
        "went": change.went,
        "placed": [asdict(bucket) for bucket in change.placed],  # type: ignore[misc]
        "opened": change.opened,
        "merged": change.merged,
        "retired": change.retired,
        "unfed": change.unfed,
        "fed_again": change.fed_again,
        "closed": change.closed,
        "restarted": change.restarted,
        "born": state.report.get("born", [0] * state.layout.experts),
        "limit": change.limit,
        "experts": state.layout.experts,
        "fed": [sum(feeding[name][m] for name in feeders[m]) for m in experts],
        "feeders": feeders,
        "bytes_up": change.up,
        "bytes_down": change.down,
    }
    return changed


def validation_record(
    losses: torch.Tensor, weights: torch.Tensor, held: TestSet, completed: int
) -> ValidationEvent:
    """Losses [n] by task, and how the router spreads the prompts: its weights are [n, M]."""
    entropy = -(weights.clamp(min=1e-12).log() * weights).sum(1).mean().item()
    experts = weights.shape[1]
    chosen = torch.bincount(weights.argmax(1)[weights.any(1)], minlength=experts) / len(weights)
    return {
        "event": "validation",
        "round": completed,
        "loss": losses.mean().item(),
        "tasks": per_task(losses, held.labels),
        "router_entropy": entropy,
        "expert_load": chosen.tolist(),  # share of prompts that sparse routing sends to each
        "expert_weight": weights.mean(0).tolist(),
    }


def label_record(workspace: Workspace) -> LabelRecord:
    """What only labels can tell, for discovery.json: every bucket's tasks, and how buckets and experts met them,
    and the kinds, where several tasks are one."""
    clients = workspace.engine.members  # without those whose answers were refused
    everybodys = workspace.client_labels, workspace.client_kinds
    labels, kinds = ([named[client.index] for client in clients] for named in everybodys)
    record: LabelRecord = {
        "bucket_tasks": {
            c.name: [dict(Counter(truth[i] for i in bucket)) for bucket in c.buckets]
            for c, truth in zip(clients, labels, strict=True)
        }
    }
    found = [c.buckets for c in clients], [c.assignment for c in clients]
    if len(workspace.data.tasks) > 1:
        record["audit"] = alignment_audit(*found, labels)
    if 1 < len({x for own in kinds for x in own}) < len({x for own in labels for x in own}):
        record["kind_audit"] = alignment_audit(*found, kinds)
    return record


def prompt_map(workspace: Workspace) -> PromptMap:
    """embedding.json: a sample of the training prompts on their principal axes, with bucket, expert and task.

    Features are standardised channel by channel, as discovery does within a client. One small eigenproblem; a
    picture is made of it only when somebody asks for a report.
    """
    clients, labels = workspace.engine.members, workspace.client_labels
    rows = [(i, j) for i, client in enumerate(clients) for j in range(len(client.data))]
    rng = np.random.default_rng(stream_key("prompt map", workspace.config.seed))
    chosen = sorted(rng.permutation(len(rows))[:MAPPED].tolist())
    picked = [rows[k] for k in chosen]
    points = np.stack([clients[i].data.features[j].float().numpy() for i, j in picked]).astype(np.float64)  # [n, d]
    points = (points - points.mean(0)) / (points.std(0) + 1e-6)
    # principal coordinates from the [n, n] products: n is bounded, the width d is not
    values, vectors = np.linalg.eigh(points @ points.T)  # ascending
    values, vectors = values[::-1].clip(min=0.0), vectors[:, ::-1]
    coordinates = (vectors * np.sqrt(values))[:, :AXES]
    bucket_of = []
    for client in clients:
        numbers = np.zeros(len(client.data), dtype=int)
        for c, members in enumerate(client.buckets):
            numbers[members] = c
        bucket_of.append(numbers)
    buckets = [int(bucket_of[i][j]) for i, j in picked]
    return {
        "explained": (values[:AXES] / max(values.sum(), 1e-12)).round(4).tolist(),
        "points": coordinates.round(3).tolist(),
        "clients": [clients[i].name for i, _ in picked],
        "buckets": buckets,
        "experts": [clients[i].assignment[c] for (i, _), c in zip(picked, buckets, strict=True)],
        "tasks": [labels[clients[i].index][j] for i, j in picked],
    }
