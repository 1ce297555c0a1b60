"""Do answers repeat, and what does it cost? The untouched backbone answers the test prompts several times with each
way to attend while decoding.

    python -m benchmarks.repeats benchmark data.path=DATA --times 3

A recipe and overrides, as for ``fedweave run``. On a Hopper GPU torch's choice, cuDNN's kernel, does not repeat;
on a CPU all of them do.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedweave.backbone import packing
from fedweave.config import load_config
from fedweave.console import Console, table
from fedweave.inference.generate import generate
from fedweave.runs.workspace import prepare

Decode = Callable[..., torch.Tensor]
WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def unfolded(kernels: list[SDPBackend] | None) -> Decode:
    """Attention as one would write it first: grouped heads are left to torch, and so is the kernel unless named."""

    def decode(
        query: torch.Tensor,  # [rows, heads, 1, D]
        key: torch.Tensor,  # [rows, kv_heads, L, D]
        value: torch.Tensor,
        last: torch.Tensor,  # [rows]
        scaling: float | None,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        if window or softcap:
            raise SystemExit("this benchmark is for models without sliding windows and soft-caps.")
        seen = (last[:, None] >= torch.arange(key.shape[2], device=key.device))[:, None, None]  # [rows, 1, 1, L]
        with sdpa_kernel(kernels) if kernels else nullcontext():
            return F.scaled_dot_product_attention(query, key, value, seen, scale=scaling, enable_gqa=True)

    return decode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a recipe's name or a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96, help="longest answer")
    arguments = parser.parse_args()
    prepared = prepare(load_config(arguments.recipe, arguments.overrides), Console())
    prompts = [encoded.prompt for encoded in prepared.groups[-1][1]]  # the test set
    ways = {
        "FedWeave's": packing._decode,
        "torch's choice": unfolded(None),
        "without cuDNN": unfolded(WITHOUT_CUDNN),
    }
    rows = []
    for name, way in ways.items():
        packing._decode = way
        answers, seconds = [], []
        for _ in range(arguments.times):
            begin = time.perf_counter()
            answers.append(generate(prepared.backbone, prompts, arguments.tokens))
            seconds.append(time.perf_counter() - begin)
        differ = [sum(a != b for a, b in zip(answers[0], other, strict=True)) for other in answers[1:]]
        rows.append([name, ", ".join(map(str, differ)), ", ".join(f"{s:.1f}" for s in seconds)])
    print(f"{len(prompts)} prompts, {arguments.times} times each.\n")
    print(table(["attention", "answers unlike the first time's", "seconds"], rows))


if __name__ == "__main__":
    main()
