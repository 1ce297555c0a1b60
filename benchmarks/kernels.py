"""The kernels of experts and attention alone: how long each takes, and how near it is to what memory allows.

    python -m benchmarks.kernels --shapes 135m 3b             # as they are
    python -m benchmarks.kernels --shapes 135m 3b --try       # with other blocks, warps and stages too

One line a call of a training step (20 clients, M = 4 experts of rank 8, dropout and gates as in training); torch's
attention stands beside ours. The floor is the time to read every input and write every output once at the rate of a
large copy.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.figures import keep
from benchmarks.workload import DROPOUT, EXPERTS, RANK, SHAPES, Shape, make_clients, schedules
from fedweave.backbone import packing
from fedweave.kernels import attention, power_of_two, products
from fedweave.kernels.dropout import DropoutKeys
from fedweave.kernels.lanes import Lanes, Setting, Target
from fedweave.kernels.products import expand, expand_back, outer, reduce, reduce_back
from fedweave.kernels.source import Source

TRIED: dict[str, dict[str, tuple[int, ...]]] = {
    "reduce": {"COLUMNS": (64, 128), "num_warps": (4, 8), "num_stages": (3, 4)},
    "expand": {"COLUMNS": (64, 128), "num_warps": (2, 4, 8), "num_stages": (1,)},
    "outer": {"TOKENS": (64, 128), "COLUMNS": (32, 64), "num_warps": (4, 8), "num_stages": (3, 4)},
    "forward": {"STEP": (32, 64), "num_warps": (2, 4, 8), "num_stages": (1, 2, 3)},
    "dq": {"STEP": (32, 64), "num_warps": (2, 4, 8), "num_stages": (1, 2, 3)},
    "dkv": {"STEP": (16, 32, 64), "num_warps": (2, 4, 8), "num_stages": (1, 2, 3)},
}


class Step:
    """The experts' products of layers that read one input, n to each of ``widths``, on one step's tokens."""

    def __init__(self, n: int, widths: Sequence[int], lengths: list[int], device: torch.device):
        tokens, rows = sum(lengths), EXPERTS * RANK
        keys = DropoutKeys.of(DROPOUT, list(range(len(lengths))), lengths, tokens, device)
        self.setting = Setting(Lanes.of(lengths, tokens, device), keys, 2.0, RANK)
        starts = np.cumsum([0, *widths[:-1]]).tolist()
        self.targets = [
            Target(i, start, width) for i, (start, width) in enumerate(zip(starts, widths, strict=True))
        ]

        def number(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device, dtype=torch.bfloat16)

        self.x, self.y, self.u = number(tokens, n), number(tokens, sum(widths)), number(len(widths), tokens, rows)
        sizes = [rows * width for own in widths for width in (n, own)]
        parts = number(len(lengths), sum(sizes)).split(sizes, 1)
        self.factors = [part.unflatten(1, (rows, -1)) for part in parts]
        self.gates = torch.rand(tokens, EXPERTS, device=device).softmax(-1)
        self.dx = torch.empty_like(self.x)

    def products(self) -> Iterator[tuple[str, str, Callable[[], Any], int]]:
        """(kernel, what it computes, call, bytes that it must move)."""
        s, targets, x, y, u, gates = self.setting, self.targets, self.x, self.y, self.u, self.gates
        a, b, gu, dx = self.factors[::2], self.factors[1::2], u.clone(), self.dx
        to_x, to_y, of_u = (sum(2 * t.numel() for t in parts) for parts in ((x, *a), (y, *b), (u,)))

        def factors() -> Any:
            return outer(u, Source.plain(x), gu, y, self.factors, [None] * len(self.factors), targets, s)

        yield "reduce", "u = dropout(x) Aᵀ", lambda: reduce(x, a, targets, s, gates), to_x + 2 * of_u
        yield "expand", "y += g ⊙ u B", lambda: expand(y, gu, b, targets, s), to_y + of_u + 2 * y.numel()
        yield "reduce", "du = g ⊙ dy Bᵀ", lambda: reduce_back(y, b, u, targets, s, gates, True), to_y + 2 * of_u
        yield "outer", "duᵀ dropout(x), guᵀ dy", factors, to_x + to_y + 2 * of_u
        yield (
            "expand",
            "dx += dropout(du A)",
            lambda: expand_back(dx, u, a, targets, s, True),
            (to_x + of_u + 2 * x.numel()),
        )


class Attending:
    """Attention of one layer within one step's sequences."""

    def __init__(self, size: Shape, rows: list[np.ndarray], device: torch.device):
        self.packed = packing.pack([rows], device)
        assert self.packed.tiles is not None
        angle = torch.rand(self.packed.tokens, size.head_width // 2, device=device) * 6
        turn = tuple(torch.cat([f(angle)] * 2, 1).bfloat16() for f in (torch.cos, torch.sin))
        self.launch = attention.Launch(self.packed.tiles, size.head_width**-0.5, None, (turn[0], turn[1]))
        heads = size.heads, size.kv_heads, size.kv_heads
        joint = torch.randn(self.packed.tokens, sum(heads), size.head_width, device=device, dtype=torch.bfloat16)
        self.parts, self.slopes = joint.split(heads, 1), torch.empty_like(joint).split(heads, 1)
        self.do = torch.randn_like(self.parts[0])

    def products(self) -> Iterator[tuple[str, str, Callable[[], Any], int]]:
        """As ``Step.products``; under no kernel's name where nothing can be tried."""
        (q, k, v), do, launch, slopes = self.parts, self.do, self.launch, self.slopes
        wide, narrow, sums = q.numel() * 2, k.numel() * 2, q.shape[0] * q.shape[1] * 4
        out, lse = launch.forward(q, k, v)
        delta = launch.dq((q, k, v), out, lse, do, slopes[0])

        def back() -> None:
            launch.dkv((q, k, v), lse, delta, do, slopes[1], slopes[2])

        yield "", "keys rotate", lambda: launch.turn_keys(k), 2 * narrow
        yield "forward", "attention", lambda: launch.forward(q, k, v), 3 * wide + 2 * narrow + sums
        yield (
            "dq",
            "attention dq",
            lambda: launch.dq((q, k, v), out, lse, do, slopes[0]),
            (4 * wide + 2 * narrow + 2 * sums),
        )
        yield "dkv", "attention dk, dv", back, 2 * wide + 4 * narrow + 2 * sums
        leaves = [x.contiguous().requires_grad_() for x in (q, k, v)]
        elsewhere = replace(self.packed, tiles=None)

        def flash() -> torch.Tensor:
            return packing.attend(leaves[0], leaves[1], leaves[2], elsewhere, None, None)

        answer = flash()

        def flash_back() -> Any:
            return torch.autograd.grad(answer, leaves, do, retain_graph=True)

        yield "", "flash attention", flash, 2 * wide + 2 * narrow + sums
        yield "", "flash dq, dk, dv", flash_back, 4 * wide + 4 * narrow


def copy_rate(device: torch.device) -> float:
    """Bytes a second that a large copy reads and writes."""
    from triton.testing import do_bench

    source = torch.empty(2**30, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / (do_bench(lambda: target.copy_(source), return_mode="median") / 1e3)


def measure(shape: str, device: torch.device, rate: float, others: bool) -> list[dict]:
    size = SHAPES[shape]
    clients = make_clients(size, 20, 80)
    plan = schedules(clients, 1, 8)
    rows = [[c.examples[i].ids for i in p[0]] for c, p in zip(clients, plan, strict=True)]
    lengths = [sum(map(len, lane)) for lane in rows]
    found = []
    q, v = size.heads * size.head_width, size.kv_heads * size.head_width
    for name, widths in (("q and v", [q, v]), ("gate and up", [size.inner] * 2), ("down", [size.width])):
        step = Step(size.inner if name == "down" else size.width, widths, lengths, device)
        for kernel, what, call, moved in step.products():
            blocks = products.BLOCKS
            found += trials(f"{shape} {name}", what, call, moved / rate, blocks, kernel, others and kernel)
    wide = max(64, power_of_two(size.head_width))
    for kernel, what, call, moved in Attending(size, [r for lane in rows for r in lane], device).products():
        found += trials(shape, what, call, moved / rate, attention.BLOCKS.get(kernel, {}), wide, others and kernel)
    return found


def trials(
    shape: str, what: str, call: Callable[[], Any], floor: float, blocks: dict, key: Any, kernel: str | bool
) -> list[dict]:
    """A call as it is, and where ``kernel`` says so with other ``blocks[key]``."""
    from triton.testing import do_bench

    usual, found = blocks.get(key, {}), []
    axes = TRIED[kernel] if isinstance(kernel, str) and kernel else {}
    grid = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())] if axes else []
    for config in [usual, *(c for c in grid if c != usual)]:
        try:
            if usual:
                blocks[key] = config
            us = 1e3 * do_bench(call, warmup=5, rep=20, return_mode="median")
        except Exception as error:  # a block that does not fit into this GPU is no candidate
            print(f"  {shape} {what} {config}: {type(error).__name__}", flush=True)
            continue
        finally:
            if usual:
                blocks[key] = usual
        found.append({"shape": shape, "call": what, **config, "us": us, "floor_us": 1e6 * floor})
        print(f"  {shape:16s} {what:22s} {us:7.1f} µs, floor {1e6 * floor:5.1f}  {config}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["135m"])
    parser.add_argument("--try", dest="others", action="store_true", help="other blocks, warps and stages too")
    parser.add_argument("--output", type=Path, help="a JSON file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("these kernels run on a CUDA device only.")
    device = torch.device("cuda")
    rate = copy_rate(device)
    print(f"{torch.cuda.get_device_name()}: a copy moves {rate / 1e12:.2f} TB/s")
    found = [row for shape in options.shapes for row in measure(shape, device, rate, options.others)]
    keep({"copy_bytes_per_second": rate, "calls": found}, options.output)


if __name__ == "__main__":
    main()
