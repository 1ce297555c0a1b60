"""What sketching signatures costs and saves.

    python -m benchmarks.signature_sketches scale [--prototypes 10000] [--output FILE]
    python -m benchmarks.signature_sketches quality --data DATA [--output FILE] [key=value …]

``scale`` times the alignment of many prototypes with the block shapes of SmolLM2-135M; signatures are noise around
six directions. ``quality`` runs discovery with the real model on the paper's tasks and aligns the same warmup
adapters whole and sketched: M, agreement with the whole signatures, purity against the task labels.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import numpy as np
import torch
from sklearn.metrics import adjusted_rand_score

from benchmarks.figures import keep
from fedweave.alignment.align import align, signature_distance
from fedweave.config import load_config
from fedweave.console import Console
from fedweave.discovery.signatures import Signatures
from fedweave.evaluation.audit import alignment_audit
from fedweave.experts.layout import AdapterLayout
from fedweave.federation.message import Message
from fedweave.methods.fedweave import FedWeave
from fedweave.runs.workspace import prepare

LAYERS, HIDDEN, VALUES, RANK = 30, 576, 192, 8  # SmolLM2-135M: q_proj 576 → 576, v_proj 576 → 192
SIZES = (8, 16, 32, 64, 128)
SMALL = [
    "data.source=paper", "data.clients=5", "data.train=20", "data.validation=1", "data.test=1", "data.alpha=0.3",
    "data.long_answers=skip", "discovery.warmup_steps=4", "discovery.warmup_batch=4", "discovery.max_buckets=4",
    "experts.rank=8", "backbone.max_length=192",
]  # fmt: skip


def scale(prototypes: int, k: int = 64) -> dict:
    layout = AdapterLayout(
        tuple(f"{i}.{p}" for i in range(LAYERS) for p in ("q_proj", "v_proj")),
        (HIDDEN, HIDDEN) * LAYERS,
        (HIDDEN, VALUES) * LAYERS,
        RANK,
        experts=1,
    )
    signer, whole = Signatures(layout, k, 42), Signatures(layout, 0, 42)
    generator = torch.Generator().manual_seed(0)
    adapter = torch.randn(layout.size, generator=generator)
    signer.of(adapter)  # makes the projection
    started = time.monotonic()
    one = signer.of(adapter)
    sketching = time.monotonic() - started
    centres = torch.randn(6, len(one), generator=generator)
    truth = torch.arange(prototypes) % 6
    signatures = [(centres[m] + torch.randn(len(one), generator=generator)).half() for m in truth.tolist()]
    started, used = time.monotonic(), time.process_time()
    distance = signature_distance(signer.blocks(signatures))
    measured = time.monotonic()
    alignment = align(distance, max_experts=8)
    ended = time.monotonic()
    return {
        "prototypes": prototypes,
        "numbers_per_block": k,
        "signature_bytes": one.numel() * one.element_size(),
        "whole_signature_bytes": 4 * whole.layout.signature_size,
        "sketch_one_s": round(sketching, 4),
        "distances_s": round(measured - started, 2),
        "choice_of_M_s": round(ended - measured, 2),
        "alignment_s": round(ended - started, 2),
        "alignment_cpu_s": round(time.process_time() - used, 2),
        "experts": alignment.experts,
        "agreement": adjusted_rand_score(truth.numpy(), alignment.labels),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def quality(data: Path, overrides: list[str]) -> dict:
    config = load_config("benchmark", [f"data.path={data}", *SMALL, *overrides])
    workspace = prepare(config, Console()).build(Console())
    engine, method = workspace.engine, FedWeave(config)
    for _ in method.discover.answer(engine.compute, engine.members, Message()):
        pass
    kept = engine.compute.adapters
    assert kept is not None
    adapters = [kept.read((client.index, c)) for client in engine.members for c in range(len(client.buckets))]
    rows: dict[str, dict] = {}
    exact = reference = None
    for k in (0, *SIZES):
        signer = Signatures(engine.layout(config.experts.rank, 1), k, config.seed)
        signatures = [signer.of(adapter) for adapter in adapters]
        distance = signature_distance(signer.blocks(signatures))
        alignment = align(distance, config.alignment.max_experts)
        labels = iter(alignment.labels.tolist())
        assignments = [[next(labels) for _ in client.buckets] for client in engine.members]
        if exact is None or reference is None:
            exact, reference = distance, alignment.labels
        error = (distance - exact)[np.triu_indices(len(distance), 1)]
        rows[f"k={k}" if k else "whole"] = {
            "bytes_per_bucket": signatures[0].numel() * signatures[0].element_size(),
            "bytes_per_client": round(np.mean([len(c.buckets) for c in engine.members])
                                      * signatures[0].numel() * signatures[0].element_size()),
            "distance_error_rms": round(float(np.sqrt((error**2).mean())), 5),
            "distance_error_max": round(float(np.abs(error).max()), 5),
            "experts": alignment.experts,
            "silhouette": round(alignment.silhouettes[alignment.experts], 4),
            "same_labels_as_whole": adjusted_rand_score(reference, alignment.labels),
            "audit": alignment_audit([c.buckets for c in engine.members], assignments, workspace.client_labels),
        }  # fmt: skip
    return {
        "model": workspace.backbone.name,
        "settings": [*SMALL, *overrides],
        "prototypes": len(adapters),
        "mean_distance": round(float(exact[np.triu_indices(len(exact), 1)].mean()), 4)
        if exact is not None
        else None,
        "signatures": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    which = parser.add_subparsers(dest="which", required=True)
    which.add_parser("scale").add_argument("--prototypes", type=int, default=10_000)
    real = which.add_parser("quality")
    real.add_argument("--data", type=Path, required=True)
    real.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    result = scale(args.prototypes) if args.which == "scale" else quality(args.data, args.overrides)
    print(json.dumps(result, indent=1))
    keep(result, args.output)


if __name__ == "__main__":
    main()
