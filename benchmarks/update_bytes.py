"""Bytes of a round and of discovery, from shapes alone, as updates are packed.

    python -m benchmarks.update_bytes [--served 2] [--buckets 4] [--output FILE]

A client that serves ``served`` of four rank-8 experts and has ``buckets`` buckets.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from benchmarks.figures import keep
from fedweave.config import from_tree
from fedweave.console import table
from fedweave.discovery.signatures import Signatures
from fedweave.experts.layout import AdapterLayout
from fedweave.federation.message import encoded_specs
from fedweave.methods import build_method
from fedweave.router.mlp import RouterLayout

SHAPES = {"SmolLM2-135M": (30, 576, 192), "Llama-3.2-3B": (28, 3072, 1024)}  # layers, q_proj (also d), v_proj
EXPERTS, RANK, SKETCH = 4, 8, 64


def figures(layers: int, width: int, values: int, served: int, buckets: int) -> dict[str, int]:
    names = tuple(f"{i}.{p}" for i in range(layers) for p in ("q_proj", "v_proj"))
    layout = AdapterLayout(names, (width, width) * layers, (width, values) * layers, RANK, EXPERTS)
    router = RouterLayout(width, 512, EXPERTS)
    method = build_method(from_tree({}))
    single, rows = layout.with_experts(1).size, {}
    for dtype in ("float32", "bfloat16", "int8"):
        parts = [encoded_specs("part", size, dtype) for size in [single] * served + [router.size]]
        sent = [spec for specs in parts for spec in specs.values()]
        rows[f"round, up, {dtype}"] = sum(math.prod(shape) * kind.itemsize for shape, kind in sent)
    rows["round, down"] = method.train.broadcast_size(layout, router, t=1)
    for k, label in ((0, "whole"), (SKETCH, f"sketch {SKETCH}")):
        signer = Signatures(layout.with_experts(1), k, 0)
        rows[f"signatures, up, {label}"] = buckets * sum(signer.widths) * signer.dtype.itemsize
    rows["expert start, up"] = served * 4 * layout.with_experts(1).size
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--served", type=int, default=2)
    parser.add_argument("--buckets", type=int, default=4)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    results = {name: figures(*shape, args.served, args.buckets) for name, shape in SHAPES.items()}
    rows = [[what, *(f"{results[name][what]:,}" for name in SHAPES)] for what in next(iter(results.values()))]
    print(table(["bytes of one client", *SHAPES], rows))
    keep(results, args.output)


if __name__ == "__main__":
    main()
