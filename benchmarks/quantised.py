"""Memory and time of a run whose backbone stays quantised, beside the same run with plain weights.

    python -m benchmarks.quantised [--weights dense,stored,nf4] [--turns 2] [--together] [key=value …]

Every kind of ``backbone.weights`` is a whole run of the quickstart in a process of its own: features, discovery,
rounds and test. Overrides choose the model and the size, as in ``backbone.model=FILE.gguf training.rounds=1``.
Printed are the process's peak memory, what the weights alone take, seconds of the run and of its phases, processor
seconds, the best validation loss, and each as a ratio to the first kind; of several turns the median. A GGUF file
is read once before anything is measured, and no features come from a cache. On a busy machine processor seconds of
kinds that run together, with OMP_NUM_THREADS=1, still mean something: all meet the same load.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def one(weights: str, overrides: list[str]) -> dict[str, float]:
    """A whole run, here."""
    from fedweave.backbone.quantised import bytes_of
    from fedweave.config import load_config
    from fedweave.console import Console
    from fedweave.runs import workspace
    from fedweave.runs.run import start

    loaded = []
    load = workspace.load_backbone
    workspace.load_backbone = lambda config: loaded.append(load(config)) or loaded[-1]  # type: ignore[func-returns-value]
    with tempfile.TemporaryDirectory() as folder:
        config = load_config("quickstart", [*overrides, f"backbone.weights={weights}"])
        summary = start(config, Path(folder) / "run", Console(quiet=True))
    timing = summary["timing"]
    if (device := loaded[0].device).type == "cuda":
        import torch

        peak = torch.cuda.max_memory_allocated(device) / 2**20
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "peak_mib": round(peak),
        "weights_mib": round(bytes_of(loaded[0].model) / 2**20),
        "seconds": round(timing["total_s"], 1),
        "processor_s": round(time.process_time(), 1),
        **{f"{name}_s": round(seconds, 1) for name, seconds in timing["phases_s"].items()},
        "loss": round(summary["validation"]["best_loss"], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=lambda text: text.split(","), default=["dense", "stored"])
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--together", action="store_true", help="all kinds of a turn at the same time")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args, overrides = parser.parse_known_args()
    if args.child:
        print(json.dumps(one(args.child, overrides)))
        return
    turns: dict[str, list[dict[str, float]]] = {weights: [] for weights in args.weights}
    with ThreadPoolExecutor(len(turns) if args.together else 1) as pool:
        for _ in range(args.turns):
            for weights, found in zip(turns, pool.map(lambda kind: measured(kind, overrides), turns), strict=True):
                turns[weights].append(found)
                print(f"{weights:10} {found}", flush=True)
    results = {
        weights: {name: statistics.median(turn[name] for turn in own) for name in own[0]}
        for weights, own in turns.items()
    }
    first = results[args.weights[0]]
    for weights in args.weights[1:]:
        ratios = {name: round(x / first[name], 3) for name, x in results[weights].items() if first.get(name)}
        print(f"{weights} / {args.weights[0]}: {ratios}")
    if args.output:
        content = {"overrides": overrides, "turns": args.turns, "together": args.together, **results}
        args.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def measured(weights: str, overrides: list[str]) -> dict[str, float]:
    """A whole run in a process of its own."""
    with tempfile.TemporaryDirectory() as cache:
        _run(["-c", _READ, weights, *overrides], cache)
        out = _run(["-m", "benchmarks.quantised", "--child", weights, *overrides], cache)
    return json.loads(out.splitlines()[-1])


_READ = """
import sys
from fedweave.backbone.load import load_prompts
from fedweave.config import load_config
load_prompts(load_config("quickstart", [*sys.argv[2:], "backbone.weights=" + sys.argv[1]]).backbone)
"""


def _run(arguments: list[str], cache: str) -> str:
    environment = os.environ | {"FEDWEAVE_CACHE": cache}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


if __name__ == "__main__":
    main()
