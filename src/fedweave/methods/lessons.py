"""Lessons for an expert that has just opened: the clients of its kind teach it alone, before its first round.

In a round few of a client's examples are of a kind that has just come, and an expert that starts from nothing
learns from those few. In a lesson a client trains on the rows of the new kind and on nothing else, beside the part
that all experts share, as it has been trained so far; that part and all other experts stay. A lesson has as many
steps as a round, at the round's rate, and the server averages after each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from fedweave.aggregation.robust import client_average, usual_length
from fedweave.aggregation.standing import Standing
from fedweave.config import Config
from fedweave.experts.layout import AdapterLayout
from fedweave.federation.admission import Receipts
from fedweave.federation.client import Client, Member
from fedweave.federation.compute import Compute
from fedweave.federation.engines.base import Engine
from fedweave.federation.message import Facts, Message, Refused
from fedweave.federation.news import Change
from fedweave.federation.state import Broadcast, ServerState, broadcast, received
from fedweave.federation.steps import Answer, Asked, Figure, Part, Step, adam_reach
from fedweave.federation.train import EXPERTS, expert_name
from fedweave.training.batch import Lane
from fedweave.training.schedule import local_schedule, pace

Learned = list[tuple[int, torch.Tensor, int]]  # (expert, what a client would move it by [P of one], its examples)


class Lesson(Step[Learned]):
    """Teach these new experts, each on your rows of its kind."""

    name = "lesson"

    def __init__(self, config: Config):
        self.config = config

    # ---------------------------------------------------------------------------------- client side

    def answer(self, compute: Compute, clients: Sequence[Client], question: Message) -> Iterator[Answer]:
        state, t = received(question, compute.layers, compute.device), question.facts["t"]
        opened, training = question.facts["opened"], self.config.training
        lanes = [self.lane(client, state, opened, t, question.facts["turn"]) for client in clients]
        results = compute.train(
            state.layout, None, lanes, f"lesson before round {t + 1}", transient=True,
            training=replace(training, cuda_graphs=False),  # a few steps, once
            pace=state.pace * pace(training.schedule, t, training.rounds),
        )  # fmt: skip
        owner = state.layout.owner(compute.device)
        for client, result in zip(clients, results, strict=True):
            counts = examples_for(client, opened)
            moved = {
                expert_name(m): result.delta_theta[owner == place]
                for place, (m, count) in enumerate(zip(opened, counts, strict=True))
                if count
            }
            yield Answer(moved, {"counts": counts})

    def lane(self, client: Client, state: Broadcast, opened: Sequence[int], t: int, turn: int) -> Lane:
        """``state`` holds the experts that opened, in this order, and what all share."""
        training, seed = self.config.training, self.config.seed
        owner, place = client.example_experts(), torch.zeros(len(client.data), dtype=torch.long)
        served = {m: [b for b, e in zip(client.buckets, client.assignment, strict=True) if e == m] for m in opened}
        pools = [
            torch.cat([torch.from_numpy(b) for b in own]).sort().values.numpy() for own in served.values() if own
        ]
        for i, m in enumerate(opened):
            place[owner == m] = i
        key = (seed, t, client.index, "lesson", turn)
        schedule = local_schedule(pools, training.local_steps * len(pools), training.batch_size, *key)
        learns = state.layout.expert_of_column < state.layout.experts
        gates = F.one_hot(place, len(opened)).float()
        even = training.weighting == "example"
        return Lane(client.data, schedule, state.theta, None, key, learns, gates, even=even)

    # ---------------------------------------------------------------------------------- server side

    def figures(self, asked: Asked) -> dict[str, Figure]:
        several = (len(asked.question.facts["opened"]),) * 2
        return {"counts": Figure(int, 0, min(len(asked.member), self.config.federation.max_samples), several)}

    def parts(self, asked: Asked, figures: Facts) -> dict[str, Part]:
        opened = asked.question.facts["opened"]
        if figures["counts"] != examples_for(asked.member, opened):
            raise Refused("it claims other examples for a new expert than its buckets have")
        size = AdapterLayout.of(asked.layers, self.config.experts.rank, 1).size
        return {
            expert_name(m): Part((size,), limit=EXPERTS)
            for m, count in zip(opened, figures["counts"], strict=True)
            if count
        }

    def reach(self, asked: Asked, limit: str, size: int) -> tuple[float, str]:
        training, experts = self.config.training, len(asked.question.facts["opened"])
        farthest = adam_reach(experts * training.local_steps, training.lr, size)
        if training.weight_decay:
            away = float(asked.question.tensors["theta"].float().norm()) + farthest
            farthest += experts * training.local_steps * training.lr * training.weight_decay * away
        return farthest, "the farthest that a lesson's steps can lead"

    def read(self, asked: Asked, parts: dict[str, torch.Tensor], figures: Facts) -> Learned:
        counts = zip(asked.question.facts["opened"], figures["counts"], strict=True)
        return [(m, parts[expert_name(m)], count) for m, count in counts if count]


def give_lessons(
    engine: Engine, step: Lesson, state: ServerState, opened: Sequence[int], change: Change
) -> ServerState:
    """The state after ``living.lessons`` lessons for these experts; all others, and what they share, are copied."""
    config, layout = step.config, state.layout
    owners = [member for member in engine.present() if set(member.assignment) & set(opened)]
    if not config.living.lessons or not opened or not owners:
        return state
    experts, shared = layout.unstack(state.theta), shared_of(state)
    standing = Standing(engine.members, config, state.standing)
    small = engine.layout(layout.rank, len(opened), layout.shared)
    turns = config.living.lessons
    progress = engine.console.progress("lessons", turns * len(owners), "client lessons")
    for turn in range(turns):
        theta = small.stack([experts[m] for m in opened], shared)
        told = Broadcast(small, None, theta, None, pace=state.pace)
        question, heard = broadcast(told, change.t, torch.bfloat16), Receipts()  # half of the bytes
        question.facts.update(opened=list(opened), turn=turn)
        means = {m: client_average(experts[m].numel(), theta.device, config, standing) for m in opened}
        for member, learned in engine.ask(step, owners, question, heard):
            for m, delta, count in learned:
                means[m].add(delta, count, member.index)
            progress.advance()
        change.heard(heard, question)
        standing.hear(means.values())
        usual = usual_length(means.values())
        for m, mean in means.items():
            if mean.weight:
                experts[m] = experts[m] + mean.step(usual).to(experts[m])
    progress.close()
    return replace(state, theta=layout.stack(experts, shared))


def examples_for(member: Member, experts: Sequence[int]) -> list[int]:
    """How many examples a client has for each of these experts."""
    fed = list(zip(member.sizes, member.assignment, strict=True))
    return [sum(size for size, owner in fed if owner == m) for m in experts]


def shared_of(state: ServerState) -> torch.Tensor:
    """The columns that all experts share."""
    return state.theta[(state.layout.expert_of_column == state.layout.experts).to(state.theta.device)]
