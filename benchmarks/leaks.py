"""What a curious server can tell from the messages it gets: was this example among those that a client trained on,
and which words did they hold?

    python -m benchmarks.leaks [--clients 5] [--examples 24] [--seeds 3] [--output FILE] [key=value …]
    python -m benchmarks.leaks --words …      # the second question alone (benchmarks/inversion.py)

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
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from sklearn.metrics import roc_auc_score

from benchmarks.figures import keep
from benchmarks.inversion import answering, candidates, first_inputs, in_the_span, recovered, wide_model
from benchmarks.server_memory import tiny_model, with_a_model
from fedweave.backbone.features import compute_features
from fedweave.config import Config, load_config
from fedweave.console import Console
from fedweave.federation.message import Message
from fedweave.federation.state import broadcast
from fedweave.methods.fedweave import FedWeave
from fedweave.methods.prototypes import first_adapter
from fedweave.runs.workspace import Workspace, prepare
from fedweave.streams import stream_key
from fedweave.training.batch import ClientData, Lane
from fedweave.training.private import PrivateTrainer
from fedweave.training.schedule import bucket_batches

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
# What a server may ask a client to do, where the client does not mind; a site's floors refuse the second.
HOSTILE = ["training.batch_size=1", "training.clip=1e-9", "experts.rank=64", "discovery.warmup_batch=1",
           "discovery.warmup_steps=2", "training.lr=1", "discovery.warmup_lr=1"]  # fmt: skip
QUESTIONS = {
    "ten steps": ["training.local_steps=10"],
    "a hostile server": HOSTILE,
    "a hostile server, within the floors": [*HOSTILE, "training.batch_size=2", "training.clip=0.001",
                                            "discovery.warmup_batch=2"],
}  # fmt: skip


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
    return torch.cat(list(trainer.gradients(lane)))


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


def words(config: Config) -> dict[str, float]:
    """How many of client 0's tokens can be told from each of its messages."""
    workspace = prepare(config, Console(quiet=True)).build(Console(quiet=True))
    engine, method = workspace.engine, FedWeave(config)
    target, first = engine.members[0], first_inputs(workspace.backbone)
    everybody = [e for client in engine.members for e in client.data.examples] + list(workspace.validation.encoded)
    signer = method.discover.signer(engine.layout(config.experts.rank, 1))
    start = first_adapter(signer.layout, config.seed)
    ((_, told), *_) = engine.ask(method.discover, engine.members[:1], Message())
    state = method.prepare(engine)
    assert method.start is not None
    asked = engine.members if config.federation.secure_aggregation else [target]
    ((_, begun), *_) = engine.ask(method.start, asked, Message(facts={"experts": state.layout.experts}))
    ((_, update), *_) = engine.ask(method.train, asked, broadcast(state, 0))
    engine.detach()

    def drawn(batches: Iterable[np.ndarray]) -> tuple[torch.Tensor, np.ndarray]:
        """The inputs of all candidates, and which of them were in these batches."""
        own = [target.data.examples[i] for i in dict.fromkeys(i for batch in batches for i in batch)]
        tokens, members = candidates(everybody, own)
        return first[tokens], members

    everything = [np.arange(len(target.data))]
    trained = method.lane(target, state, 0).schedule
    warm = bucket_batches(target.buckets[0], config.discovery.warmup_batch,
                          stream_key("warmup", config.seed, target.index, 0))  # fmt: skip
    warmed = list(islice(warm, config.discovery.warmup_steps)) if config.privacy.level == "none" else everything
    (signed_on, signed), (trained_on, own) = drawn(warmed), drawn(trained)
    adapter = torch.stack([row for _, row, _ in begun]).mean(0)
    found = {
        "signature": recovered(answering(signed_on, signer, start, told.signatures[0]), signed),
        "start": recovered(in_the_span(signed_on, signer.layout, adapter - start), signed),
        "update": recovered(in_the_span(trained_on, state.layout, update.delta_theta), own),
    }
    return {f"{kind} {figure}": x for kind, both in found.items() for figure, x in both.items()} | {
        "chance": float(own.mean()),
    }


def table(
    measure: Callable[[Config], dict[str, float]], switches: dict[str, list[str]], fixed: list[str], seeds: int
) -> list[dict]:
    """A row for every switch, of means over seeds; printed as it comes."""
    rows = []
    for name, switch in switches.items():
        measured = [measure(load_config("quickstart", [*fixed, *switch, f"seed={seed}"])) for seed in range(seeds)]
        row = {kind: round(float(np.mean([one[kind] for one in measured])), 3) for kind in measured[0]}
        rows.append({"switch": name, **row})
        print(f"{name:<36} " + "  ".join(f"{kind} {x:.3f}" for kind, x in row.items()), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--examples", type=int, default=24, help="of every client, about")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--words", action="store_true", help="which words, instead of which examples")
    parser.add_argument("--output", type=Path, help="a JSON file; what it has of the other question stays")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    with with_a_model(args.overrides, wide_model if args.words else tiny_model) as overrides:
        size = [f"data.clients={args.clients}", f"data.train={args.examples * args.clients // 4}"]
        fixed = [
            *BASE,
            *size,
            f"data.validation={args.examples}",
            f"training.batch_size={args.examples}",
            *overrides,
        ]
        if args.words:
            rows = table(words, SWITCHES | QUESTIONS, fixed, args.seeds)
        else:
            rows = table(measure, SWITCHES, fixed, args.seeds)
    if args.output:
        known = json.loads(args.output.read_text(encoding="utf-8")) if args.output.is_file() else {}
        known["words" if args.words else "members"] = rows
        keep(known, args.output)


if __name__ == "__main__":
    main()
