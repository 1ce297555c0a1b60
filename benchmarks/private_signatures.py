"""What noise makes of alignment: the purity of experts over ε, client-level and example-level.

    python -m benchmarks.private_signatures [--examples 40,400] [--seeds 5] [--output FILE] [key=value …]

Clients of one kind each (``data.partition=pure``) have one bucket each and sign it; the server aligns what they
send. Purity is the share of examples whose kind is that of most in their expert, which many small experts reach by
chance; so is an ARI of about 0.2, since a client's examples stay together. ``alone`` spends the whole ε on
signatures, ``in a run`` what the rounds, starts and warm start of the quickstart leave them. Signatures are made
once by the clients' own code, without noise; noise of the budget's size is added here, so that many draws take no
longer than one. Without ``backbone.model=…`` the model is a tiny one with random weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from benchmarks.figures import keep
from benchmarks.server_memory import with_a_model
from fedweave.alignment.align import align, signature_distance
from fedweave.config import Config, load_config
from fedweave.console import Console
from fedweave.evaluation.audit import alignment_audit
from fedweave.federation.admission import Receipts
from fedweave.methods.fedweave import FedWeave
from fedweave.methods.preparation import discover_units
from fedweave.privacy.budget import Budget
from fedweave.runs.workspace import Workspace, prepare

EPSILONS = (0.5, 1, 2, 4, 8, 16, 64)
ALONE = ["training.rounds=0", "experts.start=zero", "router.warm_start.enabled=false"]
SETTINGS = [
    "data.partition=pure", "data.validation=1", "data.test=1", "discovery.max_buckets=1",
    "discovery.warmup_steps=10", "discovery.warmup_batch=8", "discovery.sketch=4",
]  # fmt: skip
DRAWS = 5  # of the noise, for every cell and seed


def signed(config: Config) -> tuple[Workspace, torch.Tensor]:
    """The clients and what each would send, [clients, D], if there were no noise."""
    workspace = prepare(config, Console(quiet=True)).build(Console(quiet=True))
    with mock.patch.object(Budget, "noise", lambda self, step, examples=0: 0.0):
        found = discover_units(workspace.engine, FedWeave(config).discover, Receipts())
    workspace.engine.detach()
    return workspace, torch.cat([told.signatures for told in found]).float()


def quality(workspace: Workspace, config: Config, signatures: torch.Tensor) -> dict[str, float]:
    """Purity and ARI of the experts that these signatures [clients, D] give, and how many there are."""
    engine = workspace.engine
    signer = FedWeave(config).discover.signer(engine.layout(config.experts.rank, 1))
    aligned = align(signature_distance(signer.blocks(list(signatures))), 8)
    experts = [[m] for m in aligned.labels.tolist()]
    audit = alignment_audit([c.buckets for c in engine.members], experts, workspace.client_labels)["global"]
    return {"purity": audit["purity"], "ari": audit["ari"], "experts": aligned.experts}


def curve(examples: int, clients: int, seeds: int, overrides: list[str]) -> list[dict]:
    """Rows of a table: how many examples a client has, level, ε, noise, and means over seeds and draws."""
    made: dict[tuple[str, str, float], list[dict[str, float]]] = {}
    noises: dict[tuple[str, str, float], float] = {}
    for seed in range(seeds):
        base = [*SETTINGS, f"data.clients={clients}", f"data.train={examples * clients // 4}", f"seed={seed}"]
        for level in ("none", "client", "example"):
            told = [*base, f"privacy.level={level}", *overrides]
            workspace, clean = signed(load_config("quickstart", told))
            generator = torch.Generator().manual_seed(seed)
            for epsilon in EPSILONS if level != "none" else [float("inf")]:
                for where, how in (("alone", ALONE), ("in a run", [])) if level != "none" else [("", [])]:
                    budget = [f"privacy.epsilon={epsilon}"] if level != "none" else []
                    config, key = load_config("quickstart", [*told, *how, *budget]), (level, where, epsilon)
                    noises[key] = Budget(config).noise("discover", examples) if level != "none" else 0.0
                    scale = noises[key] * config.privacy.clip / (examples if level == "example" else 1)
                    for _ in range(DRAWS if level != "none" else 1):
                        noised = clean + scale * torch.randn(clean.shape, generator=generator)
                        made.setdefault(key, []).append(quality(workspace, config, noised))
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
    parser.add_argument("--examples", default="40,400", help="examples of a client: the least size of a bucket")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    rows = []
    with with_a_model(args.overrides) as overrides:
        for examples in map(int, args.examples.split(",")):
            rows += curve(examples, args.clients, args.seeds, overrides)
    print("examples  level    spent     ε       noise    purity  ARI     experts")
    for row in rows:
        print(
            f"{row['examples']:>8}  {row['level']:<7}  {row['spent']:<8}  {row['epsilon']:<6g}  "
            f"{row['noise']:<7g}  {row['purity']:.3f}   {row['ari']:<6.3f}  {row['experts']:g}"
        )
    keep([row | {"epsilon": None} if row["level"] == "none" else row for row in rows], args.output)


if __name__ == "__main__":
    main()
