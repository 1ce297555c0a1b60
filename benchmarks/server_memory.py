"""Peak memory at 10, 100 and 1,000 clients, each in a process of its own.

    python -m benchmarks.server_memory [--clients 10 100 1000] [--output FILE]

Two measurements. ``server``: the real round loop (door, averages), fed with one message after another of clients
that cost nothing, as a server behind a network sees them; a message is over 1 MB, so that holding all would show.
``simulation``: a whole in-process run on a tiny model, from features to the test; the clients share a fixed amount
of data, because a simulation holds everybody's.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.figures import keep

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# glibc keeps freed memory for later, in pieces; what is measured here is what the server holds
_GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "1"}
ROUNDS, EXAMPLES = 2, 4000  # examples over all clients of the simulation


def server(clients: int) -> dict:
    """Aggregate ``ROUNDS`` rounds of messages that are made when they are asked for."""
    import torch

    from fedweave.config import from_tree
    from fedweave.console import Console
    from fedweave.federation.client import Distant
    from fedweave.federation.engines.base import Engine
    from fedweave.federation.hello import Shape
    from fedweave.federation.message import Message
    from fedweave.federation.rounds import federate
    from fedweave.federation.state import ServerState
    from fedweave.methods import build_method
    from fedweave.router.mlp import RouterLayout

    identity = {"backbone": "tiny", "tokenizer": "tiny"}

    class FarClients(Engine):
        """An engine whose clients answer with noise."""

        device = torch.device("cpu")

        def __init__(self) -> None:
            self.members = [Distant(i, f"client_{i}", [50, 50], [i % 2, 2 + i % 2]) for i in range(clients)]
            self.config, self.console, self.identity = config, Console(quiet=True), identity
            self.layers = {f"layer.{i}": Shape(512, 512) for i in range(16)}
            self.width, self.sent = 512, 0

        def replies(self, step, asked, question):
            for one in asked:
                generator = torch.Generator().manual_seed(1000 * question.facts["t"] + one.member.index)
                counts = [50.0 if m in one.member.assignment else 0.0 for m in range(4)]
                figures = {"counts": counts, "samples": 100, "losses": [1.0], "tokens": 1}
                parts = step.parts(one, figures)
                tensors = {
                    name: 1e-5 * torch.randn(part.shape, generator=generator) for name, part in parts.items()
                }
                message = Message(tensors, {"step": step.name, "t": question.facts["t"], **identity, **figures})
                self.sent += message.size
                yield one.member, message

        def restore(self, records, tensors) -> None: ...

    config = from_tree({"data": {"clients": clients}})
    engine = FarClients()
    layout = engine.layout(rank=8, experts=4)
    router = RouterLayout(512, 256, 4)
    state = ServerState(layout, router, layout.initial(0), router.initial(0)[None])
    before = _peak()
    method = build_method(config)
    accepted = 0

    def after_round(state, report) -> None:
        nonlocal accepted
        accepted += len(report.receipts.accepted)

    federate(method, engine, state, range(ROUNDS), after_round)
    assert accepted == ROUNDS * clients
    return {"peak_mb": _peak(), "before_rounds_mb": before, "received_mb": round(engine.sent / 1e6, 1)}


def simulation(clients: int) -> dict:
    """One whole run with a tiny random model."""
    from fedweave.config import load_config
    from fedweave.console import Console
    from fedweave.runs.run import start

    with tempfile.TemporaryDirectory() as scratch:
        model = tiny_model(Path(scratch) / "model")
        settings = [
            f"backbone.model={model}", "backbone.device=cpu", "backbone.max_length=128", f"data.clients={clients}",
            f"data.train={EXAMPLES // 4}", "data.validation=8", "data.test=8", "data.alpha=0.3", "experts.rank=4",
            "discovery.max_buckets=3", "discovery.restarts=1", "discovery.warmup_steps=2", "training.local_steps=2",
            f"training.rounds={ROUNDS}", "training.batch_size=4", "training.participation=1.0", "router.hidden=16",
            "router.warm_start.rounds=1", "router.warm_start.steps=2", "evaluation.scores=false",
        ]  # fmt: skip
        summary = start(load_config("quickstart", settings), Path(scratch) / "run", Console(quiet=True))
    assert summary is not None
    return {"peak_mb": _peak(), "prototypes": summary["buckets"], "experts": summary["experts"]}


@contextmanager
def with_a_model(overrides: Sequence[str], make: Callable[[Path], Path] | None = None) -> Iterator[list[str]]:
    """These overrides, and a tiny model, or one that ``make`` writes, where they name none."""
    with tempfile.TemporaryDirectory() as scratch:
        named = any(override.startswith("backbone.model=") for override in overrides)
        yield [*([] if named else [f"backbone.model={(make or tiny_model)(Path(scratch))}"]), *overrides]


def tiny_model(folder: Path) -> Path:
    """A two-layer Llama with random weights and a byte-level tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = {
        letter: i for i, letter in enumerate(["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    return save_random(fast, folder, width=32, heads=4)


def save_random(tokenizer: PreTrainedTokenizerFast, folder: Path, width: int, heads: int) -> Path:
    """A Llama of two layers with random weights, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
        num_attention_heads=heads, num_key_value_heads=heads // 2, max_position_embeddings=512,
        tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def _peak() -> float:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps({"server": server, "simulation": simulation}[args.child[0]](int(args.child[1]))))
        return
    results: dict[str, dict] = {}
    for kind in ("server", "simulation"):
        for clients in args.clients:
            started = time.monotonic()
            command = [sys.executable, "-m", "benchmarks.server_memory", "--child", kind, str(clients)]
            done = subprocess.run(command, capture_output=True, text=True, env=os.environ | _GIVE_BACK)
            if done.returncode:
                sys.exit(done.stderr)
            figures = json.loads(done.stdout.splitlines()[-1]) | {"seconds": round(time.monotonic() - started, 1)}
            results.setdefault(kind, {})[str(clients)] = figures
            print(f"{kind:10} {clients:5} clients: {figures}", flush=True)
        peaks = [results[kind][str(c)]["peak_mb"] for c in args.clients]
        results[kind]["ratio"] = round(peaks[-1] / peaks[0], 3)
        print(f"{kind:10} peak at {args.clients[-1]} over peak at {args.clients[0]}: {results[kind]['ratio']}")
    keep(results, args.output)


if __name__ == "__main__":
    main()
