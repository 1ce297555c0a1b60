"""The test at the end of a run: losses, scores, routing and audit of the best round and of the last."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedweave
from fedweave.console import Console
from fedweave.evaluation.audit import per_task, routing_table
from fedweave.evaluation.losses import example_losses
from fedweave.evaluation.scores import METRICS, score
from fedweave.federation.checkpoint import write_atomic
from fedweave.inference.generate import generate
from fedweave.inference.model import RoutedModel
from fedweave.methods import build_method
from fedweave.methods.base import ServerState
from fedweave.router.mlp import sparsify
from fedweave.runs.folder import Progress, RunFolder
from fedweave.runs.workspace import TestSet, Workspace
from fedweave.settings import to_tree

SCHEMA = 1


def summarise(run: RunFolder, workspace: Workspace, progress: Progress, console: Console) -> dict[str, Any]:
    """Everything that summary.json holds, but for the timing."""
    config, clients = workspace.config, workspace.engine.clients
    test: dict[str, Any] = {}
    if config.evaluation.untouched:
        workspace.engine.detach()
        bar = console.progress("test, untouched backbone", len(workspace.test.encoded), "examples")
        losses = example_losses(workspace.backbone, workspace.test.encoded, progress=bar)
        bar.close()
        test["untouched"] = {"loss": per_task(losses, workspace.test.labels)}
    predictions: list[dict[str, Any]] = []
    test["best"] = evaluate_state(workspace, progress.best, workspace.test, console, predictions)
    test["best"]["round"] = progress.best_round
    if progress.best_round == progress.completed:
        test["last"] = test["best"]
    else:
        test["last"] = evaluate_state(workspace, progress.state, workspace.test, console)
        test["last"]["round"] = progress.completed
    lines = "".join(json.dumps(p, ensure_ascii=False) + "\n" for p in predictions)
    write_atomic(run.path / "predictions.jsonl", lines)
    discovery = json.loads((run.path / "discovery.json").read_text(encoding="utf-8"))
    return {
        "schema": SCHEMA,
        "method": config.method,
        "seed": config.seed,
        "tasks": {name: task.title for name, task in workspace.tasks.items()},
        "notes": [*workspace.data.notes, *([workspace.backbone.note] if workspace.backbone.note else [])],
        "clients": len(clients),
        "examples": sum(len(c) for c in clients),
        "buckets": sum(len(c.buckets) for c in clients),
        "experts": progress.state.layout.experts,
        "parameters": {
            "experts": progress.state.layout.size,
            "router": progress.state.phi.numel() if progress.state.phi is not None else 0,
        },
        "rounds": progress.completed,
        "validation": {"best_round": progress.best_round, "best_loss": progress.best_loss},
        "audit": discovery.get("audit"),
        "test": test,
        "backbone": {"model": workspace.backbone.name, "fingerprint": workspace.backbone.fingerprint},
        "config": to_tree(config),
        "environment": environment(workspace.backbone.device),
    }


def routed_models(workspace: Workspace, state: ServerState) -> list[RoutedModel]:
    """The models that a method serves: one, or every client's own."""
    mixture = workspace.engine.mixture(state.layout)
    return [
        RoutedModel(workspace.backbone, mixture, one.theta, state.router, one.phi, one.shares)
        for one in build_method(workspace.config).served(state)
    ]


def evaluate_state(
    workspace: Workspace,
    state: ServerState,
    held: TestSet,
    console: Console,
    predictions: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Losses of every routing, scores of the chosen one, the routing table; means where several models serve."""
    models = routed_models(workspace, state)
    results = [
        _evaluate_model(workspace, model, held, console, predictions if model is models[0] else None)
        for model in models
    ]
    return _mean_tree(results)


def _mean_tree(trees: list[Any]) -> Any:
    """The mean of equal-shaped trees of numbers; anything else is taken from the first."""
    first = trees[0]
    if isinstance(first, dict):
        return {key: _mean_tree([tree[key] for tree in trees]) for key in first}
    if isinstance(first, list):
        return [_mean_tree(list(items)) for items in zip(*trees, strict=True)]
    return float(np.mean(trees)) if isinstance(first, float) and len(trees) > 1 else first


def _evaluate_model(
    workspace: Workspace,
    model: RoutedModel,
    held: TestSet,
    console: Console,
    predictions: list[dict[str, Any]] | None,
) -> dict[str, Any]:
    settings, used = workspace.config.evaluation, build_method(workspace.config).routing
    weights = model.weights(held.features)  # [n, M]
    several = model.mixture.layout.experts > 1
    result: dict[str, Any] = {
        "used": used if several else "sparse",
        "loss": {},
        "routing": routing_table(weights, held.labels),
        "top1": routing_table(sparsify(weights, "sparse"), held.labels),
    }
    routings = dict.fromkeys(["sparse", "soft", used] if several else ["sparse"])
    bar = console.progress("test losses", len(held.encoded) * len(routings), "examples")
    for routing in routings:
        gates = sparsify(weights, routing)
        losses = example_losses(workspace.backbone, held.encoded, model.mixture, model.theta, gates, bar)
        result["loss"][routing] = per_task(losses, held.labels)
    bar.close()
    if settings.scores:
        gates = sparsify(weights, used)
        result["score"] = _scores(workspace, model, held, weights, gates, console, predictions)
    if settings.compare_routings:
        result["routings"] = {}
        for routing in ("sparse", "top2", "soft"):
            started = time.monotonic()
            scored = _scores(workspace, model, held, weights, sparsify(weights, routing), console, None)
            seconds = time.monotonic() - started
            result["routings"][routing] = {"score": scored, "ms_per_prompt": 1e3 * seconds / len(held.encoded)}
    return result


def _scores(
    workspace: Workspace,
    model: RoutedModel,
    held: TestSet,
    weights: torch.Tensor,
    gates: torch.Tensor,
    console: Console,
    predictions: list[dict[str, Any]] | None,
) -> dict[str, float]:
    """Generate and score the answers of every task; ``macro`` is the unweighted mean."""
    settings = workspace.config.evaluation
    bar = console.progress("test answers", len(held.encoded), "prompts")
    scores = {}
    for name in dict.fromkeys(held.labels):
        task = workspace.tasks[name]
        rows = [i for i, label in enumerate(held.labels) if label == name]
        answers = generate(
            workspace.backbone,
            [held.encoded[i].prompt for i in rows],
            task.max_new_tokens,
            model.mixture,
            model.theta,
            gates[rows],
            settings.batch_size,
            bar,
        )
        references = [held.references[i] for i in rows]
        scores[name] = score(task.metric, answers, references, settings.rouge)
        if predictions is not None:
            predictions += [
                {
                    "task": name,
                    "origin": held.origins[i],
                    "prediction": answer,
                    "reference": held.references[i],
                    "score": METRICS[task.metric](answer, held.references[i]),
                    "weights": weights[i].tolist(),
                }
                for i, answer in zip(rows, answers, strict=True)
            ]
    bar.close()
    return {**scores, "macro": float(np.mean(list(scores.values())))}


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, device and, in a checkout, the commit."""
    packages = {
        "fedweave": fedweave.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    for name in ("transformers", "scikit-learn", "numpy", "safetensors"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {"versions": packages, "device": f"{device.type}: {name}", "commit": _commit()}


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
