"""Load a bundle, refusing whatever is missing, damaged or tampered with by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from fedweave.backbone.gguf import file_sha256
from fedweave.backbone.load import load_backbone
from fedweave.config import BackboneConfig
from fedweave.errors import UserError
from fedweave.experts.layout import AdapterLayout
from fedweave.experts.mixture import Mixture
from fedweave.inference.model import FedWeaveModel
from fedweave.router.mlp import RouterLayout
from fedweave.settings import build


def is_bundle(folder: Path) -> bool:
    return (folder / "fedweave.json").is_file()


def load_bundle(folder: Path, model: str | None = None, device: str = "auto") -> FedWeaveModel:
    """A bundle's model. ``model`` names the backbone when it lies elsewhere than where it was trained."""
    description = _description(folder)
    for name, checksum in description["files"].items():
        path = folder / name
        if not path.is_file():
            raise UserError(f"the bundle {folder} lacks {name}; copy or download it again.")
        if file_sha256(path) != checksum:
            raise UserError(f"the bundle {folder} is damaged: {name} is not what was exported.")
    settings = {**description["backbone"], "device": device, "dtype": "auto"}
    if model is not None:
        settings["model"] = model
    backbone = load_backbone(build(BackboneConfig, settings, "backbone."))
    if backbone.fingerprint != description["fingerprint"]:
        raise UserError(
            f"the bundle {folder} was trained on another backbone, tokenizer or prompt rendering than "
            f"{backbone.name}."
        )
    layers = backbone.linear_layers(description["target_modules"])
    layout = AdapterLayout.of(layers, description["rank"], description["experts"])
    singles = [_expert(folder / f"expert_{m}", layout.with_experts(1)) for m in range(layout.experts)]
    router, phi = _router(folder, description)
    return FedWeaveModel(
        backbone=backbone,
        mixture=Mixture(layers, layout, description["alpha"]),
        theta=layout.stack(singles).to(backbone.device),
        router=router,
        phi=phi.to(backbone.device) if phi is not None else None,
        shares=description["shares"],
    )


def _description(folder: Path) -> dict[str, Any]:
    try:
        description = json.loads((folder / "fedweave.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is no bundle: fedweave.json cannot be read ({error}).") from None
    if not isinstance(description, dict) or description.get("schema") != 1:
        raise UserError(f"{folder}: fedweave.json has a schema that this version does not know; update fedweave.")
    return description


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from None


def _expert(folder: Path, layout: AdapterLayout) -> torch.Tensor:
    """One PEFT adapter as a flat vector, [P of one expert]."""
    named = _tensors(folder / "adapter_model.safetensors")
    theta = torch.zeros(layout.size)
    for name, layer in zip(layout.names, layout.views(theta), strict=True):
        try:
            layer["A"].copy_(named[f"base_model.model.{name}.lora_A.weight"])
            layer["B"].copy_(named[f"base_model.model.{name}.lora_B.weight"].T)
        except (KeyError, RuntimeError) as error:
            raise UserError(f"{folder} does not fit the backbone: {error}.") from None
    return theta


def _router(folder: Path, description: dict[str, Any]) -> tuple[RouterLayout | None, torch.Tensor | None]:
    if description["router"] is None:
        return None, None
    router = RouterLayout(**description["router"])
    named = _tensors(folder / "router.safetensors")
    phi = torch.zeros(len(description["shares"]), router.size)
    for r, row in enumerate(phi):
        for name, view in router.views(row).items():
            view.copy_(named[f"{name}.{r}"])
    return router, phi
