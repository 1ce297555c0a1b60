"""The one exit of a client: every number that is derived from its data leaves through :meth:`Exit.leave`.

Whatever is to happen to all that leaves (clipping, noise, masks) is a filter in :func:`filters`; no step, no method
and no engine has another way out.
"""

from collections.abc import Callable

import torch

from fedweave.config import Config
from fedweave.federation.client import RESIDUAL, Client
from fedweave.federation.hostile import Hostile
from fedweave.federation.masks import MASKED, hidden
from fedweave.federation.message import Facts, Message, decode, encode
from fedweave.federation.private import Noise
from fedweave.federation.steps import Answer, Asked, Reply, Summed

# What is done to an answer on its way out. A filter may change numbers; names and shapes stay those of the step.
Filter = Callable[[Reply, Asked, Client, Answer], Answer]


def filters(config: Config) -> list[Filter]:
    """What everything passes, in this order, before it is rounded and sent."""
    noise: list[Filter] = [] if config.privacy.level == "none" else [Noise(config)]
    return noise if config.attack.kind == "none" else [*noise, Hostile(config)]


class Exit:
    """Makes messages of answers. ``travels`` says that they leave the process."""

    def __init__(self, config: Config, identity: dict[str, str], travels: bool):
        self.identity, self.travels = identity, travels
        self.filters, self.masked = filters(config), config.federation.secure_aggregation
        self.hostile = None if config.attack.kind == "none" else Hostile(config)
        self.noise = Noise(config) if config.privacy.level == "client" else None
        self.precision = config.federation.update_dtype

    def leave(self, step: Reply, asked: Asked, client: Client, answer: Answer) -> Message:
        """The message that leaves; it says which question it answers and on which model."""
        for apply in self.filters if step.of_data else []:
            answer = apply(step, asked, client, answer)
        header: Facts = {"step": step.name, "t": asked.question.facts["t"], **self.identity}
        if self.masked and isinstance(step, Summed):
            summands = step.summands(asked, answer)
            if self.noise is not None:
                summands = self.noise.summed(step, asked, client, summands)
            return Message({MASKED: hidden(step, asked, client, summands)}, header)
        tensors: dict[str, torch.Tensor] = {}
        for name, part in step.parts(asked, answer.figures).items():
            values = answer.parts[name]
            if part.rows and self.travels:  # no single row leaves
                values = values.mean(0, keepdim=True)
            tensors |= self._rounded(client, name, values, part.turn) if part.rounded else {name: values}
        message = Message(tensors, header | answer.figures)
        return message if self.hostile is None else self.hostile.sent(step, client, message)

    def _rounded(self, client: Client, name: str, values: torch.Tensor, turn: str = "") -> dict[str, torch.Tensor]:
        """In fewer bytes, with error feedback: what rounding takes from one update the client remembers and adds to
        the next of the same numbers, so that rounding delays a change but never loses it."""
        values = values.float()
        if self.precision == "float32":
            return {name: values}
        account = f"{RESIDUAL}{name}.{turn}" if turn else RESIDUAL + name
        owed = client.memory.get(account)
        full = values if owed is None else values + owed.to(values.device)
        sent = encode(name, full, self.precision)
        # a NaN is refused by the server; it must not spoil the rounds after it
        lost = (full - decode(name, sent, self.precision)).nan_to_num(0.0, 0.0, 0.0)
        client.memory.keep(account, lost)
        return sent
