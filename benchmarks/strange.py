"""How well strange prompts are told from familiar ones on real tasks, without training anything.

``python -m benchmarks.strange MODEL SEEN.jsonl UNSEEN.jsonl``: rows with ``task`` and ``input``. Of some seen tasks
two thirds of the rows are known and the rest new. Printed for two values of ``router.familiar``: how many new
prompts are taken for strange by mistake, with the limit as known prompts alone would set it and as it is set, and
how many prompts of unseen tasks and off-topic ones are found.
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
from fedweave.data.files import read_rows
from fedweave.methods.familiar import farther, fit


def prompts(file: Path, tasks: int, rows: int, rng: np.random.Generator) -> list[list[str]]:
    """So many rows of so many tasks."""
    found: dict[str, list[str]] = {}
    for _, row in read_rows(file):
        found.setdefault(str(row["task"]), []).append(str(row["input"]))
    names = sorted(name for name, texts in found.items() if len(texts) >= rows)
    chosen = rng.choice(names, min(tasks, len(names)), replace=False)
    return [[str(text) for text in rng.choice(found[name], rows, replace=False)] for name in chosen]


def moments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.mean(0), x.T @ x / len(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("seen", type=Path)
    parser.add_argument("unseen", type=Path)
    parser.add_argument("--tasks", type=int, default=6, help="seen tasks")
    parser.add_argument("--rows", type=int, default=90, help="rows of each, a third of them new")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    seen = prompts(arguments.seen, arguments.tasks, arguments.rows, rng)
    unseen = [text for texts in prompts(arguments.unseen, 30, 2, rng) for text in texts]
    kept = 2 * arguments.rows // 3
    sets = {
        "known": [text for texts in seen for text in texts[:kept]],
        "new": [text for texts in seen for text in texts[kept:]],
        "unseen": unseen,
        "off-topic": OFF_TOPIC,
    }
    backbone = load_backbone(BackboneConfig(model=arguments.model, pool="content", max_length=256))
    x = {
        name: cached_features(backbone, backbone.prompts.encode_prompts(texts), Console()).double()
        for name, texts in sets.items()
    }
    count = min(128, backbone.width // 4, len(x["known"]) // 10)
    span = fit(*moments(x["known"]), count)
    far = {}
    for name, features in x.items():
        z = (features - span.mean) * span.scale
        far[name] = z.square().sum(1) - (z @ span.axes.T).square().sum(1)
    halves = [moments(x["known"][half::2]) for half in (0, 1)]
    factor = farther([mean for mean, _ in halves], [second for _, second in halves], count)
    print(
        f"{len(x['known'])} known prompts, {count} directions; new ones are taken to lie {factor:.2f} times as far"
    )
    sizes = {name: len(features) for name, features in x.items() if name != "known"}
    print("  familiar  limit       " + "".join(f"{f'{name} ({size})':>18}" for name, size in sizes.items()))
    for share in (0.98, 0.99):
        for said, times in (("of the known", 1.0), ("allowed for", factor)):
            limit = far["known"].quantile(share) * times
            strange = "".join(f"{float((far[name] > limit).double().mean()):>18.1%}" for name in sizes)
            print(f"  {share:<9} {said:<12}{strange}")


if __name__ == "__main__":
    main()
