"""What a curious server can tell from the messages it gets: was this example among those that a client trained on?

    python -m benchmarks.leaks [--clients 5] [--examples 24] [--seeds 3] [--output FILE] [key=value …]

Membership inference on our own messages: the server knows the model that it sent, computes a candidate's gradient
there, and takes its cosine with what came back (an update goes against the gradients of what it was trained on).
Signatures are tested in their own space, by the sketch of a candidate's gradient where warmups start. The figure is
the area under the ROC curve over members of client 0 against rows of the same kinds that nobody has: 0.5 is chance,
and near-copies among the sample's rows keep it from 1. With secure aggregation the server has the sum over all
clients, and members are still those of client 0. Without ``backbone.model=…`` the model is a tiny one with random
weights.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from sklearn.metrics import roc_auc_score

from benchmarks.server_memory import with_a_model
from fedweave.backbone.features import compute_features
from fedweave.config import Config, load_config
from fedweave.console import Console
from fedweave.federation.message import Message
from fedweave.federation.state import broadcast
from fedweave.methods.fedweave import FedWeave
from fedweave.methods.prototypes import first_adapter
from fedweave.runs.workspace import Workspace, prepare
from fedweave.training.batch import ClientData, Lane
from fedweave.training.private import PrivateTrainer

BASE = [
    "data.alpha=100", "data.test=1", "discovery.max_buckets=1", "discovery.sketch=4", "alignment.max_experts=1",
    "router.warm_start.enabled=false", "training.rounds=1", "training.local_steps=1",
]  # fmt: skip
SWITCHES = {
    "nothing": [],
    "secure aggregation": ["federation.secure_aggregation=true"],
    "example, ε = 8": ["privacy.level=example", "privacy.epsilon=8"],
    "example, ε = 2": ["privacy.level=example", "privacy.epsilon=2"],
    "client, ε = 8": ["privacy.level=client", "privacy.epsilon=8"],
    "client, ε = 8, secure": ["privacy.level=client", "privacy.epsilon=8", "federation.secure_aggregation=true"],
}


def strangers(workspace: Workspace, count: int) -> ClientData:
    """Rows of the same kinds that no client has: the validation set."""
    held = workspace.validation
    chosen = np.random.default_rng(0).permutation(len(held.encoded))[:count]
    examples = [held.encoded[i] for i in chosen]
    return ClientData("nobody", examples, compute_features(workspace.backbone, [e.prompt for e in examples]))


def gradients(workspace: Workspace, config: Config, layout, theta: torch.Tensor, data: ClientData) -> torch.Tensor:
    """[n, P] of every example by itself, as anybody with the model can have them."""
    compute = workspace.engine.compute
    trainer = PrivateTrainer(workspace.backbone, compute.mixture(layout), None, config.training, 0.0, 0.0)
    gates = torch.ones(len(data), layout.experts) if layout.experts > 1 else None
    lane = Lane(data, [np.arange(len(data))], theta, None, ("leaks",), gates=gates)
    return torch.stack([g.clone() for g in trainer.gradients(lane)])


def auc(members: torch.Tensor, others: torch.Tensor, message: torch.Tensor) -> float:
    """Of the cosine with a message [D], which points where members do: rows are candidates."""
    candidates = torch.cat([members, others]).double()
    scores = torch.cosine_similarity(candidates, message[None].double(), dim=1).nan_to_num(0.0)
    return float(roc_auc_score([1] * len(members) + [0] * len(others), scores))


def measure(config: Config) -> dict[str, float]:
    workspace = prepare(config, Console(quiet=True)).build(Console(quiet=True))
    engine, method = workspace.engine, FedWeave(config)
    target = engine.members[0]
    outsiders = strangers(workspace, len(target.data))
    signer = method.discover.signer(engine.layout(config.experts.rank, 1))
    ((_, told), *_) = engine.ask(method.discover, engine.members[:1], Message())
    start = first_adapter(signer.layout, config.seed).to(workspace.backbone.device)
    engine.compute.detach()

    def signs(data: ClientData) -> torch.Tensor:
        return torch.stack([signer.of(g).float() for g in gradients(workspace, config, signer.layout, start, data)])

    sign = (
        1 if config.privacy.level == "example" else -1
    )  # a sum of gradients, or an adapter that went against them
    found = {"signature": auc(signs(target.data), signs(outsiders), sign * told.signatures[0].float())}
    engine.compute.detach()
    state = method.prepare(engine)
    asked = engine.members if config.federation.secure_aggregation else [target]
    ((_, update), *_) = engine.ask(method.train, asked, broadcast(state, 0))
    engine.compute.detach()
    own, rest = (gradients(workspace, config, state.layout, state.theta, d) for d in (target.data, outsiders))
    found["update"] = auc(own, rest, -update.delta_theta.cpu())
    engine.detach()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--examples", type=int, default=24, help="of every client, about")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    rows = []
    with with_a_model(args.overrides) as overrides:
        size = [f"data.clients={args.clients}", f"data.train={args.examples * args.clients // 4}"]
        fixed = [*BASE, *size, f"data.validation={args.examples}", f"training.batch_size={args.examples}"]
        fixed += overrides
        print(f"{'switch':<24} signature  update   (area under the ROC curve; 0.5 is chance)")
        for name, switch in SWITCHES.items():
            measured = [
                measure(load_config("quickstart", [*fixed, *switch, f"seed={seed}"])) for seed in range(args.seeds)
            ]
            row = {kind: round(float(np.mean([one[kind] for one in measured])), 3) for kind in measured[0]}
            rows.append({"switch": name, **row})
            print(f"{name:<24} {row['signature']:<9.3f}  {row['update']:.3f}")
    if args.output:
        args.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
