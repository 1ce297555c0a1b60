"""What each expert is for: the prompts that the router gives it, whose they are, what sets them apart, and how it
answers where the bare model did otherwise. Labels are counted where there are some, and needed nowhere."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedweave.data.examples import Prompt
from fedweave.data.rows import UNLABELLED
from fedweave.description.record import Example, Expert, Experts
from fedweave.description.words import distinctive
from fedweave.inference.generate import generate
from fedweave.inference.model import FedWeaveModel
from fedweave.router.routed import foremost

TYPICAL = 3  # prompts, and examples, of each expert
LONGEST_ANSWER = 64  # tokens of an example


@dataclass
class Asked:
    """Prompts with their features, and what is known of each."""

    prompts: Sequence[Prompt]
    features: torch.Tensor  # [n, d]
    clients: Sequence[str] = ()
    tasks: Sequence[str] = ()
    references: Sequence[str] = ()
    answers: Sequence[str] | None = None  # of the model, where they are known already


def describe(model: FedWeaveModel, asked: Asked, held: Asked, source: str, round: int) -> Experts:
    """Experts by the prompts that they get of ``asked``, with examples out of ``held``."""
    owners = np.array([foremost(weights) for weights in model.weights(asked.features)])  # [n]
    experts = range(model.mixture.layout.experts)
    texts = [text_of(prompt) for prompt in asked.prompts]
    rows = [np.flatnonzero(owners == m) for m in experts]
    words = distinctive([[texts[i] for i in own] for own in rows])
    points = _standard(asked.features)
    examples = _examples(model, held)
    described: list[Expert] = []
    for m, own in enumerate(rows):
        expert: Expert = {"name": "", "share": len(own) / max(1, len(texts)), "words": words[m]}
        if asked.clients:
            expert["clients"] = _counted(asked.clients, own)
        if set(asked.tasks) - {UNLABELLED}:
            expert["tasks"] = _counted(asked.tasks, own)
        expert["typical"] = [texts[own[i]] for i in typical(points[own], [texts[i] for i in own])]
        expert["examples"] = examples[m]
        described.append(expert)
    return {"schema": 1, "source": source, "round": round, "experts": described}


def text_of(prompt: Prompt) -> str:
    """What a person asked: of a chat the user's turns."""
    if isinstance(prompt, str):
        return prompt.strip()
    return "\n\n".join(m["content"].strip() for m in prompt if m["role"] == "user")


def typical(points: np.ndarray, texts: Sequence[str], count: int = TYPICAL) -> list[int]:
    """Rows that stand for all of ``points`` [n, d], whose lengths are 1: near to the middle, each next one also far
    from those before, and no text twice."""
    if not len(points):
        return []
    middle = points.mean(0)
    near = points @ (middle / max(float(np.linalg.norm(middle)), 1e-12))  # [n]
    covered = np.zeros(len(points), dtype=near.dtype)  # [n] how near a row is to those chosen
    chosen: list[int] = []
    taken: set[str] = set()
    for _ in range(count):
        order = np.argsort(covered - near, kind="stable")
        best = next((int(i) for i in order if texts[i] not in taken), None)
        if best is None:
            break
        chosen.append(best)
        taken.add(texts[best])
        covered = np.maximum(covered, points @ points[best])
    return chosen


def _standard(features: torch.Tensor) -> np.ndarray:
    """Features [n, d] channel by channel, as discovery sees them, each of length 1."""
    points = features.float().numpy()
    points = (points - points.mean(0)) / (points.std(0) + 1e-6)
    return points / np.maximum(np.linalg.norm(points, axis=1, keepdims=True), 1e-12)


def _counted(values: Sequence[str], rows: np.ndarray) -> dict[str, int]:
    return dict(Counter(values[i] for i in rows).most_common())


def _examples(model: FedWeaveModel, held: Asked) -> list[list[Example]]:
    """For each expert a few held-out prompts of its own, with its answer and the bare model's."""
    if not held.prompts:
        return [[] for _ in range(model.mixture.layout.experts)]
    weights = model.weights(held.features)  # [n, M]
    owners, points = np.array([foremost(row) for row in weights]), _standard(held.features)
    texts = [text_of(prompt) for prompt in held.prompts]
    chosen: list[list[int]] = []
    for m in range(weights.shape[1]):
        own = np.flatnonzero(owners == m)
        chosen.append([int(own[i]) for i in typical(points[own], [texts[i] for i in own])])
    rows = [i for own in chosen for i in own]
    prompts = model.backbone.prompts.encode_prompts([held.prompts[i] for i in rows])
    bare = generate(model.backbone, prompts, LONGEST_ANSWER)
    if held.answers is None:
        gates = model.experts.gates(weights[rows], "sparse")
        answers = generate(model.backbone, prompts, LONGEST_ANSWER, model.mixture, model.theta, gates)
    else:
        answers = [held.answers[i] for i in rows]
    made: dict[int, Example] = {
        i: {"prompt": texts[i], "answer": answer, "bare": before, "reference": held.references[i]}
        for i, answer, before in zip(rows, answers, bare, strict=True)
    }
    return [[made[i] for i in own] for own in chosen]
