"""Memory and time of a run whose backbone stays quantised, or computes in bfloat16, beside the same run with plain
weights.

    python -m benchmarks.quantised [--weights dense,stored] [--turns 2] [--together] [--before FOLDER] [key=value …]

Every kind of ``backbone.weights`` is a whole run of the quickstart in a process of its own: features, discovery,
rounds and test; ``dense@bfloat16`` is one with that ``backbone.dtype``. Overrides choose the model and the size, as
in ``backbone.model=FILE.gguf training.rounds=1``. Printed are the process's peak memory, what the weights alone
take, seconds of the run and of its phases, processor seconds, the best validation loss, and each as a ratio to the
first kind; of several turns the median. A GGUF file is read once before anything is measured, and no features come
from a cache. On a busy machine processor seconds of kinds that run together, with OMP_NUM_THREADS=1, still mean
something: all meet the same load. ``--before`` puts the same run with plain weights by the code of another checkout
first, as one from before weights could stay quantised.
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

from benchmarks.figures import keep


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
        config = load_config("quickstart", [*overrides, *settings_of(weights)])
        summary = start(config, Path(folder) / "run", Console(quiet=True))
    assert summary is not None
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
    parser.add_argument("--before", type=Path, help="the folder of a checkout whose quickstart comes first")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args, overrides = parser.parse_known_args()
    if args.child:
        print(json.dumps(one(args.child, overrides)))
        return
    kinds = [BEFORE] * bool(args.before) + args.weights
    turns: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    with ThreadPoolExecutor(len(turns) if args.together else 1) as pool:
        for _ in range(args.turns):
            found = pool.map(lambda kind: measured(kind, overrides, args.before), turns)
            for kind, figures in zip(turns, found, strict=True):
                turns[kind].append(figures)
                print(f"{kind:10} {figures}", flush=True)
    results = {
        kind: {name: statistics.median(turn[name] for turn in own) for name in own[0]}
        for kind, own in turns.items()
    }
    first = results[kinds[0]]
    for kind in kinds[1:]:
        ratios = {name: round(x / first[name], 3) for name, x in results[kind].items() if first.get(name)}
        print(f"{kind} / {kinds[0]}: {ratios}")
    keep({"overrides": overrides, "turns": args.turns, "together": args.together, **results}, args.output)


def measured(kind: str, overrides: list[str], before: Path | None) -> dict[str, float]:
    """A whole run in a process of its own."""
    with tempfile.TemporaryDirectory() as cache:
        if kind == BEFORE and before is not None:
            _run(["-c", _READ, *overrides], cache, before)
            out = _run(["-c", _OTHER, *overrides], cache, before)
        else:
            _run(["-c", _READ, *overrides, *settings_of(kind)], cache)
            out = _run(["-m", "benchmarks.quantised", "--child", kind, *overrides], cache)
    return json.loads(out.splitlines()[-1])


def settings_of(kind: str) -> list[str]:
    weights, _, dtype = kind.partition("@")
    return [f"backbone.weights={weights}", *([f"backbone.dtype={dtype}"] if dtype else [])]


BEFORE = "before"
_READ = """
import sys
from fedweave.backbone import load
from fedweave.config import load_config
getattr(load, "load_prompts", load.load_backbone)(load_config("quickstart", sys.argv[1:]).backbone)
"""
_OTHER = """
import json, resource, sys, tempfile, time
from pathlib import Path
from fedweave.cli import main
with tempfile.TemporaryDirectory() as folder:
    sys.argv = ["fedweave", "run", "quickstart", *sys.argv[1:], f"output={folder}/run"]
    if main():
        raise SystemExit("the other checkout's run failed")
    summary = json.loads(Path(folder, "run/summary.json").read_text())
print()
print(json.dumps({
    "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    "seconds": round(summary["timing"]["total_s"], 1),
    "processor_s": round(time.process_time(), 1),
    "loss": round(summary["validation"]["best_loss"], 4),
}))
"""


def _run(arguments: list[str], cache: str, checkout: Path | None = None) -> str:
    """What a process prints, with this code or a checkout's."""
    environment = os.environ | {"FEDWEAVE_CACHE": cache}
    if checkout is not None:
        environment["PYTHONPATH"] = str(checkout.resolve() / "src")
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


if __name__ == "__main__":
    main()
