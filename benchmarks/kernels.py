"""The experts' kernels alone: how long each takes, and how near it is to what memory allows.

    python -m benchmarks.kernels --shapes 135m 3b             # as they are
    python -m benchmarks.kernels --shapes 135m 3b --try       # with other blocks, warps and stages too

One line a product of a training step (20 clients, M = 4 experts of rank 8, dropout and gates as in training). The
floor is the time to read every input and write every output once at the rate of a large copy.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.ladder import DROPOUT, EXPERTS, RANK
from benchmarks.workload import SHAPES, make_clients, schedules
from fedweave.experts.dropout import DropoutKeys
from fedweave.kernels import triton_products
from fedweave.kernels.lanes import Lanes, Setting
from fedweave.kernels.products import expand, outer, reduce, reduce_back

TRIED: dict[str, dict[str, tuple[int, ...]]] = {
    "reduce": {"COLUMNS": (64, 128), "num_warps": (4, 8), "num_stages": (3, 4)},
    "expand": {"COLUMNS": (64, 128), "num_warps": (2, 4, 8), "num_stages": (1,)},
    "outer": {"TOKENS": (64, 128), "COLUMNS": (32, 64), "num_warps": (4, 8), "num_stages": (3, 4)},
}


class Step:
    """The experts' products of one adapted layer, n to ``width``, on one step's tokens."""

    def __init__(self, n: int, width: int, lengths: list[int], device: torch.device):
        tokens, rows = sum(lengths), EXPERTS * RANK
        keys = DropoutKeys.of(DROPOUT, list(range(len(lengths))), lengths, tokens, device)
        self.setting = Setting(Lanes.of(lengths, tokens, device), keys, 2.0, RANK)

        def number(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device, dtype=torch.bfloat16)

        self.x, self.y, self.u = number(tokens, n), number(tokens, width), number(tokens, rows)
        self.a, self.b = number(len(lengths), rows, n), number(len(lengths), rows, width)
        self.gates = torch.rand(tokens, EXPERTS, device=device).softmax(-1)
        self.dgates = torch.zeros_like(self.gates)
        self.dx = torch.empty_like(self.x)

    def products(self) -> Iterator[tuple[str, str, Callable[[], Any], int]]:
        """(kernel, what it computes, call, bytes that it must move)."""
        s, x, y, u, a, b = self.setting, self.x, self.y, self.u, self.a, self.b
        size = {
            name: t.numel() * t.element_size() for name, t in (("x", x), ("y", y), ("u", u), ("a", a), ("b", b))
        }
        yield "reduce", "u = dropout(x) Aᵀ", lambda: reduce(x, a, s, 0), size["x"] + size["a"] + size["u"]
        yield (
            "expand",
            "y += (g ⊙ u) B",
            lambda: expand(y, u, b, s, self.gates, 2.0),
            (2 * size["y"] + size["b"] + size["u"]),
        )
        yield (
            "reduce",
            "du = g ⊙ dy Bᵀ",
            lambda: reduce_back(y, b, u, s, self.gates, self.dgates),
            (size["y"] + size["b"] + 2 * size["u"]),
        )
        yield (
            "outer",
            "dA = duᵀ dropout(x)",
            lambda: outer(u, x, a, s, None, 0, 1.0),
            size["x"] + size["a"] + size["u"],
        )
        yield (
            "outer",
            "dB = (g ⊙ u)ᵀ dy",
            lambda: outer(u, y, b, s, self.gates, None, 2.0),
            (size["y"] + size["b"] + size["u"]),
        )
        yield (
            "expand",
            "dx = dropout(du A)",
            lambda: expand(self.dx, u, a, s, None, 1.0, 0, False),
            (size["x"] + size["a"] + size["u"]),
        )


def copy_rate(device: torch.device) -> float:
    """Bytes a second that a large copy reads and writes."""
    from triton.testing import do_bench

    source = torch.empty(2**30, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / (do_bench(lambda: target.copy_(source), return_mode="median") / 1e3)


def measure(shape: str, device: torch.device, rate: float, configs: dict[str, list[dict[str, int]]]) -> list[dict]:
    from triton.testing import do_bench

    size = SHAPES[shape]
    clients = make_clients(size, 20, 80)
    plan = schedules(clients, 1, 8)
    lengths = [sum(len(c.examples[i].ids) for i in p[0]) for c, p in zip(clients, plan, strict=True)]
    found = []
    for width in (size.heads * size.head_width, size.kv_heads * size.head_width):  # q_proj and v_proj
        for kernel, what, call, moved in Step(size.width, width, lengths, device).products():
            usual = triton_products.BLOCKS[kernel]
            for config in configs[kernel]:
                triton_products.BLOCKS[kernel] = config
                try:
                    spent = do_bench(call, warmup=5, rep=20, return_mode="median") / 1e3
                except Exception as error:  # a block that does not fit into this GPU is no candidate
                    print(f"  {what} {config}: {type(error).__name__}", flush=True)
                    continue
                finally:
                    triton_products.BLOCKS[kernel] = usual
                row = {"shape": shape, "width": width, "kernel": kernel, "product": what, **config,
                       "us": 1e6 * spent, "floor_us": 1e6 * moved / rate, "usual": config == usual}  # fmt: skip
                found.append(row)
                mark = " (usual)" if row["usual"] else ""
                print(f"  {shape} → {width:5d} {what:22s} {row['us']:7.1f} µs, floor {row['floor_us']:5.1f}"
                      f"  {config}{mark}", flush=True)  # fmt: skip
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
    configs = {kernel: [usual] for kernel, usual in triton_products.BLOCKS.items()}
    if options.others:
        for kernel, axes in TRIED.items():
            grid = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
            configs[kernel] += [config for config in grid if config not in configs[kernel]]
    rate = copy_rate(device)
    print(f"{torch.cuda.get_device_name()}: a copy moves {rate / 1e12:.2f} TB/s")
    found = [row for shape in options.shapes for row in measure(shape, device, rate, configs)]
    if options.output:
        options.output.write_text(json.dumps({"copy_bytes_per_second": rate, "products": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
