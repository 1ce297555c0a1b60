"""How well off-topic prompts are told from new ones of known tasks, without training anything.

    python -m benchmarks.strange MODEL FOLDER [--varied] [--pool all] [--tasks 12] [--rows 250] [--known 60,180,230]

FOLDER is a folder of tasks (``tasks.jsonl`` and rows, as for ``data.source=tasks``) or has the paper's four tasks.
Prompts are rendered as a run renders them. Of each task's rows so many are known and the rest new, five times over
at random. The limit is learned from known prompts alone, by the functions of ``router.familiar``. Printed for two
of its values: how many new prompts are taken for strange by mistake, with the limit as known prompts alone would
set it and as it is set, and how many off-topic prompts, and prompts of tasks that nobody knows, are found.
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
from fedweave.methods.familiar import Span, count_far, crossed, farther, fit, reach, spanned
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


def limits(known: torch.Tensor) -> tuple[Span, dict[tuple[float, str], float]]:
    """(what known features [n, d] span, limits by share and by how they are set)"""
    count = min(128, known.shape[1] // 4, len(known) // 10)
    span = fit(*moments(known), count)
    means, seconds = (torch.stack(part) for part in zip(*(moments(known[h::2]) for h in (0, 1)), strict=True))
    halves = [fit(means[half], seconds[half], count) for half in (0, 1)]
    far = crossed(halves, means, seconds)
    counts, new = count_far(known, spanned(halves), far), farther(halves, far) * span.distance
    fitted = outside(known, span.mean, span.scale, span.axes)
    found = {}
    for share in (0.98, 0.99):
        found[share, "of the known"] = float(fitted.quantile(share))
        found[share, "as set"] = reach(counts, share) * new
    return span, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--varied", action="store_true", help="every prompt in one of its task's wordings")
    parser.add_argument("--pool", default="content", choices=["content", "all"], help="as backbone.pool")
    parser.add_argument("--tasks", type=int, default=12, help="so many tasks, or all there are")
    parser.add_argument("--rows", type=int, default=250, help="rows of each")
    parser.add_argument("--known", default="60,180,230", help="how many of these are known")
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    known_tasks, unseen = pools_of(arguments.folder, arguments.varied, arguments.seed)
    names = rng.choice(sorted(known_tasks), min(arguments.tasks, len(known_tasks)), replace=False)
    backbone = load_backbone(BackboneConfig(model=arguments.model, pool=arguments.pool, max_length=512))

    def features(prompts: list[str]) -> torch.Tensor:
        return cached_features(backbone, backbone.prompts.encode_prompts(prompts), Console()).double()

    tasks = [features(drawn(known_tasks[name], arguments.rows, rng)) for name in names]
    others = {"off-topic": features(OFF_TOPIC)}
    if unseen:
        others["unknown tasks"] = features([text for pool in unseen.values() for text in drawn(pool, 4, rng)])
    columns = ["new", *(f"{name} ({len(x)})" for name, x in others.items())]
    print("  known  familiar  limit        " + "".join(f"{column:>20}" for column in columns))
    for each in map(int, arguments.known.split(",")):
        shares: dict[tuple[float, str], list[list[float]]] = {}
        for _ in range(arguments.splits):
            mixed = [x[torch.from_numpy(rng.permutation(len(x)))] for x in tasks]
            known = torch.cat([x[:each] for x in mixed])
            span, found = limits(known[torch.from_numpy(rng.permutation(len(known)))])
            asked = [torch.cat([x[each:] for x in mixed]), *others.values()]
            far = [outside(x, span.mean, span.scale, span.axes) for x in asked]
            for key, limit in found.items():
                shares.setdefault(key, []).append([float((x > limit).double().mean()) for x in far])
        for (share, how), rows in shares.items():
            strange = "".join(f"{mean:>20.1%}" for mean in np.mean(rows, 0))
            print(f"  {each * len(tasks):<6} {share:<9} {how:<13}{strange}")


if __name__ == "__main__":
    main()
