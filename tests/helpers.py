"""What several test files use: commands and run folders, and small clients and lanes for numerical tests."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedweave.backbone.features import compute_features
from fedweave.backbone.load import Backbone
from fedweave.config import TrainingConfig
from fedweave.data.sample import make_sample
from fedweave.experts.layout import AdapterLayout
from fedweave.experts.mixture import Mixture
from fedweave.router.mlp import RouterLayout
from fedweave.training.batch import ClientData, Lane
from fedweave.training.lockstep import LockstepTrainer
from fedweave.training.schedule import local_schedule

ROOT = Path(__file__).parents[1]
TARGETS = ("q_proj", "v_proj")
PROMPTS = ["How many?", "Fix the grammar: Ada go to the park.", "Pick the fruit from this list: dog, plum, bus."]
PATIENCE = 300.0  # seconds until something is taken to hang
# Overrides of the quickstart with which a complete run on a tiny model takes half a second.
SMALL = [
    "data.clients=3", "data.train=12", "data.validation=2", "data.test=2", "data.alpha=1.0",
    "experts.rank=4", "experts.dropout=0.1", "discovery.max_buckets=4", "discovery.warmup_steps=2",
    "discovery.restarts=2", "training.rounds=3", "training.local_steps=3", "training.batch_size=4",
    "training.participation=1.0", "router.hidden=16", "router.warm_start.rounds=2", "router.warm_start.steps=5",
    "evaluation.max_new_tokens=4", "backbone.device=cpu", "backbone.max_length=128",
]  # fmt: skip


# -------------------------------------------------------------------------------------- commands and folders


def command(*arguments: object) -> list[str]:
    """`fedweave …` as a process of its own."""
    return [sys.executable, "-m", "fedweave.cli", *map(str, arguments)]


def users_environment() -> dict[str, str]:
    """This environment as it was before tests/conftest.py: with the user's cache, the network and all cores."""
    return {k: v for k, v in os.environ.items() if k not in ("FEDWEAVE_CACHE", "HF_HUB_OFFLINE", "OMP_NUM_THREADS")}


def fork(work: Callable[..., int], *given: Any, log: Path, **environment: str) -> BaseProcess:
    """A process of its own that does this work, writes what it says to a log, and exits with what the work returns.
    It comes from one that has imported everything: its start takes a hundredth of an interpreter's."""
    process = _FORKS.Process(target=_in_a_fork, args=(log, environment, work, *given), daemon=True)
    process.start()
    return process


def forked(work: Callable[..., int], *given: Any, log: Path, **environment: str) -> int:
    """The exit code of such a process."""
    process = fork(work, *given, log=log, **environment)
    process.join(PATIENCE)
    assert process.exitcode is not None, "it has not ended"
    return process.exitcode


def _in_a_fork(log: Path, environment: dict[str, str], work: Callable[..., int], *given: Any) -> None:
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(said, stream)
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in a shell's background
    try:
        sys.exit(work(*given))
    finally:
        atexit._run_exitfuncs()  # forks leave these out


_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([
    "fedweave.runs.run", "fedweave.methods.fedweave", "transformers.models.llama.modeling_llama", "sklearn.metrics",
    "rouge_score.rouge_scorer",
])  # fmt: skip


def read_json(path: Path) -> Any:
    """What a file holds, without its checksum."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(content, dict):
        content.pop("checksum", None)
    return content


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_jsonl(path: Path, rows: Iterable[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file below the folder, to see whether something changed."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def events(run: Path, kind: str) -> list[dict]:
    """What a run has logged of this kind so far."""
    log = run / "metrics.jsonl"
    return [event for event in read_jsonl(log) if event["event"] == kind] if log.exists() else []


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of the condition. The limit is no expectation: it ends a test that hangs."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError(f"{what} did not happen within {PATIENCE} s")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# -------------------------------------------------------------------------------------- pages


def blocks(page: Path, language: str) -> list[re.Match]:
    """A page's fenced blocks in this language: their ``body``, and the ``reason`` of one that is not to be run."""
    return [m for m in _FENCE.finditer(page.read_text(encoding="utf-8")) if m["language"] == language]


_FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+?) -->\n+)?^```(?P<language>\w+)\n(?P<body>.*?)^```$", re.M | re.S
)


# -------------------------------------------------------------------------------------- lanes


def client_data(backbone: Backbone, count: int, seed: int, name: str = "client") -> ClientData:
    """``count`` examples that mix the four sample patterns."""
    pools, _ = make_sample(count, seed)
    rng = np.random.default_rng(seed)
    everything = [e for pool in pools.values() for e in pool]
    chosen = [everything[i] for i in rng.permutation(len(everything))[:count]]
    encoded = backbone.prompts.encode(chosen)
    return ClientData(name, encoded, compute_features(backbone, [e.prompt for e in encoded]))


def random_theta(layout: AdapterLayout, seed: int, scale: float = 0.05) -> torch.Tensor:
    """Experts that differ and whose B is not zero, so that every gradient is alive."""
    noise = torch.randn(layout.size, generator=torch.Generator().manual_seed(seed)) * scale
    return layout.initial(0) + noise


def assert_trained_alike(mine: torch.Tensor, theirs: torch.Tensor, limit: float = 2e-5) -> None:
    """What two processes trained, whose optimiser no fixture reaches: where a gradient is rounding alone, so is the
    direction of AdamW's step, and a few weights in a thousand may have gone another way after many rounds."""
    difference = (mine.float() - theirs.float()).abs()
    assert (difference > limit).float().mean() <= 5e-3 and difference.max() <= 1e-2


def make_lanes(
    backbone: Backbone, layout: AdapterLayout, router: RouterLayout | None, clients: int, steps: int = 4
) -> list[Lane]:
    lanes = []
    for i in range(clients):
        data = client_data(backbone, 12 + 3 * i, seed=i)
        # buckets of unequal size, one smaller than a batch
        buckets = [np.arange(2), np.arange(2, len(data))]
        schedule = local_schedule(buckets, steps, 4, 0, 0, i)
        phi = router.initial(7) if router else None
        lanes.append(Lane(data, schedule, random_theta(layout, 3), phi, (0, 0, i)))
    return lanes


def make_trainer(
    backbone: Backbone,
    layout: AdapterLayout,
    router: RouterLayout | None,
    dropout: float = 0.0,
    router_rate: float = 1e-2,
    kind: type[LockstepTrainer] = LockstepTrainer,
    targets: Sequence[str] = TARGETS,
    **training: float | str,
) -> tuple[LockstepTrainer, Mixture]:
    mixture = Mixture(backbone.linear_layers(targets), layout, alpha=16.0)
    config = TrainingConfig(**{"lr": 1e-2, "clip": 1.0, **training})  # type: ignore[arg-type]
    return kind(backbone, mixture, router, config, dropout, router_rate), mixture
