"""What routing costs while decoding: the bare backbone, one active expert, all experts, same prompts, same batch.

    python -m benchmarks.decoding runs/quickstart --rows 1,8,32 --output decoding.json

``benchmarks.ladder`` does the same with random weights. A figure is one decoding step of the running batch that
serves requests: prompts are read before the clock starts, and no answer ends early. The three kinds take turns step
by step, so that a slow second hits all of them alike; processor time stands beside wall time, since only it means
something on a machine with other work to do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import keep
from fedweave.backbone.load import Backbone
from fedweave.backbone.prompts import EncodedPrompt
from fedweave.data.sample import make_sample
from fedweave.experts.layout import AdapterLayout
from fedweave.experts.mixture import Mixture
from fedweave.inference.rows import Row, RunningBatch
from fedweave.inference.sampling import Sampling
from fedweave.router.mlp import sparsify
from fedweave.runs.summary import environment
from fedweave.runs.use import load

KINDS = ("bare", "sparse", "soft")


class Contest:
    """One running batch of every kind on the same backbone; experts are attached only while their step runs."""

    def __init__(
        self,
        backbone: Backbone,
        layout: AdapterLayout,
        alpha: float,
        theta: torch.Tensor,
        prompts: Sequence[EncodedPrompt],
        steps: int,
    ):
        self.backbone, self.layout, self.alpha, self.theta = backbone, layout, alpha, theta
        self.layers = dict(backbone.model.named_modules())
        self.batches = {kind: self._batch(kind, prompts, steps + 3) for kind in KINDS}

    def _batch(self, kind: str, prompts: Sequence[EncodedPrompt], tokens: int) -> RunningBatch:
        random = torch.rand(len(prompts), self.layout.experts, generator=torch.Generator().manual_seed(0))
        gates = torch.ones(len(prompts), 1) if kind == "bare" else sparsify(random.softmax(-1), kind)
        rows = [
            Row(self.backbone, prompt, gate, Sampling(max_new_tokens=tokens))
            for prompt, gate in zip(prompts, gates, strict=True)
        ]
        for row in rows:
            row.ends = []  # no answer ends by itself
        mixture = None if kind == "bare" else self._attach()
        batch = RunningBatch(self.backbone, mixture, self.theta, len(rows), max(row.room for row in rows))
        batch.prefill = 10**9
        list(batch.advance(deque(rows)))  # prompts, and the first step, which records on CUDA
        if mixture is not None:
            mixture.detach()
        return batch

    def _attach(self) -> Mixture:
        return Mixture({name: self.layers[name] for name in self.layout.names}, self.layout, self.alpha)

    def step(self, kind: str) -> tuple[float, float]:
        """(wall, processor) seconds of one step; it ends with the tokens on the host."""
        batch = self.batches[kind]
        mixture = self._attach() if kind != "bare" else None
        batch.mixture = mixture
        wall, processor = time.perf_counter(), time.process_time()
        list(batch.advance(deque()))
        spent = time.perf_counter() - wall, time.process_time() - processor
        if mixture is not None:
            mixture.detach()
        return spent


def measure(contest: Contest, rows: int, steps: int) -> dict[str, Any]:
    """Median milliseconds of a step of every kind, and what experts cost."""
    spent: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for _ in range(steps):
        for kind in KINDS:
            spent[kind].append(contest.step(kind))
    result: dict[str, Any] = {"rows": rows, "steps": steps}
    for i, clock in enumerate(("wall", "processor")):
        median = {kind: 1e3 * statistics.median(times[i] for times in spent[kind]) for kind in KINDS}
        result[f"{clock}_ms"] = {kind: round(value, 2) for kind, value in median.items()}
        result[f"{clock}_ratio"] = {kind: round(median[kind] / median["bare"], 3) for kind in KINDS[1:]}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Decoding with and without experts.")
    parser.add_argument("folder", type=Path, help="a run folder or a bundle")
    parser.add_argument("--rows", default="1,8,32", help="batch sizes")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    model = load(arguments.folder, device=arguments.device)
    layout, alpha = model.mixture.layout, model.mixture.scale * model.mixture.layout.rank
    model.mixture.detach()
    results = []
    for rows in map(int, arguments.rows.split(",")):
        pools, _ = make_sample(rows, seed=0)
        prompts = [e.prompt for group in zip(*pools.values(), strict=True) for e in group][:rows]
        encoded = model.backbone.prompts.encode_prompts(prompts)
        contest = Contest(model.backbone, layout, alpha, model.theta, encoded, arguments.steps)
        results.append(measure(contest, rows, arguments.steps))
        print(json.dumps(results[-1]), flush=True)
    report = {
        "benchmark": "decoding",
        "model": model.backbone.name,
        "experts": layout.experts,
        "rank": layout.rank,
        "threads": torch.get_num_threads(),
        "results": results,
        "environment": environment(model.backbone.device),
    }
    keep(report, arguments.output)


if __name__ == "__main__":
    main()
