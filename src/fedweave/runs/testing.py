"""Testing served models: losses of every routing, scores by generation, the routing table."""

import time
from dataclasses import dataclass
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
from fedweave.router.routed import foremost
from fedweave.runs.workspace import TestSet
from fedweave.schema import ByTask, ClientFigures, Prediction, Tested


def routed_models(backbone: Backbone, mixture: Mixture, method: Method, state: ServerState) -> list[FedWeaveModel]:
    """The models that a method serves: one, or every client's own."""
    if not (served := method.served(state)):
        raise UserError(
            f"{method.config.method} leaves parameters at its sites: this server has no whole model to use."
        )
    return [FedWeaveModel(backbone, mixture, experts) for experts in served]


@dataclass
class Rows:
    """What one model makes of every row, with the routing that its method uses."""

    losses: torch.Tensor  # [n]
    answers: list[str] | None = None
    scores: torch.Tensor | None = None  # [n]

    def weighted(self, weights: np.ndarray) -> ClientFigures:
        """Its figures where rows count as much as ``weights`` [n] say."""
        figures: ClientFigures = {"loss": float(weights @ self.losses.double().numpy())}
        if self.scores is not None:
            figures["score"] = float(weights @ self.scores.numpy())
        return figures


@dataclass
class Exam:
    """Held-out rows, and how answers to them are made and scored."""

    config: Config
    tasks: dict[str, Task]
    held: TestSet
    console: Console

    def of(self, models: list[FedWeaveModel], predictions: list[Prediction] | None = None) -> Tested:
        """Losses of every routing, scores of the chosen one, the routing table, and what it all is for each client;
        means where several models serve. ``predictions`` gets a record of every row, of the first model."""
        results, measured = zip(*map(self._one, models), strict=True)
        held = self.held
        if predictions is not None:
            predictions += _predictions(held, models[0], measured[0])
        result: Tested = _mean_tree(list(results))
        if held.clients is not None and len(measured) in (1, len(held.clients.names)):  # else some was refused
            names = held.clients.names
            own = measured if len(measured) == len(names) else [measured[0]] * len(names)
            each = ((name, held.clients.of(name), rows) for name, rows in zip(names, own, strict=True))
            result["clients"] = {name: rows.weighted(weights) for name, weights, rows in each if weights.any()}
        return result

    def scores(self, models: list[FedWeaveModel]) -> ByTask:
        """Scores of generated answers with the method's own routing; means where several models serve."""
        used = build_method(self.config).routing
        each = []
        for model in models:
            gates = model.experts.gates(model.weights(self.held.features), used)
            each.append(per_task(self._answers(model, gates)[1], self.held.labels))
        return _mean_tree(each)

    def _one(self, model: FedWeaveModel) -> tuple[Tested, Rows]:
        settings, used, held = self.config.evaluation, build_method(self.config).routing, self.held
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
        losses = {}
        bar = self.console.progress("test losses", len(held.encoded) * len(routings), "examples")
        for routing in routings:
            gates = model.experts.gates(weights, routing)
            losses[routing] = example_losses(model.backbone, held.encoded, model.mixture, model.theta, gates, bar)
            result["loss"][routing] = per_task(losses[routing], held.labels)
        bar.close()
        rows = Rows(losses[result["used"]])
        if settings.scores:
            rows.answers, rows.scores = self._answers(model, model.experts.gates(weights, used))
            result["score"] = per_task(rows.scores, held.labels)
        if settings.compare_routings:
            result["routings"] = {}
            for routing in ("sparse", "top2", "soft"):
                started = time.monotonic()
                _, scored = self._answers(model, model.experts.gates(weights, routing))
                seconds = time.monotonic() - started
                result["routings"][routing] = {
                    "score": per_task(scored, held.labels),
                    "ms_per_prompt": 1e3 * seconds / len(held.encoded),
                }
        return result, rows

    def _answers(self, model: FedWeaveModel, gates: torch.Tensor) -> tuple[list[str], torch.Tensor]:
        """(answers, their scores [n]) of all rows, whatever their task, in common batches."""
        settings, held, labels = self.config.evaluation, self.held, self.held.labels
        bar = self.console.progress("answers", len(held.encoded), "prompts")
        answers = generate(
            model.backbone,
            [e.prompt for e in held.encoded],
            [self.tasks[label].max_new_tokens for label in labels],
            model.mixture,
            model.theta,
            gates,
            settings.batch_size,
            bar,
        )
        bar.close()
        scored = torch.zeros(len(answers), dtype=torch.float64)
        for name in dict.fromkeys(labels):
            task, rows = self.tasks[name], [i for i, label in enumerate(labels) if label == name]
            given, wanted = [answers[i] for i in rows], [held.examples[i].response for i in rows]
            scored[rows] = torch.tensor(
                scores(task.metric, given, wanted, settings.rouge, task.labels), dtype=torch.float64
            )
        return answers, scored


def _mean_tree(trees: list[Any]) -> Any:
    """The mean of equal-shaped trees of numbers; anything else is taken from the first."""
    first = trees[0]
    if isinstance(first, dict):
        return {key: _mean_tree([tree[key] for tree in trees]) for key in first}
    if isinstance(first, list):
        return [_mean_tree(list(items)) for items in zip(*trees, strict=True)]
    return float(np.mean(trees)) if isinstance(first, float) and len(trees) > 1 else first


def _predictions(held: TestSet, model: FedWeaveModel, measured: Rows) -> list[Prediction]:
    """A record of every row."""
    records: list[Prediction] = []
    for i, (example, weights) in enumerate(zip(held.examples, model.weights(held.features), strict=True)):
        record: Prediction = {
            "task": example.task,
            "origin": example.origin,
            "prompt": example.prompt if isinstance(example.prompt, str) else list(example.prompt),
            "reference": example.response,
            "loss": measured.losses[i].item(),
            "expert": foremost(weights),
            "weights": weights.tolist(),
        }
        if measured.answers is not None and measured.scores is not None:
            record |= {"prediction": measured.answers[i], "score": measured.scores[i].item()}
        records.append(record)
    return records
