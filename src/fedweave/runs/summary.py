"""The test at the end of a run: losses, scores, routing and audit of the best round and of the last."""

from __future__ import annotations

import json
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import fedweave
from fedweave.console import Console
from fedweave.evaluation.audit import per_task
from fedweave.evaluation.losses import example_losses
from fedweave.federation.checkpoint import write_atomic
from fedweave.inference.model import FedWeaveModel
from fedweave.methods import build_method
from fedweave.methods.base import ServerState
from fedweave.runs.folder import Progress, RunFolder
from fedweave.runs.testing import evaluate_models, routed_models
from fedweave.runs.workspace import Workspace
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
    test["best"] = _evaluate(workspace, progress.best, console, predictions)
    test["best"]["round"] = progress.best_round
    if progress.best_round == progress.completed:
        test["last"] = test["best"]
    else:
        test["last"] = _evaluate(workspace, progress.state, console)
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


def served_models(workspace: Workspace, state: ServerState) -> list[FedWeaveModel]:
    mixture = workspace.engine.mixture(state.layout)
    return routed_models(workspace.backbone, mixture, build_method(workspace.config), state)


def _evaluate(
    workspace: Workspace, state: ServerState, console: Console, predictions: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    models = served_models(workspace, state)
    return evaluate_models(workspace.config, workspace.tasks, models, workspace.test, console, predictions)


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
