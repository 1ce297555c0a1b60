"""Checkpoints that a crash cannot harm, and whose damage shows.

A checkpoint is a folder of a safetensors file and a JSON file, which exists whole or not at all; the previous one
goes only after it. The JSON file holds checksums of both.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from fedweave.errors import UserError, first_line
from fedweave.files import atomic_folder, file_sha256, remove_folder
from fedweave.json_files import Damaged, parse, sealed

KEEP = 2
STATE, META = "state.safetensors", "meta.json"
RESUME = "`fedweave resume`, over sites with `fedweave federate --resume`"
Meta = TypeVar("Meta", bound=Mapping[str, object])


def save_checkpoint(folder: Path, name: str, tensors: dict[str, torch.Tensor], meta: Mapping[str, object]) -> Path:
    """Write ``folder/name`` atomically; an older folder of that name is replaced."""
    final = folder / name
    try:
        with atomic_folder(final, replace=True) as partial:
            save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, partial / STATE)
            text = sealed({**meta, "state_sha256": file_sha256(partial / STATE)}, indent=None)
            (partial / META).write_text(text, encoding="utf-8")
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"checkpoint {final} cannot be written ({reason}); the last good one is intact: free some space "
            f"and continue with {RESUME}."
        ) from error
    return final


class Writing:
    """Checkpoints that are written while training goes on: each is on the disk, whole, before the next is begun."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._open: Future[None] | None = None

    def begin(self, write: Callable[[], None]) -> None:
        self.finish()
        self._open = self._thread.submit(write)

    def finish(self) -> None:
        """Wait for the last one; what went wrong with it is raised here."""
        last, self._open = self._open, None
        if last is not None:
            last.result()


def load_checkpoint(path: Path, kind: type[Meta]) -> tuple[dict[str, torch.Tensor], Meta]:
    """A checkpoint as it was written; anything else is :class:`Damaged`."""
    try:
        meta = parse((path / META).read_bytes(), kind)
    except (OSError, Damaged) as error:
        raise Damaged(f"{META}: {getattr(error, 'strerror', None) or error}") from None
    try:
        if file_sha256(path / STATE) != meta.get("state_sha256"):
            raise Damaged(f"{STATE} is not what was written")
        return load_file(path / STATE), meta
    except (OSError, SafetensorError) as error:
        raise Damaged(f"{STATE}: {getattr(error, 'strerror', None) or first_line(error)}") from None


def round_name(completed: int) -> str:
    return f"round-{completed:04d}"


def round_checkpoints(folder: Path) -> dict[int, Path]:
    """Complete round checkpoints by their rounds, oldest first; half-written ones have another name."""
    named = {p.name.removeprefix("round-"): p for p in folder.glob("round-*") if p.is_dir()}
    return dict(sorted((int(number), path) for number, path in named.items() if number.isdecimal()))


def prune(folder: Path, keep: set[int]) -> None:
    """Drop old rounds, but never the newest two nor those in ``keep``."""
    found = round_checkpoints(folder)
    for completed in list(found)[:-KEEP]:
        if completed not in keep:
            remove_folder(found[completed])
