"""Testing served models: losses of every routing, scores by generation, the routing table."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from fedweave.backbone.load import Backbone
from fedweave.config import Config
from fedweave.console import Console
from fedweave.data.examples import Task
from fedweave.errors import UserError
from fedweave.evaluation.audit import decided, per_task, routing_table
from fedweave.evaluation.losses import example_losses
from fedweave.experts.mixture import Mixture
from fedweave.federation.method import Method
from fedweave.federation.state import ServerState
from fedweave.inference.generate import generate
from fedweave.inference.model import FedWeaveModel
from fedweave.methods import build_method
from fedweave.metrics.scores import scores
from fedweave.router.mlp import sparsify
from fedweave.runs.workspace import TestSet
from fedweave.schema import ByTask, Prediction, Tested


def routed_models(backbone: Backbone, mixture: Mixture, method: Method, state: ServerState) -> list[FedWeaveModel]:
    """The models that a method serves: one, or every client's own."""
    if not (served := method.served(state)):
        raise UserError(
            f"{method.config.method} leaves parameters at its sites: this server has no whole model to use."
        )
    return [FedWeaveModel(backbone, mixture, experts) for experts in served]


def evaluate_models(
    config: Config,
    tasks: dict[str, Task],
    models: list[FedWeaveModel],
    held: TestSet,
    console: Console,
    predictions: list[Prediction] | None = None,
) -> Tested:
    """Losses of every routing, scores of the chosen one, the routing table; means where several models serve."""
    results = [
        _evaluate_model(config, tasks, model, held, console, predictions if model is models[0] else None)
        for model in models
    ]
    return _mean_tree(results)


def _mean_tree(trees: list[Any]) -> Any:
    """The mean of equal-shaped trees of numbers; anything else is taken from the first."""
    first = trees[0]
    if isinstance(first, dict):
        return {key: _mean_tree([tree[key] for tree in trees]) for key in first}
    if isinstance(first, list):
        return [_mean_tree(list(items)) for items in zip(*trees, strict=True)]
    return float(np.mean(trees)) if isinstance(first, float) and len(trees) > 1 else first


def _evaluate_model(
    config: Config,
    tasks: dict[str, Task],
    model: FedWeaveModel,
    held: TestSet,
    console: Console,
    predictions: list[Prediction] | None,
) -> Tested:
    settings, used = config.evaluation, build_method(config).routing
    weights = model.weights(held.features)  # [n, M]
    several = model.mixture.layout.experts > 1
    result: Tested = {
        "used": used if several else "sparse",
        "loss": {},
        "routing": routing_table(weights, held.labels),
        "top1": routing_table(sparsify(weights, "sparse"), held.labels),
    }
    if several and len(set(held.kinds)) > 1:
        result["decided"] = decided(weights, held.kinds)
    routings = dict.fromkeys(["sparse", "soft", used] if several else ["sparse"])
    bar = console.progress("test losses", len(held.encoded) * len(routings), "examples")
    for routing in routings:
        gates = sparsify(weights, routing)
        losses = example_losses(model.backbone, held.encoded, model.mixture, model.theta, gates, bar)
        result["loss"][routing] = per_task(losses, held.labels)
    bar.close()
    if settings.scores:
        gates = sparsify(weights, used)
        result["score"] = _scores(config, tasks, model, held, weights, gates, console, predictions)
    if settings.compare_routings:
        result["routings"] = {}
        for routing in ("sparse", "top2", "soft"):
            started = time.monotonic()
            scored = _scores(config, tasks, model, held, weights, sparsify(weights, routing), console, None)
            seconds = time.monotonic() - started
            result["routings"][routing] = {"score": scored, "ms_per_prompt": 1e3 * seconds / len(held.encoded)}
    return result


def answer_scores(
    config: Config, tasks: dict[str, Task], models: list[FedWeaveModel], held: TestSet, console: Console
) -> ByTask:
    """Scores of generated answers with the method's own routing; means where several models serve."""
    used = build_method(config).routing
    each = []
    for model in models:
        weights = model.weights(held.features)
        each.append(_scores(config, tasks, model, held, weights, sparsify(weights, used), console, None))
    return _mean_tree(each)


def _scores(
    config: Config,
    tasks: dict[str, Task],
    model: FedWeaveModel,
    held: TestSet,
    weights: torch.Tensor,
    gates: torch.Tensor,
    console: Console,
    predictions: list[Prediction] | None,
) -> ByTask:
    """Generate and score the answers of every task; ``macro`` is the unweighted mean."""
    settings = config.evaluation
    bar = console.progress("answers", len(held.encoded), "prompts")
    means = {}
    for name in dict.fromkeys(held.labels):
        task = tasks[name]
        rows = [i for i, label in enumerate(held.labels) if label == name]
        answers = generate(
            model.backbone,
            [held.encoded[i].prompt for i in rows],
            task.max_new_tokens,
            model.mixture,
            model.theta,
            gates[rows],
            settings.batch_size,
            bar,
        )
        each = scores(task.metric, answers, [held.references[i] for i in rows], settings.rouge, task.labels)
        means[name] = float(np.mean(each))
        if predictions is not None:
            predictions += [
                {
                    "task": name,
                    "origin": held.origins[i],
                    "prediction": answer,
                    "reference": held.references[i],
                    "score": scored,
                    "weights": weights[i].tolist(),
                }
                for i, answer, scored in zip(rows, answers, each, strict=True)
            ]
    bar.close()
    return {**means, "macro": float(np.mean(list(means.values())))}
