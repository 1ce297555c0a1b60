"""Vectors on disk come back as they were, and a disk without room is one sentence."""

import resource
import signal
import subprocess
import sys

import torch

from fedweave.federation import compute
from fedweave.federation.compute import VectorBuffer


def test_vectors_come_back_more_than_once(monkeypatch):
    monkeypatch.setattr(compute, "_IN_MEMORY", 1000)
    rows = {(i % 3, i): torch.randn(100, generator=torch.Generator().manual_seed(i)) for i in range(20)}
    kept = VectorBuffer(100)
    for unit, row in rows.items():
        kept.append(unit, row)
    assert kept.count == 20 and kept._file._rolled, "most of it is on disk"
    for unit in [*reversed(rows), *rows]:
        assert torch.equal(kept.read(unit), rows[unit])
    assert (1, 1) in kept and (1, 2) not in kept


def test_a_full_disk_is_one_sentence():
    """A real limit on file size stands for the full disk."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    code = (
        "import torch\nfrom fedweave.federation.compute import UserError, VectorBuffer\n"
        "kept = VectorBuffer(1 << 20)\ntry:\n    for _ in range(20): kept.append((0, 0), torch.ones(1 << 20))\n"
        "except UserError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], preexec_fn=limit, capture_output=True, text=True)
    assert done.returncode == 0 and "set TMPDIR to a folder with more space" in done.stdout, done.stderr
