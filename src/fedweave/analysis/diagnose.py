"""``fedweave diagnose``: every quantity of the paper's theory on a run of one's own, as one JSON tree.

Router weights are cheap: what needs only them covers all clients and examples. What needs gradients or losses of
the real model is taken on a sample: some clients, a few fixed batches of each of their buckets.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedweave.analysis.conflict import cancelled, conflict, cosines, pure_bucket_bound
from fedweave.analysis.contamination import (
    Matching,
    contamination,
    effective_budget,
    match_patterns,
    mixture_contamination,
    routed_weight,
)
from fedweave.analysis.findings import verdicts
from fedweave.analysis.gradients import GradientMeter, pooled, sample_lane
from fedweave.analysis.routing_risk import deficit, margin_risk, sparse_risk
from fedweave.analysis.subject import Subject, open_subject
from fedweave.analysis.trajectories import follow, weight_mismatch
from fedweave.console import Console
from fedweave.errors import UserError
from fedweave.evaluation.losses import example_losses
from fedweave.experts.dropout import stream_key
from fedweave.experts.layout import AdapterLayout
from fedweave.federation.client import Client
from fedweave.methods.base import ServerState
from fedweave.router.mlp import RouterLayout
from fedweave.runs.folder import RunFolder
from fedweave.runs.summary import served_models
from fedweave.training.schedule import interleave

SCHEMA = 1
NEEDS_LABELS = (
    "needs task labels, which this run's data does not have; a 'task' in every JSONL row would give them."
)
NEEDS_ROUTER = "needs several experts and a router; {method} has one adapter for everything."


@dataclass
class Sample:
    """What stands for the whole where the model itself is asked."""

    clients: list[Client]
    batches: int
    batch_size: int


def diagnose(
    folder: Path,
    console: Console,
    clients: int = 4,
    batches: int = 1,
    which: str = "best",
    router_rate: float | None = None,
) -> dict[str, Any]:
    """Measure everything that the run allows, write diagnostics.json, return it.

    ``which`` is the state to look at: best, last or start; ``router_rate`` the η of the router's paths.
    """
    if clients < 1 or batches < 1:
        raise UserError("--clients and --batches must be at least 1.")
    if router_rate is not None and not router_rate > 0:
        raise UserError("--router-rate must be above 0.")
    started = time.monotonic()
    subject = open_subject(folder, which, console)
    config = subject.workspace.config
    rate = router_rate if router_rate is not None else config.router.lr
    sample = Sample(subject.clients[:clients], batches, config.training.batch_size)
    sections: dict[str, tuple[bool, bool, Callable[[], Any]]] = {  # needs labels, needs a router
        "conflict": (True, False, lambda: measure_conflict(subject, sample, console)),
        "contamination": (True, True, lambda: measure_contamination(subject)),
        "effective_budget": (False, True, lambda: measure_budget(subject)),
        "router_paths": (False, True, lambda: measure_paths(subject, sample, rate, console)),
        "routing_risk": (True, True, lambda: measure_risk(subject, sample, console)),
    }
    routed = subject.state.router is not None and subject.state.layout.experts > 1
    refused = {}
    for name, (labels, router, _) in sections.items():
        if router and not routed:
            refused[name] = NEEDS_ROUTER.format(method=config.method)
        elif labels and not subject.labelled:
            refused[name] = NEEDS_LABELS
    if len(refused) == len(sections):
        raise UserError(f"there is nothing to diagnose in {folder}: conflict {refused['conflict']}")
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "method": config.method,
        "round": subject.round,
        "rounds": subject.completed,
        "patterns": subject.patterns if subject.labelled else [],
        "experts": subject.state.layout.experts,
        "sample": {
            "clients": [c.name for c in sample.clients],
            "of_clients": len(subject.clients),
            "batches": batches,
            "batch_size": sample.batch_size,
        },
    }
    result |= {name: measure() for name, (_, _, measure) in sections.items() if name not in refused}
    result |= {"refused": refused, "seconds": round(time.monotonic() - started, 1)}
    result = _plain(result)
    result["verdicts"] = verdicts(result)
    RunFolder(folder).write_json("diagnostics.json", result)
    return result


# -------------------------------------------------------------------------------------- conflict


def measure_conflict(subject: Subject, sample: Sample, console: Console) -> dict[str, Any]:
    """Γ for an adapter that all patterns would share, fresh or merged from the experts, and for the run's own
    experts and router."""
    state, engine, config = subject.state, subject.workspace.engine, subject.workspace.config
    data = pooled([client.data for client in sample.clients])
    pattern = np.concatenate([subject.pattern[client.index] for client in sample.clients])
    present = np.unique(pattern)
    batches = sample.batches * len(sample.clients)
    single = state.layout.with_experts(1)
    fresh = single.initial(config.seed).to(engine.device)
    adapters: dict[str, tuple[AdapterLayout, RouterLayout | None, torch.Tensor, torch.Tensor | None]] = {
        "fresh_adapter": (single, None, fresh, None)
    }
    if state.layout.experts > 1:
        merged = torch.stack(state.layout.unstack(state.theta)).mean(0)
        adapters["merged_experts"] = (single, None, merged, None)
    if state.phi is None or len(state.phi) == 1:
        adapters["experts"] = (
            state.layout,
            state.router,
            state.theta,
            state.phi[0] if state.phi is not None else None,
        )
    bar = console.progress("pattern gradients", len(adapters) * len(present), "patterns")
    found = {}
    for name, (layout, router, theta, phi) in adapters.items():
        lanes = [
            sample_lane(
                data, np.flatnonzero(pattern == k), theta, phi, batches, sample.batch_size, config.seed, "pattern",
                int(k),
            )
            for k in present
        ]  # fmt: skip
        gradients = GradientMeter(engine, layout, router)(lanes, bar.advance)
        found[name] = gradients.theta
        if gradients.phi is not None:
            found["router"] = gradients.phi
    bar.close()
    return {name: _conflicts(subject, rows.double(), present) for name, rows in found.items()}


def _conflicts(subject: Subject, gradients: torch.Tensor, present: np.ndarray) -> dict[str, Any]:
    """Γ of every client and bucket from the patterns' gradients [present patterns, columns]."""
    gram = np.zeros((len(subject.patterns), len(subject.patterns)))
    gram[np.ix_(present, present)] = (gradients @ gradients.T).numpy()
    norms = np.sqrt(np.diag(gram))

    def figures(counts: np.ndarray) -> dict[str, float]:
        shares = counts / counts.sum()
        return {"gamma": conflict(gram, shares), "cancelled": cancelled(gram, shares)}

    clients: dict[str, dict[str, float]] = {}
    buckets: dict[str, list[dict[str, float]]] = {}
    for client in subject.clients:
        clients[client.name] = figures(subject.mixture(client))
        buckets[client.name] = []
        for members in client.buckets:
            counts = subject.mixture(client, members)
            shares = counts / counts.sum()
            extra = {"off_dominant": 1 - shares.max(), "bound": pure_bucket_bound(shares, float(norms.max()))}
            buckets[client.name].append({**figures(counts), **extra})
    every = [b for rows in buckets.values() for b in rows]
    sizes = [len(b) for client in subject.clients for b in client.buckets]
    return {
        "norms": norms,
        "cosines": cosines(gram),
        "clients": clients,
        "buckets": buckets,
        "client_cancelled": np.average(
            [c["cancelled"] for c in clients.values()], weights=list(map(len, subject.clients))
        ),
        "bucket_cancelled": np.average([b["cancelled"] for b in every], weights=sizes),
        "bound_holds": all(b["gamma"] <= b["bound"] * (1 + 1e-9) + 1e-30 for b in every),
    }


# -------------------------------------------------------------------------------------- contamination


def _matching(subject: Subject) -> tuple[Matching, np.ndarray]:
    """κ and ψ, and how many examples of every pattern each unit holds, [U, K]."""
    held = np.stack([subject.mixture(client, client.buckets[c]) for client, c in subject.units])
    counts = np.zeros((len(subject.patterns), subject.state.layout.experts))
    np.add.at(counts.T, subject.anchor, held)
    return match_patterns(counts), held


def _routed(subject: Subject, state: ServerState, upload: np.ndarray) -> np.ndarray:
    """[U, K, M] routed weights of all clients under one kept state; without labels K is 1."""
    gates = np.concatenate([subject.gates(client, state) for client in subject.clients])
    unit = np.concatenate(subject.unit)
    pattern = np.concatenate(subject.pattern) if subject.labelled else np.zeros(len(unit), dtype=int)
    patterns = len(subject.patterns) if subject.labelled else 1
    return routed_weight(gates, unit, pattern, subject.step_share, upload, patterns)


def measure_contamination(subject: Subject) -> dict[str, Any]:
    """χ_m, its parts and its client-level counterparts, for every kept round."""
    matching, held = _matching(subject)
    dominant = held.argmax(1)
    owner = np.array([client.index for client, _ in subject.units])
    mixtures = np.stack([subject.mixture(client) for client in subject.clients])
    aligned = np.zeros((len(subject.clients), subject.state.layout.experts))
    np.add.at(aligned, (owner, subject.anchor), held.sum(1))
    rounds = {}
    for t, state in sorted(subject.states.items()):
        found = contamination(_routed(subject, state, subject.upload()), dominant, subject.anchor, matching.target)
        whole = contamination(
            _routed(subject, state, subject.upload(whole_clients=True)), dominant, subject.anchor, matching.target
        )
        rounds[str(t)] = {
            "chi": found.chi,
            "local": found.local,
            "misalignment": found.misalignment,
            "leakage": found.leakage,
            "client": whole.chi,
            "lemma_holds": found.lemma_holds,
        }
    return {
        "clean": matching.clean,
        "target": [subject.patterns[k] for k in matching.target],
        "oracle": {name: int(m) for name, m in zip(subject.patterns, matching.oracle, strict=True)},
        "client_mixture": mixture_contamination(mixtures, aligned, matching.target),
        "rounds": rounds,
    }


def measure_budget(subject: Subject) -> dict[str, Any]:
    """A_{m,U} and the mean routed weight behind it."""
    training = subject.workspace.config.training
    weight = {t: _routed(subject, s, subject.upload()).sum((0, 1)) for t, s in sorted(subject.states.items())}
    steps = subject.completed * training.local_steps
    budget = effective_budget(weight, subject.completed, training.local_steps, training.lr)
    return {
        "rate": training.lr,
        "steps": steps,
        "budget": budget,
        "mean_weight": budget / (training.lr * steps) if training.lr * steps > 0 else next(iter(weight.values())),
        "weight_by_round": {str(t): values for t, values in weight.items()},
    }


# -------------------------------------------------------------------------------------- router


def measure_paths(subject: Subject, sample: Sample, rate: float, console: Console) -> dict[str, Any]:
    """Persistent against reset-and-average for every sampled client with more than one bucket."""
    state, config = subject.state, subject.workspace.config
    assert state.router is not None
    meter = GradientMeter(subject.workspace.engine, state.layout, state.router)
    chosen = [client for client in sample.clients if len(client.buckets) > 1]
    steps = config.training.local_steps
    bar = console.progress("router paths", len(chosen) * (steps + 1), "steps")
    clients = {}
    for client in chosen:
        sizes = np.array([len(b) for b in client.buckets])
        start, shares = subject.phi(client, state).double().cpu().numpy(), sizes / sizes.sum()

        def gradient(
            states: np.ndarray, buckets: np.ndarray, client: Client = client
        ) -> tuple[np.ndarray, np.ndarray]:
            lanes = [
                sample_lane(
                    client.data, client.buckets[c], state.theta, torch.from_numpy(phi).float(), sample.batches,
                    sample.batch_size, config.seed, client.index, int(c),
                )
                for phi, c in zip(states, buckets, strict=True)
            ]  # fmt: skip
            found = meter(lanes)
            assert found.phi is not None
            return found.losses, found.phi.double().numpy()

        budget = subject.step_budget(client)
        paths = follow(gradient, start, shares, interleave(budget), rate, bar.advance)
        mismatch, bias = weight_mismatch(shares, budget, paths.first_gradients)
        clients[client.name] = {
            **paths.figures(),
            "gradient_norm": float(np.linalg.norm(shares @ paths.first_gradients)),
            "weight_mismatch": mismatch,
            "weight_mismatch_bias": bias,
        }
    bar.close()
    return {"steps": steps, "rate": rate, "clients": clients}


def measure_risk(subject: Subject, sample: Sample, console: Console) -> dict[str, Any]:
    """S_i and margin risk on all examples; the sparse-risk bound on a sample of each sampled client."""
    workspace, state = subject.workspace, subject.state
    model = served_models(workspace, state)[0]
    matching, _ = _matching(subject)
    clients: dict[str, dict[str, Any]] = {}
    weights, oracle = {}, {}
    for client in subject.clients:
        w = model.weights(client.data.features).double().numpy()
        m = matching.oracle[subject.pattern[client.index]]
        weights[client.index], oracle[client.index] = w, m
        clients[client.name] = {"deficit": deficit(w, m), "margin_risk": margin_risk(w, m)}
    experts = state.layout.experts
    drawn = {}
    for client in sample.clients:
        rng = np.random.default_rng(stream_key("diagnose", workspace.config.seed, client.index, "risk"))
        count = sample.batches * sample.batch_size * len(client.buckets)
        drawn[client.index] = rng.permutation(len(client))[:count]
    total = (experts + 1) * sum(map(len, drawn.values()))
    bar = console.progress("losses of every expert alone", total, "examples")
    for client in sample.clients:
        rows = drawn[client.index]
        examples = [client.data.examples[i] for i in rows]
        w = weights[client.index][rows]
        gates = [torch.eye(experts)[m].repeat(len(rows), 1) for m in range(experts)] + [torch.from_numpy(w).float()]
        losses = torch.stack(
            [example_losses(model.backbone, examples, model.mixture, model.theta, g, bar) for g in gates], 1
        )
        each = losses.double().numpy()  # [n, M + 1], the soft mixture last
        risk = sparse_risk(w, oracle[client.index][rows], each[:, :-1], each[:, -1])
        clients[client.name]["sparse"] = {
            **asdict(risk),
            "examples": len(rows),
            "excess": risk.excess,
            "margin_bound": risk.margin_bound,
            "bound": risk.bound,
            "calibrated": risk.calibrated,
            "chain_holds": risk.chain_holds,
        }
    bar.close()
    every, right = (np.concatenate(list(part.values())) for part in (weights, oracle))
    return {
        "clean": matching.clean,
        "deficit": deficit(every, right),
        "margin_risk": margin_risk(every, right),
        "clients": clients,
    }


def _plain(value: Any) -> Any:
    """JSON as every reader takes it: lists for arrays, null for what is not a number."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
