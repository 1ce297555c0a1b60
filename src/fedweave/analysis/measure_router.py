"""The router side of a diagnosis: its two ways of training, and what one active expert risks."""

import numpy as np
import torch

from fedweave.analysis.diagnosis import ClientPaths, ClientRisk, PathsReport, RiskReport
from fedweave.analysis.gradients import GradientMeter, sample_lane
from fedweave.analysis.measure_experts import matching
from fedweave.analysis.routing_risk import deficit, margin_risk, sparse_risk
from fedweave.analysis.subject import Sample, Subject
from fedweave.analysis.trajectories import follow, weight_mismatch
from fedweave.console import Console
from fedweave.evaluation.losses import example_losses
from fedweave.federation.client import Client
from fedweave.runs.summary import served_models
from fedweave.streams import stream_key
from fedweave.training.schedule import interleave


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
        clients[client.name]["sparse"] = sparse_risk(w, oracle[client.index][rows], each[:, :-1], each[:, -1])
    bar.close()
    every, right = (np.concatenate(list(part.values())) for part in (weights, oracle))
    return {
        "clean": matched.clean,
        "deficit": deficit(every, right),
        "margin_risk": margin_risk(every, right),
        "clients": clients,
    }
