"""Hello: who is there, and with which model. The first question to a site, before any of its rows is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedweave.backbone.load import Backbone
from fedweave.experts.layout import Shaped
from fedweave.federation.message import Facts, Refused
from fedweave.federation.steps import Asked, Figure, Reply
from fedweave.schema import AnatomyRecord

_MOST_LAYERS, _WIDEST, _LONGEST_NAME = 100_000, 2**24, 80


@dataclass
class Shape:
    in_features: int
    out_features: int


@dataclass(frozen=True)
class Anatomy:
    """As much of a backbone as a server needs to know: all sites of a federation have the same."""

    fingerprint: str
    identity: dict[str, str]  # Backbone.identity
    width: int  # d of the router's features
    layers: dict[str, Shaped]  # that carry experts

    @classmethod
    def of(cls, backbone: Backbone, targets: Sequence[str]) -> Anatomy:
        found = backbone.linear_layers(targets)
        layers: dict[str, Shaped] = {n: Shape(layer.in_features, layer.out_features) for n, layer in found.items()}
        return cls(backbone.fingerprint, backbone.identity, backbone.width, layers)

    @property
    def record(self) -> AnatomyRecord:
        shapes = {name: [layer.in_features, layer.out_features] for name, layer in self.layers.items()}
        return {"fingerprint": self.fingerprint, "identity": self.identity, "width": self.width, "layers": shapes}

    @classmethod
    def recorded(cls, record: AnatomyRecord) -> Anatomy:
        layers: dict[str, Shaped] = {name: Shape(*shape) for name, shape in record["layers"].items()}
        return cls(record["fingerprint"], record["identity"], record["width"], layers)


@dataclass
class Introduction:
    name: str
    model: Anatomy


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
        shapes = zip(names, inputs, outputs, strict=True)
        layers: dict[str, Shaped] = {name: Shape(int(i), int(o)) for name, i, o in shapes}
        identity = {part: figures[part] for part in ("backbone", "tokenizer")}
        model = Anatomy(figures["fingerprint"], identity, int(figures["width"]), layers)
        return Introduction(figures["name"], model)
