"""The ladders: training from a PEFT loop to packed lockstep, and decoding with experts, in one run on one machine.

    python -m benchmarks.ladder                                    # about two minutes on a CPU
    python -m benchmarks.ladder --shapes 135m 0.5b 3b 8b --sweep   # the published figures (H200)
    python -m benchmarks.ladder --shapes 8b --fastest              # the last rungs and decoding alone
    python -m benchmarks.ladder --shapes 135m 3b --only decoding   # decoding alone
    python -m benchmarks.ladder --shapes 135m 3b --fastest --only 'recorded|8 bits|every linear layer(, kernels|$)'

One round is 20 clients × 10 steps × batch 8 with M = 4 experts of rank 8 (on a CPU: 2 × 1 × 4). The PEFT loops are
timed on a few clients and scaled to all: clients come one after another there, so time is proportional. The last
rungs are the fastest one with products in 8 bits, with less memory (layers that run twice, weights that stay in 4
bits) and with experts on every linear layer; on a GPU three of them once more with kernels apart that have become
one: experts of layers that read one input, rotary positions and attention, rounding to 8 bits and what comes before
it. There memory stands beside what ``fedweave budget`` predicts.
Decoding is measured with these experts, and with 32 on every linear layer.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

import fedweave
from benchmarks import peft_loops
from benchmarks.clock import once, peak_gib, reset_peak, seconds
from benchmarks.decoding import Contest, measure
from benchmarks.figures import keep
from benchmarks.memory import predicted_gib
from benchmarks.workload import (
    ALPHA,
    EVERY,
    EXPERTS,
    MANY,
    RANK,
    SHAPES,
    TARGETS,
    backbone_of,
    filled_up,
    in_four_bits,
    make_clients,
    make_training,
    matmul_rate,
    random_model,
    real_tokens,
    schedules,
)
from fedweave.backbone import packing
from fedweave.backbone.load import Backbone
from fedweave.experts.layout import AdapterLayout
from fedweave.kernels import experts as expert_kernels
from fedweave.kernels import fp8 as fp8_kernels
from fedweave.training.batch import ClientData, Lane


@contextmanager
def kernels_apart() -> Iterator[None]:
    """In here every layer's experts are launched for themselves, rotary positions and rounding are passes of their
    own."""
    before = expert_kernels.TOGETHER, packing.JOINT, fp8_kernels.WITHIN
    expert_kernels.TOGETHER, packing.JOINT, fp8_kernels.WITHIN = 1, False, False
    try:
        yield
    finally:
        expert_kernels.TOGETHER, packing.JOINT, fp8_kernels.WITHIN = before


class Bench:
    """One shape on one device, and everything that is measured of it."""

    def __init__(
        self, shape: str, device: torch.device, options: argparse.Namespace, save: Callable[[dict[str, Any]], None]
    ):
        self.shape, self.device, self.options, self.save = SHAPES[shape], device, options, save
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.gpu = device.type == "cuda"  # a CPU has nothing to warm up, and no time for it
        self.rows: list[dict[str, Any]] = []
        self.rate = matmul_rate(device, self.dtype)
        self.parameters = sum(p.numel() for p in self.model().parameters())

    def wanted(self, name: str) -> bool:
        return re.search(self.options.only, name) is not None

    def model(self, four_bits: bool = False) -> Any:
        gc.collect()
        reset_peak(self.device)
        model = random_model(self.shape, self.device, self.dtype)
        if four_bits:
            model = in_four_bits(model)
            gc.collect()
            reset_peak(self.device)
        return model

    def record(self, name: str, tokens: int, measure: Callable[[], float], more: dict[str, Any]) -> None:
        """Add a rung; one that does not fit or cannot run says so instead of ending the benchmark."""
        if not self.wanted(name):
            return
        row: dict[str, Any] = {"name": name}
        try:
            spent = measure()
            # forward and the gradient of activations: 2 · 2 · N FLOP a token; the weights are frozen
            row |= {
                "seconds": spent,
                "tokens_per_second": tokens / spent,
                "matmul_fraction": 4 * self.parameters * tokens / spent / self.rate,
                "peak_gib": peak_gib(self.device),
            }
        except torch.OutOfMemoryError:
            row["failed"] = "out of memory"
        except ImportError as error:
            row["failed"] = f"needs {error.name}"
        self.rows.append(row | more)
        self.save({"rungs": self.rows})  # a crash or a time limit loses this one at most
        shown = (
            f"{row['seconds']:8.3f} s {row['tokens_per_second']:10,.0f} tok/s"
            if "seconds" in row
            else row["failed"]
        )
        peak = f" {row['peak_gib']:6.1f} GiB" if row.get("peak_gib") else ""
        peak += f", predicted {more['predicted_gib']:.1f}" if "predicted_gib" in more else ""
        print(f"  {name:58s} {shown}{peak}", flush=True)

    # ------------------------------------------------------------------------------ rungs

    def reference(self, name: str, loop: Callable, clients: list[ClientData], plan: list) -> None:
        """A PEFT loop, timed on a few clients."""
        few = min(self.options.reference_clients, len(clients))

        def measure() -> float:
            if self.gpu:  # libraries settle: a whole client's shapes
                loop(self.model(), clients[:1], plan[:1], self.device)()
            spent = once(loop(self.model(), clients[:few], plan[:few], self.device), self.device)
            return spent * len(clients) / few

        self.record(name, real_tokens(clients, plan), measure, {"clients_timed": few})

    def ours(
        self,
        name: str,
        clients: list[ClientData],
        plan: list,
        tokens: int,
        together: int | None = None,
        fused: bool = False,
        graphs: bool = False,
        second_forward: bool = False,
        timed: int | None = None,
        targets: Sequence[str] = TARGETS,
        checkpointing: Literal["on", "off"] = "off",
        four_bits: bool = False,
        fp8: Literal["off", "forward", "both"] = "off",
        apart: bool = False,
    ) -> None:
        """FedWeave's trainer with some of its means switched off."""
        few = min(timed or len(clients), len(clients))
        more: dict[str, Any] = {"clients_timed": few} if few < len(clients) else {}

        def measure() -> float:
            backbone = backbone_of(self.model(four_bits), fused)
            trainer, lanes = make_training(
                backbone, clients[:few], plan[:few], graphs, targets, checkpointing, fp8=fp8
            )
            if self.gpu:
                more["predicted_gib"] = predicted_gib(trainer, lanes[: together or few])

            def round_() -> None:
                if second_forward:
                    for lane in lanes:
                        self._features(backbone, lane)
                for _ in trainer.train(lanes, together or len(lanes)):
                    pass

            repeats = 1 if few < len(clients) or not self.gpu else 3
            spent = seconds(round_, self.device, repeats, warm=int(self.gpu))
            trainer.mixture.detach()
            trainer.release()
            return spent * len(clients) / few

        with kernels_apart() if apart else nullcontext():
            self.record(name, tokens, measure, more)

    @staticmethod
    @torch.no_grad()
    def _features(backbone: Any, lane: Lane) -> None:
        """What a step costs where the router's input is computed anew: the whole sequence, adapters off."""
        from fedweave.backbone.packing import pack

        for step in lane.schedule:
            backbone.hidden(pack([[lane.data.examples[i].ids for i in step]], backbone.device))

    def ladder(self) -> dict[str, Any]:
        o = self.options
        clients = make_clients(self.shape, o.clients, 80)
        plan = schedules(clients, o.steps, o.batch)
        tokens = real_tokens(clients, plan)
        if not o.fastest:
            self.slower(clients, plan, tokens)
        best = partial(self.ours, clients=clients, plan=plan, tokens=tokens, fused=True, graphs=self.gpu)
        best("+ recorded steps, where they pay" if self.gpu else "+ fused operations")
        if self.gpu:
            best("+ recorded steps, where they pay, kernels apart", apart=True)
            best("the same, forward products in 8 bits", fp8="forward")
            best("the same, all products with frozen weights in 8 bits", fp8="both")
            best("the same, all products with frozen weights in 8 bits, kernels apart", fp8="both", apart=True)
        best("the same, layers run twice", checkpointing="on")
        best("the same, 4-bit weights", four_bits=True)
        best("the same, 4-bit weights, layers run twice", four_bits=True, checkpointing="on")
        best("the same, experts on every linear layer", targets=EVERY)
        if self.gpu:
            best("the same, experts on every linear layer, kernels apart", targets=EVERY, apart=True)
        best("the same, experts on every linear layer, layers run twice", targets=EVERY, checkpointing="on")
        base = next((r["seconds"] for r in self.rows if r["name"].startswith("PEFT soft") and "seconds" in r), None)
        for row in self.rows:
            if base and "seconds" in row:
                row["speedup"] = base / row["seconds"]
        return {
            "clients": o.clients, "steps": o.steps, "batch": o.batch, "tokens": tokens,
            "parameters": self.parameters, "matmul_tflops": self.rate / 1e12, "rungs": self.rows,
        }  # fmt: skip

    def slower(self, clients: list[ClientData], plan: list, tokens: int) -> None:
        """The rungs below the fastest."""
        if few := self.options.reference_clients:
            self.reference("PEFT, one LoRA, clients one after another", peft_loops.one_lora, clients, plan)
            self.reference("PEFT soft mixture, gate hooks, second forward", peft_loops.soft_mixture, clients, plan)
            self.ours("stacked experts, one client at a time, second forward", clients, plan, tokens, 1, timed=few,
                      second_forward=True)  # fmt: skip
            self.ours("+ cached features", clients, plan, tokens, 1, timed=few)
        grown, order = filled_up(clients, plan)
        self.ours("+ lockstep, padded to the longest", grown, order, tokens)
        self.ours("+ packed", clients, plan, tokens)
        if self.gpu:
            self.ours("+ fused operations", clients, plan, tokens, fused=True)

    def decoding(self) -> list[dict[str, Any]]:
        """What one expert and all experts cost while decoding: few on two layers, and many on every linear one."""
        if not self.wanted("decoding"):
            return []
        backbone = backbone_of(self.model(), True)
        few, many = self._decoding(backbone, TARGETS, EXPERTS), self._decoding(backbone, EVERY, MANY)
        return [*few, *many]

    def _decoding(self, backbone: Backbone, targets: Sequence[str], experts: int) -> Iterator[dict[str, Any]]:
        """For batches of some sizes."""
        layout = AdapterLayout.of(backbone.linear_layers(targets), RANK, experts)
        theta, steps = layout.initial(0).to(self.device), 100 if self.gpu else 20
        for rows in (1, 8, 32) if self.gpu else (1, 8):
            prompts = [client.examples[0].prompt for client in make_clients(self.shape, rows, 1)]
            found = measure(Contest(backbone, layout, ALPHA, theta, prompts, steps), rows, steps)
            what, bare = f"{experts:2d} experts on {', '.join(targets)}", found["wall_ms"]["bare"]
            ratio = found["wall_ratio"]
            print(f"  decoding, {what}, {rows:2d} rows: bare {bare:.2f} ms a step, one expert {ratio['sparse']:.3f}"
                  f" ×, all {ratio['soft']:.3f} ×", flush=True)  # fmt: skip
            yield {"experts": experts, "targets": list(targets), **found}

    def sweep(self) -> list[dict[str, Any]]:
        """Seconds a round over the number of clients, and over the tokens of each."""
        o, self.rows, self.save = self.options, [], lambda more: None
        for count in (5, 10, 20, 40):
            self._point(f"{count} clients", count, o.batch)
        for batch in (4, 16, 32):
            self._point(f"batch {batch}", o.clients, batch)
        return self.rows

    def _point(self, name: str, count: int, batch: int) -> None:
        clients = make_clients(self.shape, count, 80)
        plan = schedules(clients, self.options.steps, batch)
        tokens = real_tokens(clients, plan)
        self.ours(name, clients, plan, tokens, fused=True, graphs=self.gpu)
        self.rows[-1] |= {"clients": count, "batch": batch, "tokens": tokens}


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["135m"])
    parser.add_argument("--clients", type=int, default=20 if gpu else 2)
    parser.add_argument("--steps", type=int, default=10 if gpu else 1)
    parser.add_argument("--batch", type=int, default=8 if gpu else 4)
    parser.add_argument(
        "--reference-clients", type=int, default=2, help="how many PEFT loops are timed on; 0: none"
    )
    parser.add_argument("--fastest", action="store_true", help="leave the slower rungs out")
    parser.add_argument("--only", default="", metavar="PATTERN", help="rungs whose name has this, and no other")
    parser.add_argument("--sweep", action="store_true", help="also vary clients and tokens")
    parser.add_argument("--output", type=Path, help="a JSON file; other shapes in it stay")
    options = parser.parse_args()
    device = torch.device("cuda" if gpu else "cpu")
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads",
        "versions": {
            "fedweave": fedweave.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "shapes": {},
    }
    if options.output and options.output.is_file():  # shapes measured before, if on the same machine and versions
        before = json.loads(options.output.read_text(encoding="utf-8"))
        if {**before, "shapes": {}} == result:
            result = before
    for shape in options.shapes:
        print(f"{shape} on {result['device']}: {options.clients} clients × {options.steps} steps × {options.batch}")
        found: dict[str, Any] = {}

        def save(more: dict[str, Any], found: dict[str, Any] = found, shape: str = shape) -> None:
            result["shapes"][shape] = found | more
            keep(result, options.output)

        bench = Bench(shape, device, options, save)
        found |= bench.ladder()
        found |= {"decoding": bench.decoding()}
        if options.sweep:
            found |= {"sweep": bench.sweep()}
        save({})


if __name__ == "__main__":
    main()
