"""Load a bundle, refusing whatever is missing, damaged or tampered with by name."""

import math
from pathlib import Path

import torch

from fedweave.alignment.kept import KeptSignatures
from fedweave.backbone.catalog import other_weights, where_it_lies
from fedweave.backbone.load import Backbone, load_backbone
from fedweave.bundle.adapter import read_adapter, read_tensors, take
from fedweave.bundle.export import SIGNATURES
from fedweave.config import BackboneConfig
from fedweave.errors import UserError
from fedweave.experts.layout import AdapterLayout
from fedweave.experts.mixture import Mixture
from fedweave.files import files_sha256
from fedweave.inference.model import FedWeaveModel
from fedweave.json_files import read_json
from fedweave.router.mlp import RouterLayout
from fedweave.router.routed import RoutedExperts
from fedweave.schema import Description
from fedweave.settings import build

CARD = "README.md"


def is_bundle(folder: Path) -> bool:
    return (folder / "fedweave.json").is_file()


def load_bundle(folder: Path, model: str | None = None, device: str = "auto", dtype: str = "auto") -> FedWeaveModel:
    """A bundle's model. ``model`` names the backbone when it lies elsewhere than where it was trained."""
    description = verify_bundle(folder)
    backbone = load_backbone(bundle_backbone(description, model, device, dtype))
    layers = backbone.linear_layers(description["target_modules"])
    experts = read_experts(folder, description, backbone, layers)
    mixture = Mixture(layers, experts.layout, description["alpha"], description.get("span", "all"))
    return FedWeaveModel(backbone, mixture, experts)


def verify_bundle(folder: Path) -> Description:
    """What fedweave.json says, once every file that it lists is there and unchanged."""
    description = read_json(folder / "fedweave.json", Description, "copy or download the bundle again")
    if description is None:
        raise UserError(f"{folder} is no bundle: it has no fedweave.json.")
    if description["schema"] != 1:
        raise UserError(f"{folder}: fedweave.json has a schema that this version does not know; update fedweave.")
    listed = {
        name: checksum for name, checksum in description["files"].items() if name != CARD
    }  # which is for people
    for name in listed:
        if not (folder / name).is_file():
            raise UserError(f"the bundle {folder} lacks {name}; copy or download it again.")
    for name, found in zip(listed, files_sha256(folder / name for name in listed), strict=True):
        if found != listed[name]:
            raise UserError(f"the bundle {folder} is damaged: {name} is not what was exported.")
    return description


def read_kept(folder: Path, description: Description) -> KeptSignatures | None:
    """The signatures of a verified bundle, if it has any."""
    if (facts := description.get("kept")) is None:
        return None
    return KeptSignatures(read_tensors(folder / SIGNATURES)["signatures"], **facts)


def bundle_backbone(
    description: Description, model: str | None, device: str, dtype: str = "auto"
) -> BackboneConfig:
    if model is None:
        model = where_it_lies(str(description["backbone"]["model"]), description["fingerprint"])
    settings = {**description["backbone"], "model": model, "device": device, "dtype": dtype}
    return build(BackboneConfig, settings, "backbone.")


def read_experts(
    folder: Path, description: Description, backbone: Backbone, layers: dict[str, torch.nn.Linear]
) -> RoutedExperts:
    """On the backbone's device; the backbone must be the one trained on."""
    if backbone.fingerprint != description["fingerprint"]:
        raise UserError(
            f"the bundle {folder} was trained on another backbone, tokenizer or prompt rendering than "
            f"{backbone.name}; {other_weights(backbone.name)}."
        )
    check_numbers(folder, description, backbone.width)
    shape = description["rank"], description["experts"], description.get("shared", 0)
    layout, one = AdapterLayout.of(layers, *shape), AdapterLayout.of(layers, shape[0], 1, shape[2])
    adapters = [read_adapter(folder / f"expert_{m}", one) for m in range(layout.experts)]
    shared = adapters[0][one.expert_of_column == 1]  # the same in all of them
    theta = layout.stack([one.unstack(adapter)[0] for adapter in adapters], shared).to(backbone.device)
    if description["router"] is None:
        return RoutedExperts(layout, None, theta, None, description["shares"])
    router = RouterLayout(**description["router"])
    file = folder / "router.safetensors"
    named = read_tensors(file)
    parts = [
        torch.cat([take(named, f"{name}.{r}", shape, file).flatten() for name, shape in router.shapes.items()])
        for r in range(len(description["shares"]))
    ]
    return RoutedExperts(layout, router, theta, torch.stack(parts).to(backbone.device), description["shares"])


def check_numbers(folder: Path, description: Description, width: int) -> None:
    """What fedweave.json says must be possible, before room is made for it."""
    router, rank, shares = description["router"], description["rank"], description["shares"]
    last, shared = folder / f"expert_{description['experts'] - 1}", description.get("shared", 0)
    sizes = {"width": width, "experts": description["experts"]}
    possible = {
        "experts": description["experts"] >= 1 and last.is_dir(),
        "rank": rank >= 1,
        "shared": rank >= 1 and shared >= 0 and shared % rank == 0,
        "alpha": 0 < description["alpha"] < math.inf,
        "shares": 1 <= len(shares) <= 1000 and all(0 <= share <= 1 for share in shares),
        "router": router is None
        or (router | sizes == router and router["hidden"] >= 1 and router.get("axes", 0) >= 0),
    }
    if wrong := [name for name, right in possible.items() if not right]:
        raise UserError(f"the bundle {folder} is damaged: fedweave.json says an impossible {wrong[0]}.")
