"""Two processes that torchrun starts give the run of one: the same tensors, one run folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch
from safetensors.torch import load_file

from fedweave.cli import main
from fedweave.console import Console
from fedweave.federation.engines.distributed import ShardedEngine
from fedweave.federation.message import Message
from tests.federations import changed, make_engine, run
from tests.helpers import PATIENCE, assert_trained_alike, events, fork, free_port, read_json
from tests.runs.test_course import HARMFUL


def torchrun(*program: str, **environment: str) -> str:
    """What two processes of a program said, started as users start them."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *program]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=PATIENCE, env=os.environ | environment)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-2000:]
    return said


def together(folder: Path, *command: str) -> tuple[list[int], str]:
    """(exit codes, what they said) of two forks of this command, told what torchrun tells its processes."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    logs = [folder / f"{rank}.log" for rank in range(2)]
    pair = [
        fork(main, command, log=log, **place, RANK=str(rank), LOCAL_RANK=str(rank)) for rank, log in enumerate(logs)
    ]
    for process in pair:
        process.join(PATIENCE)
    return [process.exitcode for process in pair], "".join(log.read_text() for log in logs)


def tensors(run) -> dict[str, torch.Tensor]:
    newest = sorted((run / "checkpoints").glob("round-*"))[-1]
    (file,) = newest.glob("*.safetensors")
    return load_file(file)


def assert_same_run(one: Path, two: Path, limit: float) -> None:
    """What one process and two have trained, found and measured."""
    alone, shared = tensors(one), tensors(two)
    assert alone.keys() == shared.keys()
    for name, tensor in alone.items():
        assert_trained_alike(tensor, shared[name], limit)
    ours, theirs = (read_json(run / "summary.json") for run in (one, two))
    assert theirs["buckets"] == ours["buckets"]
    losses = [s["test"]["best"]["loss"]["soft"]["macro"] for s in (ours, theirs) if s["experts"] > 1]
    assert not losses or losses[0] == pytest.approx(losses[1], abs=1e-4)


@pytest.mark.parametrize(
    ("method", "extra", "limit"),
    [
        ("fedweave", [], 2e-5),
        # private rows and residuals; where rounding to int8 falls on an edge, a last bit decides
        ("fedsa-lora", ["training.participation=2", "federation.update_dtype=int8"], 1e-3),
    ],
)
def test_two_processes_equal_one(tmp_path, small, tiny_copy, method, extra, limit):
    """One method goes the users' whole way, through torchrun."""
    settings = [f"method={method}", *extra, "training.rounds=2"]
    one, two, logs = tiny_copy(*settings), tmp_path / "runs" / "two", tmp_path / "logs"
    logs.mkdir()
    begin = ["run", "quickstart", *small, *settings, f"output={two}"]
    if method == "fedweave":
        said = torchrun("-m", "fedweave.cli", *begin)
    else:
        codes, said = together(logs, *begin)
        assert codes == [0, 0], said[-2000:]
    assert "2 processes share the clients" in said
    assert [p.name for p in two.parent.iterdir()] == ["two"], "only one process writes"
    assert_same_run(one, two, limit)

    codes, said = together(logs, "resume", str(two), "training.rounds=3")
    assert codes == [0, 0], said[-2000:]
    assert main(["resume", str(one), "training.rounds=3", "--quiet"]) == 0
    assert_same_run(one, two, limit)


class Alone:
    """The only process of its world."""

    rank, size = 0, 1

    def pass_on(self, owner, message):
        return Message.from_bytes(message.to_bytes())


def test_absent_clients_leave_the_others_their_own_answers(config, backbone):
    absent = changed(config, attack={"kind": "absent", "clients": 0.4}, method="fedit", data={"clients": 5})
    plain = make_engine(absent, backbone)
    shared = ShardedEngine(backbone, plain.members, absent, Console(quiet=True), Alone())  # type: ignore[arg-type]
    ends = [run(absent, engine)[1] for engine in (plain, shared)]
    assert torch.equal(ends[0].theta, ends[1].theta) and len(shared.members) == 3


def test_all_processes_go_back_and_end_together(tmp_path, small, tiny_run):
    """Only the first one measures, and all hold the state."""
    settings = ["method=fedsa-lora", "federation.update_dtype=int8", *HARMFUL, "training.rounds=9"]
    two, logs = tmp_path / "two", tmp_path / "logs"
    logs.mkdir()
    codes, said = together(logs, "run", "quickstart", *small, *settings, "training.rounds=2", f"output={two}")
    assert codes == [0, 0], said[-2000:]
    codes, said = together(logs, "resume", str(two), "training.rounds=9")
    assert codes == [0, 0], said[-2000:]
    one = tiny_run(*settings)
    assert events(two, "setback") == events(one, "setback") and len(events(one, "setback")) == 4
    assert read_json(two / "summary.json")["ended_early"]


def test_two_processes_share_the_cells_of_a_grid_and_stop_together(tmp_path, small):
    """The first one writes tables and record; a cell that begins like another discovers nothing again."""
    record, axes = tmp_path / "record.json", ["federation.rule=mean,clip", "training.rounds=1"]
    command = ["compare", "quickstart", *small, *axes, "--output", str(tmp_path / "grid"), "--record", str(record)]
    assert together(tmp_path, *command, "--minutes", "0") == ([2, 0], ANY)
    codes, said = together(tmp_path, *command, "--minutes", "60")
    assert codes == [0, 0] and "warmup: as in an earlier run" in said
    assert len(read_json(record)["cells"]) == 2
    both = (tmp_path / "grid" / "table.md").read_text()
    assert "| mean |" in both and "| clip |" in both


def test_a_mistake_ends_all_processes_with_the_sentence(tmp_path):
    run = tmp_path / "x"
    codes, said = together(tmp_path, "run", "quickstart", "backbone.model=nowhere/at-all", f"output={run}")
    assert codes[0] == 2 and codes[1] not in (0, None)  # the other may just see that the first has gone
    assert "nowhere/at-all" in said and not run.exists()


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
    torchrun(str(tmp_path / "leaving.py"))
