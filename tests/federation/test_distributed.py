"""Two processes that torchrun starts give the run of one: the same tensors, one run folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from safetensors.torch import load_file

from fedweave.cli import main
from tests.helpers import SMALL, assert_trained_alike


def together(arguments: list[str], program: Sequence[str] = ("-m", "fedweave.cli")) -> subprocess.CompletedProcess:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [*torchrun, *program, *arguments], capture_output=True, text=True, timeout=300, env=environment
    )


def tensors(run) -> dict[str, torch.Tensor]:
    newest = sorted((run / "checkpoints").glob("round-*"))[-1]
    (file,) = newest.glob("*.safetensors")
    return load_file(file)


@pytest.mark.parametrize(
    ("extra", "limit"),
    [
        (["method=fedweave"], 2e-5),
        # private rows and residuals; where rounding to int8 falls on an edge, a last bit decides
        (["method=fedsa-lora", "training.participation=2", "federation.update_dtype=int8"], 1e-3),
    ],
)
def test_two_processes_equal_one(tmp_path, model_folder, extra, limit):
    small = [f"backbone.model={model_folder('llama')}", *SMALL, *extra, "training.rounds=2"]
    assert main(["run", "quickstart", *small, f"output={tmp_path / 'one'}", "--quiet"]) == 0
    done = together(["run", "quickstart", *small, f"output={tmp_path / 'two'}"])
    assert done.returncode == 0, done.stderr[-2000:]
    assert "2 processes share the clients" in done.stderr + done.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "two"], "only one process writes"
    alone, shared = tensors(tmp_path / "one"), tensors(tmp_path / "two")
    assert alone.keys() == shared.keys()
    for name, tensor in alone.items():
        assert_trained_alike(tensor, shared[name], limit)
    one, two = (json.loads((tmp_path / run / "summary.json").read_text()) for run in ("one", "two"))
    assert two["buckets"] == one["buckets"]
    losses = [summary["test"]["best"]["loss"]["soft"]["macro"] for summary in (one, two) if summary["experts"] > 1]
    assert not losses or losses[0] == pytest.approx(losses[1], abs=1e-4)

    more = together(["resume", str(tmp_path / "two"), "training.rounds=3"])
    assert more.returncode == 0, more.stderr[-2000:]
    assert main(["resume", str(tmp_path / "one"), "training.rounds=3", "--quiet"]) == 0
    longer = tensors(tmp_path / "two")
    for name, tensor in tensors(tmp_path / "one").items():
        assert_trained_alike(tensor, longer[name], limit)


def test_a_mistake_ends_all_processes_with_the_sentence(tmp_path):
    done = together(["run", "quickstart", "backbone.model=nowhere/at-all", f"output={tmp_path / 'x'}"])
    assert done.returncode != 0
    assert "nowhere/at-all" in done.stderr and not (tmp_path / "x").exists()


LEAVING = """
import atexit, os, weakref
from fedweave.federation.engines.distributed import world
atexit.register(lambda: group() and os._exit(3))  # runs last: handlers run in reverse
group = weakref.ref(world().group)
import torch.distributed.nn  # keeps the default group, if there is one, in its functions' arguments
world().wait()
"""


def test_a_process_leaves_the_group_before_python_ends(tmp_path):
    """Otherwise gloo's threads outlive the interpreter, and abort about one run in ten after all its work."""
    (tmp_path / "leaving.py").write_text(LEAVING)
    done = together([], [str(tmp_path / "leaving.py")])
    assert done.returncode == 0, done.stderr[-2000:]
