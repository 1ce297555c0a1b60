"""What routing costs while decoding: the bare backbone, one active expert, all experts, same prompts, same batch.

    python -m benchmarks.decoding runs/quickstart --rows 1,8,32 --output decoding.json

Every figure is the time of one decoding step of the running batch that serves requests (prompts are read before the
clock starts, answers never end early). The three kinds take turns, so that a slow minute of the machine hits all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import deque
from pathlib import Path

import torch

from fedweave.data.sample import make_sample
from fedweave.experts.mixture import Mixture
from fedweave.inference.model import FedWeaveModel
from fedweave.inference.rows import Row, RunningBatch
from fedweave.inference.sampling import Sampling
from fedweave.router.mlp import sparsify
from fedweave.runs.summary import environment

KINDS = ("bare", "sparse", "soft")


def step_seconds(model: FedWeaveModel, alpha: float, kind: str, rows: int, steps: int) -> list[float]:
    """Seconds of every step of a batch of ``rows`` answers."""
    pools, _ = make_sample(rows, seed=0)
    prompts = [e.prompt for group in zip(*pools.values(), strict=True) for e in group][:rows]
    encoded = model.backbone.prompts.encode_prompts(prompts)
    gates = torch.ones(rows, 1)
    mixture = None
    if kind != "bare":
        layers = model.backbone.linear_layers(tuple({name.split(".")[-1] for name in model.mixture.layout.names}))
        mixture = Mixture(layers, model.mixture.layout, alpha)
        gates = sparsify(torch.rand(rows, model.mixture.layout.experts).softmax(-1), kind)
    waiting = deque(
        Row(model.backbone, prompt, gate, Sampling(max_new_tokens=steps + 3))
        for prompt, gate in zip(encoded, gates, strict=True)
    )
    for row in waiting:
        row.ends = []  # no answer ends by itself
    batch = RunningBatch(model.backbone, mixture, model.theta, rows, max(row.room for row in waiting))
    batch.prefill = 10**9
    list(batch.advance(waiting))  # prompts, and the first step, which records on CUDA
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        list(batch.advance(waiting))  # ends with tokens on the host
        seconds.append(time.perf_counter() - started)
    if mixture is not None:
        mixture.detach()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="Decoding with and without experts.")
    parser.add_argument("folder", type=Path, help="a run folder or a bundle")
    parser.add_argument("--rows", default="1,8,32", help="batch sizes")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    model = FedWeaveModel.from_pretrained(arguments.folder, device=arguments.device)
    alpha = model.mixture.scale * model.mixture.layout.rank
    model.mixture.detach()  # the bare backbone must not pay for idle hooks
    results = []
    for rows in map(int, arguments.rows.split(",")):
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(arguments.repeats):
            for kind in KINDS:
                times[kind] += step_seconds(model, alpha, kind, rows, arguments.steps)
        median = {kind: 1e3 * statistics.median(values) for kind, values in times.items()}
        ratios = {f"{kind}/bare": round(median[kind] / median["bare"], 3) for kind in KINDS[1:]}
        results.append({"rows": rows, "ms_per_step": {k: round(v, 2) for k, v in median.items()}, **ratios})
        print(json.dumps(results[-1]), flush=True)
    layout = model.mixture.layout
    report = {
        "benchmark": "decoding",
        "model": model.backbone.name,
        "experts": layout.experts,
        "rank": layout.rank,
        "threads": torch.get_num_threads(),
        "results": results,
        "environment": environment(model.backbone.device),
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
