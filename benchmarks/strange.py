"""How well off-topic prompts are told from new ones of known tasks, without training anything.

    python -m benchmarks.strange MODEL FOLDER [--varied] [--tasks 12] [--rows 90]

FOLDER is a folder of tasks (``tasks.jsonl`` and rows, as for ``data.source=tasks``) or has the paper's four tasks.
Prompts are rendered as a run renders them. Of each task two thirds of the rows are known and the rest new. The
limit is learned from known prompts alone, by the functions of ``router.familiar``. Printed for two of its values:
how many new prompts are taken for strange by mistake, with the limit as known prompts alone would set it and as it
is set, and how many off-topic prompts, and prompts of tasks that nobody knows, are found.
"""

import argparse
from pathlib import Path

import numpy as np
import torch

from benchmarks.asked import OFF_TOPIC
from fedweave.backbone.features import cached_features
from fedweave.backbone.load import load_backbone
from fedweave.config import BackboneConfig
from fedweave.console import Console
from fedweave.data.folder import load_task_folder
from fedweave.data.tasks import Pool, load_paper_tasks
from fedweave.methods.familiar import count_far, crossed, farther, fit, reach, spanned
from fedweave.router.mlp import outside


def pools_of(folder: Path, varied: bool, seed: int) -> tuple[dict[str, Pool], dict[str, Pool]]:
    """(tasks to know, tasks that nobody knows)"""
    if any(folder.glob("tasks.jsonl*")):
        found = load_task_folder(folder, varied, seed, 64)
        return found.pools, found.unseen
    return load_paper_tasks(str(folder), varied, seed)[0], {}


def drawn(pool: Pool, rows: int, rng: np.random.Generator) -> list[str]:
    return [pool[i].prompt for i in rng.choice(len(pool), min(rows, len(pool)), replace=False)]


def moments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.mean(0), x.T @ x / len(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--varied", action="store_true", help="every prompt in one of its task's wordings")
    parser.add_argument("--tasks", type=int, default=12, help="so many tasks, or all there are")
    parser.add_argument("--rows", type=int, default=90, help="rows of each, a third of them new")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    known_tasks, unseen = pools_of(arguments.folder, arguments.varied, arguments.seed)
    names = rng.choice(sorted(known_tasks), min(arguments.tasks, len(known_tasks)), replace=False)
    seen = [drawn(known_tasks[name], arguments.rows, rng) for name in names]
    kept = 2 * arguments.rows // 3
    known = [text for texts in seen for text in texts[:kept]]
    sets = {
        "known": [known[i] for i in rng.permutation(len(known))],
        "new": [text for texts in seen for text in texts[kept:]],
        "off-topic": OFF_TOPIC,
        "unknown tasks": [text for pool in unseen.values() for text in drawn(pool, 4, rng)],
    }
    backbone = load_backbone(BackboneConfig(model=arguments.model, pool="content", max_length=512))
    x = {
        name: cached_features(backbone, backbone.prompts.encode_prompts(texts), Console())
        for name, texts in sets.items()
        if texts
    }
    inner = x["known"].double()
    count = min(128, backbone.width // 4, len(inner) // 10)
    span = fit(*moments(inner), count)
    means, seconds = (torch.stack(part) for part in zip(*(moments(inner[h::2]) for h in (0, 1)), strict=True))
    halves = [fit(means[half], seconds[half], count) for half in (0, 1)]
    mean_far = crossed(halves, means, seconds)
    counts, factor = count_far(inner, spanned(halves), mean_far), farther(halves, mean_far)
    far = {name: outside(features.double(), span.mean, span.scale, span.axes) for name, features in x.items()}
    print(f"{len(names)} tasks, {len(inner)} known prompts, {count} directions; new ones {factor:.2f} times as far")
    print("  familiar  limit        " + "".join(f"{f'{k} ({len(v)})':>20}" for k, v in x.items() if k != "known"))
    for share in (0.98, 0.99):
        limits = {
            "of the known": far["known"].quantile(share),
            "as set": reach(counts, share) * factor * span.distance,
        }
        for said, limit in limits.items():
            strange = "".join(f"{(v > limit).double().mean():>20.1%}" for k, v in far.items() if k != "known")
            print(f"  {share:<9} {said:<13}{strange}")


if __name__ == "__main__":
    main()
