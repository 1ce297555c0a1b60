"""Vectors that clients of a simulation keep between two phases: a little in memory, more on disk."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import numpy as np
import torch

from fedweave.errors import UserError

_IN_MEMORY = 1 << 25  # bytes


class Spool:
    """Float32 vectors of one length, written once and read back in order."""

    def __init__(self, width: int):
        self.width, self.count = width, 0
        self._file = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115 - lives as long as the spool

    def __len__(self) -> int:
        return self.count

    def append(self, vector: torch.Tensor) -> None:
        """vector [width]"""
        try:
            self._file.write(vector.detach().float().cpu().contiguous().numpy().tobytes())
        except OSError as error:
            raise UserError(
                f"warmup adapters do not fit into {tempfile.gettempdir()} ({error.strerror}); set TMPDIR to a "
                "folder with more space."
            ) from error
        self.count += 1

    def __iter__(self) -> Iterator[torch.Tensor]:
        self._file.seek(0)
        for _ in range(self.count):
            yield torch.from_numpy(np.frombuffer(self._file.read(4 * self.width), dtype=np.float32).copy())
