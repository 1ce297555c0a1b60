"""The test at the end of a run: losses, scores, routing and audit of the best round and of the last."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import fedweave
from fedweave.config import Config
from fedweave.console import Console
from fedweave.evaluation.audit import per_task
from fedweave.evaluation.losses import example_losses
from fedweave.federation.client import Client
from fedweave.federation.method import Sizes
from fedweave.federation.state import ServerState
from fedweave.files import write_atomic
from fedweave.inference.model import FedWeaveModel
from fedweave.json_files import read_json
from fedweave.methods import build_method, method_class
from fedweave.router.mlp import RouterLayout
from fedweave.runs.course import ended
from fedweave.runs.describing import describe_at_the_end
from fedweave.runs.folder import Progress, RunFolder
from fedweave.runs.reading import read_events
from fedweave.runs.testing import Exam, routed_models
from fedweave.runs.workspace import TestSet, Workspace
from fedweave.schema import ByTask, Communication, Discovery, Environment, Prediction, Summary, Test
from fedweave.settings import to_tree

if TYPE_CHECKING:
    from fedweave.runs.run import RunContext

SCHEMA = 1


def summarise(
    run: RunFolder, context: RunContext, tester: Workspace | None, progress: Progress, console: Console
) -> Summary:
    """Everything that summary.json holds, but for the timing; without a tester there is no test in it."""
    config, clients, backbone = context.config, context.engine.members, context.backbone
    here = [client for client in clients if isinstance(client, Client)]  # none where the clients are sites
    discovery = read_json(run.path / "discovery.json", Discovery)
    summary: Summary = {
        "schema": SCHEMA,
        "method": config.method,
        "seed": config.seed,
        "tasks": {name: task.title for name, task in tester.data.tasks.items()} if tester else {},
        "notes": [*(tester.data.notes if tester else []), *([backbone.note] if backbone.note else [])],
        "clients": len(clients),
        "examples": sum(len(c) for c in clients),
        "train_tokens": sum(len(e.ids) for c in here for e in c.data.examples) if here else None,
        "buckets": sum(len(c.sizes) for c in clients),
        "experts": progress.state.layout.experts,
        "parameters": {
            "experts": progress.state.layout.size,
            "router": progress.state.phi.numel() if progress.state.phi is not None else 0,
        },
        "trained_parameters": trained_parameters(config, progress.state),
        "rounds": progress.completed,
        "communication": _communication(run, progress.state),
        "validation": {"best_round": progress.best_round, "best_loss": progress.best_loss},
        "audit": discovery.get("audit") if discovery else None,
        "test": _test(run, tester, progress, console) if tester else {},
        "backbone": {"model": backbone.name, "fingerprint": backbone.fingerprint},
        "config": to_tree(config),
        "environment": environment(backbone.device),
    }
    if tester and tester.unseen:
        summary["unseen_tasks"] = {name: task.title for name, task in tester.data.unseen_tasks.items()}
    if ended(progress):
        summary["ended_early"] = True
    if discovery and "kind_audit" in discovery:
        summary["kind_audit"] = discovery["kind_audit"]
    return summary


def trained_parameters(config: Config, state: ServerState) -> int:
    """Numbers that the method trains; what it freezes does not count."""
    router = state.router or RouterLayout(0, 0, state.layout.experts)  # one adapter: no router is counted
    trains_router = config.trains_router
    sizes = Sizes(state.layout, state.layout, router, state.layout.experts, trains_router)
    return method_class(config.method).payload(sizes).trainable


def _communication(run: RunFolder, state: ServerState) -> Communication:
    """Bytes between clients and server, from the run's own log: before round 1, and per client and round."""
    events = read_events(run.metrics)
    rounds = [event for event in events if event["event"] == "round"]
    before = list(state.report.get("preparation_bytes", {}).values())
    up = [sent for event in rounds for sent in event["bytes_up"].values()]
    down = [event["bytes_down"] for event in rounds for _ in event["participants"]]
    changes = [event for event in events if event["event"] in ("change", "asked")]
    figures: Communication = {
        "before_up": sum(client["up"] for client in before),
        "before_down": sum(client["down"] for client in before),
        "rounds_up": sum(up),
        "rounds_down": sum(down),
        "per_client_and_round_up": round(sum(up) / max(1, len(up))),
        "per_client_and_round_down": round(sum(down) / max(1, len(down))),
    }
    if changes:
        figures["changes_up"] = sum(sum(event["bytes_up"].values()) for event in changes)
        figures["changes_down"] = sum(sum(event["bytes_down"].values()) for event in changes)
    return figures


def _test(run: RunFolder, tester: Workspace, progress: Progress, console: Console) -> Test:
    """The bare backbone, the best round, also on unseen tasks, and the last; the best round's answers go to
    predictions.jsonl."""
    test: Test = {}
    if tester.config.evaluation.untouched:
        tester.engine.detach()
        test["untouched"] = {"loss": _untouched(tester, tester.test, console)}
        if tester.unseen:
            test["untouched"]["unseen"] = _untouched(tester, tester.unseen, console)
    predictions: list[Prediction] = []
    models = served_models(tester, progress.best)
    exam = Exam(tester.config, tester.data.tasks, tester.test, console)
    test["best"] = exam.of(models, predictions)
    test["best"]["round"] = progress.best_round
    if tester.engine.members and len(models) == 1:  # others have no common experts, or no rows here
        describe_at_the_end(run.path, tester, models[0], predictions, progress.best_round)
    if tester.unseen:
        unseen = Exam(tester.config, tester.data.unseen_tasks, tester.unseen, console)
        test["unseen"] = unseen.of(models, predictions)
        test["unseen"]["round"] = progress.best_round
    best, state = progress.best.tensors(), progress.state.tensors()
    back = progress.setbacks and all(torch.equal(own, best[name]) for name, own in state.items())
    if progress.best_round == progress.completed or back:
        test["last"] = test["best"]
    elif tester.config.evaluation.last:
        test["last"] = exam.of(served_models(tester, progress.state))
        test["last"]["round"] = progress.completed
    lines = "".join(json.dumps(p, ensure_ascii=False) + "\n" for p in predictions)
    write_atomic(run.path / "predictions.jsonl", lines)
    return test


def _untouched(tester: Workspace, held: TestSet, console: Console) -> ByTask:
    bar = console.progress("test, untouched backbone", len(held.encoded), "examples")
    losses = example_losses(tester.backbone, held.encoded, progress=bar)
    bar.close()
    return per_task(losses, held.labels)


def served_models(tester: Workspace, state: ServerState) -> list[FedWeaveModel]:
    mixture = tester.engine.compute.mixture(state.layout)
    return routed_models(tester.backbone, mixture, build_method(tester.config), state)


def environment(device: torch.device) -> Environment:
    """Versions, device and, in a checkout, the commit."""
    packages = {
        "fedweave": fedweave.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    packages |= {name: version(name) for name in ("transformers", "scikit-learn", "numpy", "safetensors")}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {"versions": packages, "device": f"{device.type}: {name}", "commit": _commit()}


def peak_memory(device: torch.device) -> int | None:
    """Most bytes in use so far: tensors on a GPU, the whole process on a CPU (where the system tells)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:  # of this program alone: what getrusage says begins with the size of whoever started it
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    except (OSError, StopIteration):  # no Linux
        pass
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
