"""A PEFT adapter folder: how one is written, read, and proved to be what the stacked experts compute."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from fedweave.bundle.card import base_model
from fedweave.errors import UserError
from fedweave.evaluation.losses import serving_weights
from fedweave.experts.layout import AdapterLayout
from fedweave.inference.model import FedWeaveModel
from fedweave.schema import Description

_PROBE = "Fix the grammar, then say in one word how many hats Mia has: She have 3 hat and find 4 more."


def write_adapter(folder: Path, tensors: dict[str, torch.Tensor], description: Description) -> None:
    """Only what every loader understands: LoRA on named linear layers, no bias, no modules to save, no variants.
    vLLM also asks that ``base_model_name_or_path`` is the very name of the model that it serves."""
    rank, alpha = rank_and_alpha(tensors, description)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model(description),
        "revision": description["backbone"]["revision"],
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "target_modules": description["target_modules"],
        "bias": "none",
        "fan_in_fan_out": False,
        "use_dora": False,
        "use_rslora": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
    (folder / "adapter_config.json").write_text(json.dumps(adapter, indent=1), encoding="utf-8")


def rank_and_alpha(tensors: Mapping[str, torch.Tensor], description: Description) -> tuple[int, float]:
    """Loaders scale by alpha / rank, and ours is the scale of one expert: a higher rank needs a higher alpha."""
    rank = len(next(iter(tensors.values())))  # rows of the first lora_A
    return rank, description["alpha"] * rank / description["rank"]


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from None


def read_adapter(folder: Path, layout: AdapterLayout) -> torch.Tensor:
    """One PEFT adapter, an expert and what it shares with the others, as a flat vector of ``layout``, which has
    this expert alone."""
    named = read_tensors(folder / "adapter_model.safetensors")
    theta = torch.zeros(layout.size)
    gates = layout.all_gates(torch.ones(1)).repeat_interleave(layout.rank)  # [rows] what export put into B
    for name, layer in zip(layout.names, layout.views(theta), strict=True):
        try:
            layer["A"].copy_(named[f"base_model.model.{name}.lora_A.weight"])
            layer["B"].copy_(named[f"base_model.model.{name}.lora_B.weight"].T / gates[:, None])
        except (KeyError, RuntimeError) as error:
            raise UserError(f"{folder} does not fit the backbone: {error}.") from None
    return theta


@torch.no_grad()
def check_adapter(folder: Path, model: FedWeaveModel, gates: torch.Tensor) -> None:
    """Load the folder with PEFT: it must adapt every layer, and give the logits of our experts at ``gates`` [M]."""
    from peft import PeftModel

    expected = probe(model, gates)
    adapted = PeftModel.from_pretrained(model.backbone.model, folder)
    try:
        layers = sum(name.endswith("lora_A.default") for name, _ in adapted.named_modules())
        found = probe(model)
    finally:
        adapted.unload()
    if layers != len(model.mixture.layout.names):
        raise UserError(
            f"{folder.name} adapts {layers} layers of the model instead of {len(model.mixture.layout.names)}."
        )
    compare(folder.name, found, expected, model.backbone.dtype)


@torch.no_grad()
def probe(model: FedWeaveModel, gates: torch.Tensor | None = None) -> torch.Tensor:
    """Logits of a fixed prompt, [tokens, V]: with the experts at ``gates`` [M], or of the model as it stands."""
    backbone = model.backbone
    ids = torch.from_numpy(backbone.prompts.encode_prompts([_PROBE])[0].ids).long()[None].to(backbone.device)
    with backbone.decoding() as plain:
        if gates is None:
            return plain(ids).logits[0].float()
        weights = serving_weights(model.mixture.layout, model.theta, backbone.dtype)
        with model.mixture.active(weights, gates.to(backbone.device)[None, None]):
            return plain(ids).logits[0].float()


def compare(name: str, found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    error = ((found - expected).abs().max() / expected.abs().max()).item()
    if not error < (1e-4 if dtype == torch.float32 else 5e-2):
        raise UserError(f"{name} read back gives other logits than the trained experts (off by {error:.1e}).")
