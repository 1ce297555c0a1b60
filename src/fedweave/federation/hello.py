"""Hello: who is there, and with which model. The first question to a site, before any of its rows is read."""

from dataclasses import dataclass

import torch

from fedweave.experts.layout import Shaped
from fedweave.federation.message import Facts, Refused
from fedweave.federation.steps import Asked, Figure, Reply

_MOST_LAYERS, _WIDEST, _LONGEST_NAME = 100_000, 2**24, 80


@dataclass
class Shape:
    in_features: int
    out_features: int


@dataclass
class Introduction:
    name: str
    fingerprint: str
    identity: dict[str, str]  # Backbone.identity
    width: int  # d of the router's features
    layers: dict[str, Shaped]  # that carry experts


class Hello(Reply[Introduction]):
    """A site answers it by itself: it has no client yet."""

    name = "hello"

    def figures(self, asked: Asked) -> dict[str, Figure]:
        text, layers = Figure(str, high=_LONGEST_NAME), (1, _MOST_LAYERS)
        return {
            "name": text, "version": text, "fingerprint": text, "backbone": text, "tokenizer": text,
            "width": Figure(int, 1, _WIDEST), "layers": Figure(str, high=500, length=layers),
            "inputs": Figure(int, 1, _WIDEST, layers), "outputs": Figure(int, 1, _WIDEST, layers),
        }  # fmt: skip

    def read(self, asked: Asked, parts: dict[str, torch.Tensor], figures: Facts) -> Introduction:
        if not figures["name"]:
            raise Refused("it has no name")
        names, inputs, outputs = figures["layers"], figures["inputs"], figures["outputs"]
        if not len(names) == len(inputs) == len(outputs) == len(set(names)):
            raise Refused("its layers have no proper shapes")
        layers: dict[str, Shaped] = {name: Shape(i, o) for name, i, o in zip(names, inputs, outputs, strict=True)}
        identity = {part: figures[part] for part in ("backbone", "tokenizer")}
        return Introduction(figures["name"], figures["fingerprint"], identity, figures["width"], layers)
