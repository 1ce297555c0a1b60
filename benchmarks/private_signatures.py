"""What noise makes of alignment: the purity of experts over ε, client-level and example-level.

    python -m benchmarks.private_signatures [--examples 40,200] [--seeds 3] [--output FILE] [key=value …]

Clients of one kind each (``data.partition=pure``) form one bucket each and sign it; the server aligns what leaves
the exit. Purity is the share of examples whose kind is that of most in their expert, which many small experts reach
by chance; ARI is 0 by chance. ``alone`` spends the whole ε on signatures; ``in a run`` is what the recipe's rounds,
starts and warm start leave them. Without ``backbone.model=…`` on a tiny model with random weights.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.server_memory import tiny_model
from fedweave.alignment.align import align, signature_distance
from fedweave.config import Config, load_config
from fedweave.console import Console
from fedweave.evaluation.audit import alignment_audit
from fedweave.federation.admission import Receipts
from fedweave.methods.fedweave import FedWeave
from fedweave.methods.preparation import assign, discover_units, signature_blocks
from fedweave.privacy.budget import Budget
from fedweave.runs.workspace import Workspace, prepare

EPSILONS = (0.5, 1, 2, 4, 8, 16, 64)
ALONE = ["training.rounds=0", "experts.start=zero", "router.warm_start.enabled=false"]
SETTINGS = [
    "data.partition=pure", "data.validation=1", "data.test=1", "discovery.max_buckets=1",
    "discovery.warmup_steps=10", "discovery.warmup_batch=8",
]  # fmt: skip


def quality(config: Config, workspace: Workspace) -> dict[str, float]:
    """Purity and ARI of experts, and how many there are, of one discovery."""
    engine, method = workspace.engine, FedWeave(config)
    engine.config = engine.compute.config = config
    engine.exit.__init__(config, engine.identity, False)  # type: ignore[misc]
    engine.compute.detach()
    found = discover_units(engine, method.discover, Receipts())
    aligned = align(signature_distance(signature_blocks(engine, method.discover, found)), 8)
    assign(engine.members, found, aligned.experts, aligned.labels.tolist())
    buckets, experts = [c.buckets for c in engine.members], [c.assignment for c in engine.members]
    audit = alignment_audit(buckets, experts, workspace.client_labels)["global"]
    return {"purity": audit["purity"], "ari": audit["ari"], "experts": aligned.experts}


def curve(examples: int, clients: int, seeds: int, overrides: list[str]) -> list[dict]:
    """Rows of a table: how many examples a client has, level, ε, noise, purity and experts over seeds."""
    made: dict[tuple, list[dict[str, float]]] = {}
    noises: dict[tuple, float] = {}
    for seed in range(seeds):
        base = [*SETTINGS, f"data.clients={clients}", f"data.train={examples * clients // 4}", f"seed={seed}"]
        workspace = prepare(load_config("quickstart", [*base, *overrides]), Console(quiet=True)).build(
            Console(quiet=True)
        )
        cells = [("none", "", float("inf"), ["discovery.sketch=4"])]
        for epsilon in EPSILONS:
            for where, how in (("alone", ALONE), ("in a run", [])):
                cells += [
                    (level, where, epsilon, [*how, f"privacy.level={level}", f"privacy.epsilon={epsilon}", sketch])
                    for level, sketch in (("client", "discovery.sketch=4"), ("example", "discovery.sketch=0"))
                ]
        for level, where, epsilon, how in cells:
            config = load_config("quickstart", [*base, *how, *overrides])
            key = (level, where, epsilon)
            made.setdefault(key, []).append(quality(config, workspace))
            noises[key] = 0.0 if level == "none" else Budget(config).noise("discover", examples)
    return [
        {
            "examples": examples, "level": level, "spent": where, "epsilon": epsilon,
            "noise": round(noises[level, where, epsilon], 2),
            **{name: round(float(np.mean([one[name] for one in found])), 3) for name in found[0]},
        }
        for (level, where, epsilon), found in made.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", default="40,200", help="examples of a client, the least size of a bucket")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        model = [] if any(o.startswith("backbone.model=") for o in args.overrides) else [tiny_model(Path(scratch))]
        overrides = [*(f"backbone.model={folder}" for folder in model), *args.overrides]
        for examples in map(int, args.examples.split(",")):
            rows += curve(examples, args.clients, args.seeds, overrides)
    print("examples  level    spent     ε       noise    purity  ARI     experts")
    for row in rows:
        print(
            f"{row['examples']:>8}  {row['level']:<7}  {row['spent']:<8}  {row['epsilon']:<6g}  "
            f"{row['noise']:<7g}  {row['purity']:.3f}   {row['ari']:<6.3f}  {row['experts']:g}"
        )
    if args.output:
        args.output.write_text(json.dumps(rows, indent=1).replace("Infinity", "null") + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
