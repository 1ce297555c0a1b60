"""Checkpoints that a crash cannot harm.

A checkpoint is a folder of a safetensors file and a JSON file, which exists whole or not at all; the previous one
goes only after it.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from fedweave.errors import UserError
from fedweave.files import atomic_folder

KEEP = 2


def save_checkpoint(folder: Path, name: str, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> Path:
    """Write ``folder/name`` atomically; an older folder of that name is replaced."""
    final = folder / name
    try:
        with atomic_folder(final, replace=True) as partial:
            save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, partial / "state.safetensors")
            (partial / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"checkpoint {final} cannot be written ({reason}); the last good one is intact: free some space "
            "and run `fedweave resume`."
        ) from error
    return final


def load_checkpoint(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read a checkpoint, or say which file is damaged."""
    try:
        tensors = load_file(path / "state.safetensors")
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"checkpoint {path} is damaged or incomplete ({error}); remove it and resume.") from error
    return tensors, meta


def round_name(completed: int) -> str:
    return f"round-{completed:04d}"


def round_checkpoints(folder: Path) -> list[Path]:
    """Complete round checkpoints, oldest first; half-written ones have another name."""
    return sorted(p for p in folder.glob("round-*") if p.is_dir())


def prune(folder: Path, keep: set[str]) -> None:
    """Drop old rounds, but never the newest two nor those named in ``keep``."""
    for path in round_checkpoints(folder)[:-KEEP]:
        if path.name not in keep:
            shutil.rmtree(path, ignore_errors=True)
