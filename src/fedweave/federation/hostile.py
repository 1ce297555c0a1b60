"""What hostile clients of a simulation do to their answers (``attack``); docs/trust.md has what came of it.

They keep to what the door lets in: no name, shape or norm is wrong. Only who claims experts that alignment did not
give it is refused. Those that spoil their own rows instead are in :mod:`fedweave.data.hostile`.
"""

import math
from dataclasses import replace

import torch

from fedweave.config import Config
from fedweave.data.hostile import hostile_clients
from fedweave.federation.client import Client
from fedweave.federation.message import Message
from fedweave.federation.steps import Answer, Asked, Reply
from fedweave.federation.train import expert_name

# a norm may be ten times the median one
FACTORS = {"flip": -1.0, "shout": -8.0, "claim": -1.0, "inflate": -1.0}
TURNED = ("train", "warm", "rewarm")  # questions whose answers are turned around
BOAST = 1000  # examples that are claimed for each one that is there


class Hostile:
    """A filter of the exit, and of what has passed it."""

    def __init__(self, config: Config):
        self.kind, self.after, self.clients = config.attack.kind, config.attack.after, hostile_clients(config)

    def __call__(self, step: Reply, asked: Asked, client: Client, answer: Answer) -> Answer:
        if self.kind not in FACTORS or step.name not in TURNED or not self._attacks(step, client, asked.question):
            return answer
        turned = {name: FACTORS[self.kind] * values for name, values in answer.parts.items()}
        return replace(answer, parts=_within(step, asked, answer, turned))

    def _attacks(self, step: Reply, client: Client, said: Message) -> bool:
        """Now, and not only later: who has a good name does more harm."""
        begun = not self.after or (step.name == "train" and said.facts["t"] >= self.after)
        return client.index in self.clients and begun

    def speaks(self, client: Client) -> bool:
        """absent: it answers nothing, so that the others do without it and its rows."""
        return self.kind != "absent" or client.index not in self.clients

    def sent(self, step: Reply, client: Client, message: Message) -> Message:
        """claim: a message that speaks for every expert, with all examples; to those that it has nothing for it
        does what it does to one of its own."""
        if self.kind != "claim" or step.name != "train" or not self._attacks(step, client, message):
            return message
        counts = message.facts["counts"]
        own = expert_name(next(m for m, count in enumerate(counts) if count))
        tensors = {
            name.replace(own, expert_name(m), 1): values
            for name, values in message.tensors.items()
            for m in range(len(counts))
            if name == own or name.startswith(f"{own}.")
        }
        return Message(tensors | message.tensors, message.facts | {"counts": [float(len(client))] * len(counts)})


def _within(step: Reply, asked: Asked, answer: Answer, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parts no longer than what the door believes of an honest client."""
    limits: dict[str, list[str]] = {}
    for name, part in step.parts(asked, answer.figures).items():
        limits.setdefault(part.limit, []).append(name)
    for limit, names in limits.items():
        norm = math.sqrt(sum(float(parts[name].square().sum()) for name in names))
        most, _ = step.reach(asked, limit, sum(parts[name].numel() for name in names))
        for name in names:
            parts[name] = parts[name] * min(1.0, 0.99 * most / max(norm, 1e-30))
    return parts


def boast(config: Config, index: int) -> int:
    """Examples that a client says it has for each that it has."""
    return BOAST if config.attack.kind == "inflate" and index in hostile_clients(config) else 1
