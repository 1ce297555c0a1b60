"""Write a run's model as a bundle: every expert an ordinary PEFT adapter, the router beside them.

DIR/README.md                  model card
    fedweave.json              what the router needs to know, and a checksum of every file
    router.safetensors
    expert_0/adapter_config.json, adapter_model.safetensors      loads with plain PEFT and vLLM
    expert_1/…
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fedweave.backbone.gguf import file_sha256
from fedweave.bundle.card import model_card
from fedweave.config import Config
from fedweave.errors import UserError
from fedweave.inference.model import FedWeaveModel
from fedweave.runs.use import load_models
from fedweave.settings import to_tree

SCHEMA = 1


def export_run(run: Path, target: Path, last: bool = False) -> dict[str, Any]:
    """Export a run's best (or last) model to a new folder; returns what fedweave.json holds."""
    if target.exists():
        raise UserError(f"{target} exists; choose another folder.")
    config, models, facts = load_models(run, last)
    if len(models) != 1:
        raise UserError(f"{config.method} trains a model for every client and has none to export.")
    model = models[0]
    check_finite(model)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        for m in range(model.mixture.layout.experts):
            _write_expert(partial / f"expert_{m}", model, config, m)
        _write_router(partial, model)
        summary_file = run / "summary.json"
        summary = json.loads(summary_file.read_text(encoding="utf-8")) if summary_file.is_file() else None
        (partial / "README.md").write_text(model_card(config, model, facts, summary), encoding="utf-8")
        description = describe(config, model, facts)
        description["files"] = {
            str(p.relative_to(partial)): file_sha256(p) for p in sorted(partial.rglob("*")) if p.is_file()
        }
        (partial / "fedweave.json").write_text(json.dumps(description, indent=1), encoding="utf-8")
        partial.rename(target)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(f"{target} cannot be written: {error.strerror}.") from error
    return description


def describe(config: Config, model: FedWeaveModel, facts: dict[str, Any]) -> dict[str, Any]:
    """Everything that loading needs and that the tensors do not say."""
    layout = model.mixture.layout
    return {
        "schema": SCHEMA,
        "method": config.method,
        "round": facts["round"],
        "seed": config.seed,
        "backbone": to_tree(config.backbone),
        "fingerprint": model.backbone.fingerprint,
        "experts": layout.experts,
        "rank": layout.rank,
        "alpha": config.experts.alpha,
        "target_modules": list(config.experts.target_modules),
        "router": asdict(model.router) if model.router else None,
        "shares": model.shares,
        "feature": "mean over prompt tokens of the bare backbone's last hidden states, after the final norm",
    }


def check_finite(model: FedWeaveModel) -> None:
    for name, tensor in (("experts", model.theta), ("router", model.phi)):
        if tensor is not None and not torch.isfinite(tensor).all():
            raise UserError(f"the run's {name} hold NaN or infinity and cannot be exported.")


def _write_expert(folder: Path, model: FedWeaveModel, config: Config, expert: int) -> None:
    """One PEFT adapter. Only what every loader understands: LoRA on named linear layers, no bias, no extras."""
    layout = model.mixture.layout
    folder.mkdir()
    save_file(layout.named(model.theta.cpu(), expert), folder / "adapter_model.safetensors", {"format": "pt"})
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.backbone.model,
        "revision": config.backbone.revision,
        "r": layout.rank,
        "lora_alpha": config.experts.alpha,
        "lora_dropout": config.experts.dropout,
        "target_modules": list(config.experts.target_modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
    (folder / "adapter_config.json").write_text(json.dumps(adapter, indent=1), encoding="utf-8")


def _write_router(folder: Path, model: FedWeaveModel) -> None:
    """The routers' weights under their names; with several, name.N."""
    if model.router is None or model.phi is None:
        return
    tensors = {
        f"{name}.{r}": tensor.contiguous()
        for r, phi in enumerate(model.phi.cpu())
        for name, tensor in model.router.views(phi.clone()).items()
    }
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "router.safetensors")
