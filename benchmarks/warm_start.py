"""How well a warm-started router tells tasks apart, before any training: own contrast against all, few rounds
against many.

    python -m benchmarks.warm_start benchmark data.path=DATA seed=43 data.alpha=0.1

A recipe and overrides, as for ``fedweave run``. Buckets are the method's own; each is given the expert of the task
that most of its examples have, as a perfect alignment would, so that no warmup adapter need be trained and the
features are all that the backbone computes (they are cached; about 20 minutes on two cores, seconds on a GPU).
Labels are for this alignment and for the table; the routers see features and experts, as in a run.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence

import torch

from fedweave.aggregation.rules import ClientAverage
from fedweave.config import load_config
from fedweave.config_method import WarmStartConfig
from fedweave.console import Console, table
from fedweave.methods import build_method
from fedweave.methods.warm_start import LabelledFeatures, warm_start_clients
from fedweave.router.mlp import RouterLayout
from fedweave.runs.workspace import Workspace, prepare

TRIED = [
    WarmStartConfig(contrast=contrast, rounds=rounds, steps=steps)
    for contrast in ("all", "own")
    for rounds, steps in ((5, 40), (10, 20), (20, 10))
]


def align_by_majority(workspace: Workspace) -> list[torch.Tensor]:
    """The expert of every example, client by client: the task that leads in its bucket."""
    method, tasks = build_method(workspace.config), list(workspace.data.tasks)
    method.form_buckets(workspace.engine.compute, workspace.engine.members)
    experts = []
    for client, labels in zip(workspace.engine.members, workspace.client_labels, strict=True):
        own = torch.empty(len(labels), dtype=torch.long)
        for bucket in client.buckets:
            leading = Counter(labels[i] for i in bucket).most_common(1)[0][0]
            own[torch.as_tensor(bucket)] = tasks.index(leading)
        experts.append(own)
    return experts


def warmed_up(workspace: Workspace, experts: Sequence[torch.Tensor], settings: WarmStartConfig) -> torch.Tensor:
    """Router weights of the validation prompts after the federated warm start, [n, M]."""
    config, clients = workspace.config, workspace.engine.members
    layout = RouterLayout(
        workspace.engine.width, config.router.hidden, len(workspace.data.tasks), config.router.features
    )

    phi = layout.initial(config.seed + 1)
    for t in range(settings.rounds):
        lessons = [
            LabelledFeatures(client.data.features, own, (config.seed, t, client.index))
            for client, own in zip(clients, experts, strict=True)
            if settings.contrast == "all" or len(own.unique()) > 1
        ]
        average = ClientAverage(layout.size, phi.device)
        for lesson, delta in zip(
            lessons, warm_start_clients(layout, phi, lessons, settings, settings.contrast), strict=True
        ):
            average.add(delta, len(lesson.features))
        phi = phi + average.step()
    return layout.route(phi, workspace.validation.features)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a recipe's name or a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    config = load_config(arguments.recipe, arguments.overrides)
    workspace = prepare(config, Console()).build(Console())
    experts = align_by_majority(workspace)
    kinds = torch.tensor([list(workspace.data.tasks).index(label) for label in workspace.validation.labels])
    rows = []
    for settings in TRIED:
        weights = warmed_up(workspace, experts, settings)
        tasks = [(weights[kinds == m], m) for m in range(len(workspace.data.tasks))]  # [n of the task, M]
        cells = [f"{own[:, m].mean():.2f}, {(own.argmax(1) == m).float().mean():.0%}" for own, m in tasks]
        rows.append([settings.contrast, f"{settings.rounds} × {settings.steps}", *cells])
    print("Validation prompts: mean weight of their task's expert, and how many of them it gets.\n")
    print(table(["contrast", "rounds × steps", *(task.title for task in workspace.data.tasks.values())], rows))


if __name__ == "__main__":
    main()
