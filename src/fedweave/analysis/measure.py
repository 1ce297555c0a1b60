"""What a diagnosis measures on a run: gradient conflict, contamination and effective budget of its experts; of the
router its two ways of training, and what one active expert risks."""

import numpy as np
import torch

from fedweave.analysis.conflict import cancelled, conflict, cosines, pure_bucket_bound
from fedweave.analysis.contamination import (
    Matching,
    contamination,
    effective_budget,
    match_patterns,
    mixture_contamination,
    numbers,
    routed_weight,
)
from fedweave.analysis.diagnosis import (
    BucketConflict,
    BudgetReport,
    ClientPaths,
    ClientRisk,
    ConflictFigures,
    ContaminationFigures,
    ContaminationReport,
    PathsReport,
    RiskReport,
    UnitConflict,
)
from fedweave.analysis.gradients import GradientMeter, pooled, sample_lane
from fedweave.analysis.routing_risk import deficit, margin_risk, sparse_risk
from fedweave.analysis.subject import Sample, Subject
from fedweave.analysis.trajectories import follow, weight_mismatch
from fedweave.console import Console
from fedweave.evaluation.losses import example_losses
from fedweave.experts.layout import AdapterLayout
from fedweave.federation.client import Client
from fedweave.federation.state import ServerState
from fedweave.router.mlp import RouterLayout
from fedweave.runs.summary import served_models
from fedweave.streams import stream_key
from fedweave.training.schedule import interleave


def measure_conflict(subject: Subject, sample: Sample, console: Console) -> dict[str, ConflictFigures]:
    """Γ for an adapter that all patterns would share, fresh or merged from the experts, and for the run's own
    experts and router. A pattern's examples are drawn from all clients, as many as a sampled bucket of each."""
    state, compute, config = subject.state, subject.workspace.engine.compute, subject.workspace.config
    data = pooled([client.data for client in subject.clients])
    pattern = np.concatenate(list(subject.pattern.values()))
    members_of = [np.flatnonzero(pattern == k) for k in range(len(subject.patterns))]
    batches = sample.batches * len(sample.clients)
    single = state.layout.with_experts(1)
    fresh = single.initial(config.seed).to(compute.device)
    adapters: dict[str, tuple[AdapterLayout, RouterLayout | None, torch.Tensor, torch.Tensor | None]] = {
        "fresh_adapter": (single, None, fresh, None)
    }
    if state.layout.experts > 1:
        merged = torch.stack(state.layout.unstack(state.theta)).mean(0)
        adapters["merged_experts"] = (single, None, merged, None)
    if state.phi is None or len(state.phi) == 1:
        phi = state.forgetting().phi
        adapters["experts"] = (state.layout, state.router, state.theta, phi[0] if phi is not None else None)
    bar = console.progress("pattern gradients", len(adapters) * len(subject.patterns), "patterns")
    found = {}
    for name, (layout, router, theta, phi) in adapters.items():
        lanes = [
            sample_lane(data, members, theta, phi, batches, sample.batch_size, config.seed, "pattern", k)
            for k, members in enumerate(members_of)
        ]
        gradients = GradientMeter(compute, layout, router)(lanes, bar.advance)
        found[name] = gradients.theta
        if gradients.phi is not None:
            found["router"] = gradients.phi
    bar.close()
    return {name: _conflicts(subject, rows.double()) for name, rows in found.items()}


def _conflicts(subject: Subject, gradients: torch.Tensor) -> ConflictFigures:
    """Γ of every client and bucket from the patterns' gradients [K, columns]."""
    gram = (gradients @ gradients.T).numpy()
    norms = np.sqrt(np.diag(gram))

    def unit(shares: np.ndarray) -> UnitConflict:
        return {"gamma": conflict(gram, shares), "cancelled": cancelled(gram, shares)}

    def bucket(shares: np.ndarray) -> BucketConflict:
        off, bound = 1 - float(shares.max()), pure_bucket_bound(shares, float(norms.max()))
        return {**unit(shares), "off_dominant": off, "bound": bound}

    clients = {client.name: unit(_shares(subject.mixture(client))) for client in subject.clients}
    buckets = {
        client.name: [bucket(_shares(subject.mixture(client, members))) for members in client.buckets]
        for client in subject.clients
    }
    every = [b for rows in buckets.values() for b in rows]
    sizes = [len(b) for client in subject.clients for b in client.buckets]
    return {
        "norms": norms.tolist(),
        "cosines": cosines(gram).tolist(),
        "clients": clients,
        "buckets": buckets,
        "client_cancelled": float(
            np.average([c["cancelled"] for c in clients.values()], weights=list(map(len, subject.clients)))
        ),
        "bucket_cancelled": float(np.average([b["cancelled"] for b in every], weights=sizes)),
        "bound_holds": all(b["gamma"] <= b["bound"] * (1 + 1e-9) + 1e-30 for b in every),
    }


def _shares(counts: np.ndarray) -> np.ndarray:
    return counts / counts.sum()


def matching(subject: Subject) -> tuple[Matching, np.ndarray]:
    """κ and ψ, and how many examples of every pattern each unit holds, [U, K]."""
    held = np.stack([subject.mixture(client, client.buckets[c]) for client, c in subject.units])
    counts = np.zeros((len(subject.patterns), subject.state.layout.experts))
    np.add.at(counts.T, subject.anchor, held)
    return match_patterns(counts), held


def _routed(subject: Subject, state: ServerState, upload: np.ndarray) -> np.ndarray:
    """[U, K, M] routed weights of all clients under one kept state; without labels K is 1."""
    gates = np.concatenate([subject.gates(client, state) for client in subject.clients])
    unit = np.concatenate(list(subject.unit.values()))
    pattern = np.concatenate(list(subject.pattern.values())) if subject.labelled else np.zeros(len(unit), dtype=int)
    patterns = len(subject.patterns) if subject.labelled else 1
    return routed_weight(gates, unit, pattern, subject.step_share, upload, patterns)


def measure_contamination(subject: Subject) -> ContaminationReport:
    """χ_m, its parts and its client-level counterparts, for every kept round."""
    matched, held = matching(subject)
    dominant = held.argmax(1)
    owner = np.repeat(np.arange(len(subject.clients)), [len(client.buckets) for client in subject.clients])
    mixtures = np.stack([subject.mixture(client) for client in subject.clients])
    aligned = np.zeros((len(subject.clients), subject.state.layout.experts))
    np.add.at(aligned, (owner, subject.anchor), held.sum(1))
    rounds: dict[str, ContaminationFigures] = {}
    for t, state in sorted(subject.states.items()):
        found = contamination(_routed(subject, state, subject.upload()), dominant, subject.anchor, matched.target)
        uploads = subject.upload(whole_clients=True)
        whole = contamination(_routed(subject, state, uploads), dominant, subject.anchor, matched.target)
        rounds[str(t)] = {**found, "client": whole["chi"]}
    return {
        "clean": matched.clean,
        "target": [subject.patterns[k] for k in matched.target],
        "oracle": {name: int(m) for name, m in zip(subject.patterns, matched.oracle, strict=True)},
        "client_mixture": numbers(mixture_contamination(mixtures, aligned, matched.target)),
        "rounds": rounds,
    }


def measure_budget(subject: Subject) -> BudgetReport:
    """A_{m,U} and the mean routed weight behind it."""
    training = subject.workspace.config.training
    weight = {t: _routed(subject, s, subject.upload()).sum((0, 1)) for t, s in sorted(subject.states.items())}
    steps = subject.completed * training.local_steps
    budget = effective_budget(weight, subject.completed, training.local_steps, training.lr)
    mean = budget / (training.lr * steps) if training.lr * steps > 0 else next(iter(weight.values()))
    return {
        "rate": training.lr,
        "steps": steps,
        "budget": budget.tolist(),
        "mean_weight": mean.tolist(),
        "weight_by_round": {str(t): values.tolist() for t, values in weight.items()},
    }


# -------------------------------------------------------------------------------------- the router


def measure_paths(subject: Subject, sample: Sample, rate: float, console: Console) -> PathsReport:
    """Persistent against reset-and-average for every sampled client with more than one bucket."""
    state, config = subject.state, subject.workspace.config
    assert state.router is not None
    meter = GradientMeter(subject.workspace.engine.compute, state.layout, state.router)
    chosen = [client for client in sample.clients if len(client.buckets) > 1]
    steps = config.training.local_steps
    bar = console.progress("router paths", len(chosen) * (steps + 1), "steps")
    clients: dict[str, ClientPaths] = {}
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
        paths, first = follow(gradient, start, shares, interleave(budget), rate, bar.advance)
        clients[client.name] = {**paths, **weight_mismatch(shares, budget, first)}
    bar.close()
    return {"steps": steps, "rate": rate, "clients": clients}


def measure_risk(subject: Subject, sample: Sample, console: Console) -> RiskReport:
    """S_i and margin risk on all examples; the sparse-risk bound on a sample of each sampled client."""
    workspace, state = subject.workspace, subject.state
    model = served_models(workspace, state)[0]
    matched, _ = matching(subject)
    clients: dict[str, ClientRisk] = {}
    weights, oracle = {}, {}
    for client in subject.clients:
        w = model.weights(client.data.features).double().numpy()
        m = matched.oracle[subject.pattern[client.index]]
        weights[client.index], oracle[client.index] = w, m
        clients[client.name] = {"deficit": deficit(w, m), "margin_risk": margin_risk(w, m)}
    experts = state.layout.experts
    drawn = {}
    for client in sample.clients:
        rng = np.random.default_rng(stream_key("diagnose", workspace.config.seed, client.index, "risk"))
        count = sample.batches * sample.batch_size * len(client.buckets)
        drawn[client.index] = rng.permutation(len(client.data))[:count]
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
        clients[client.name]["sparse"] = sparse_risk(w, oracle[client.index][rows], each[:, :-1], each[:, -1])
    bar.close()
    every, right = (np.concatenate(list(part.values())) for part in (weights, oracle))
    return {
        "clean": matched.clean,
        "deficit": deficit(every, right),
        "margin_risk": margin_risk(every, right),
        "clients": clients,
    }
