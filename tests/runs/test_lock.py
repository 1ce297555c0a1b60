"""One process at a time works on a run; what a killed one leaves stops nobody."""

import json
import os
import signal
import socket
import sys

import pytest

from fedweave.cli import main
from fedweave.config import load_config
from fedweave.errors import UserError
from fedweave.runs import lock
from fedweave.runs.folder import RunFolder
from fedweave.runs.lock import locked
from tests.helpers import fork, wait_for


def run_and_wait(*command: str) -> int:
    """The command, which goes no further than discovery, as if it computed for long."""

    def look(event: str, given: tuple) -> None:
        if event == "open" and str(given[0]).endswith("discovery.json.partial"):
            signal.pause()

    sys.addaudithook(look)
    return main(command)


def test_a_live_run_is_left_alone_and_a_killed_one_is_taken_over(tmp_path, small, complains):
    folder, log = tmp_path / "run", tmp_path / "log"
    begin = ["run", "quickstart", *small, f"output={folder}", "--quiet"]
    process = fork(run_and_wait, *begin, log=log)
    try:
        wait_for(lambda: (folder / "lock").is_file() and (folder / "lock").read_text(), "the lock")
        said = f"process {process.pid} on {socket.gethostname()} is working on the run {folder}"
        assert said in complains("resume", folder)
        assert said in complains(*begin)
    finally:
        process.kill()
        process.join()
    assert (folder / "lock").exists()  # nobody removed it
    assert f"`fedweave resume {folder}`" in complains(*begin)
    assert main(["resume", str(folder), "--quiet"]) == 0
    assert not (folder / "lock").exists()


def test_a_server_over_sites_is_left_alone_too(tmp_path, complains):
    folder = tmp_path / "run"
    settings = ["data.source=sites", "engine=flower", "federation.sites=2"]
    config = load_config("quickstart", settings)
    RunFolder.create(folder, config, {"source": "sites", "seed": 1, "federation": "f"})
    said = f"process {os.getpid()} on {socket.gethostname()} is working on the run {folder}"
    with locked(folder):
        assert said in complains("federate", "--resume", folder, "--insecure")
        assert said in complains("federate", "quickstart", "federation.sites=2", f"output={folder}", "--insecure")
    again = complains("federate", "quickstart", "federation.sites=2", f"output={folder}", "--insecure")
    link = "--superlink 127.0.0.1:8000 --insecure"
    assert f"continue it with `fedweave federate --resume {folder} {link}`" in again


def test_the_lock_is_held_once(tmp_path):
    with locked(tmp_path):
        with (
            pytest.raises(UserError, match=rf"process {os.getpid()} on .* is working on the run"),
            locked(tmp_path),
        ):
            pass
        assert (tmp_path / "lock").exists()
    with locked(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_without_locks_of_the_system_the_process_decides(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "fcntl", None)
    other = {"pid": os.getppid(), "host": socket.gethostname()}
    for holder, stops in (
        (other, "wait for its end"),
        ({**other, "host": "elsewhere"}, "remove .*lock if it is gone"),
        ({**other, "pid": 2**22 + 1}, None),  # beyond the largest of Linux
        ([], None),
    ):
        (tmp_path / "lock").write_text(json.dumps(holder))
        if stops:
            with pytest.raises(UserError, match=stops), locked(tmp_path):
                pass
        else:
            with locked(tmp_path):
                assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
