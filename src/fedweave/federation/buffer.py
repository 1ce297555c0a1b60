"""Vectors that clients of a simulation keep between two steps: a little in memory, more on disk."""

from __future__ import annotations

import tempfile

import numpy as np
import torch

from fedweave.errors import UserError

_IN_MEMORY = 1 << 25  # bytes


class VectorBuffer:
    """Float32 vectors of one length, several for each client."""

    def __init__(self, width: int):
        self.width, self.count = width, 0
        self._rows: dict[int, list[int]] = {}  # client -> where its vectors lie
        self._file = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115 - lives as long as the buffer

    def __len__(self) -> int:
        return self.count

    def __contains__(self, client: int) -> bool:
        return client in self._rows

    def append(self, client: int, vector: torch.Tensor) -> None:
        """vector [width]"""
        try:
            self._file.seek(4 * self.width * self.count)
            self._file.write(vector.detach().float().cpu().contiguous().numpy().tobytes())
        except OSError as error:
            raise UserError(
                f"warmup adapters do not fit into {tempfile.gettempdir()} ({error.strerror}); set TMPDIR to a "
                "folder with more space."
            ) from error
        self._rows.setdefault(client, []).append(self.count)
        self.count += 1

    def read(self, client: int) -> list[torch.Tensor]:
        """A client's vectors in the order in which they came."""
        return [self._row(row) for row in self._rows[client]]

    def _row(self, row: int) -> torch.Tensor:
        self._file.seek(4 * self.width * row)
        return torch.from_numpy(np.frombuffer(self._file.read(4 * self.width), dtype=np.float32).copy())
