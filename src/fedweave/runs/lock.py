"""One process at a time works on a run folder, or writes a file that several share: RUN/lock names it.

The system itself holds the lock and lets go of it when the process ends, however it ends, so that what a killed one
leaves behind stops nobody. Where a file system knows no locks, the process that the file names decides.
"""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO, TypedDict

from fedweave.errors import UserError
from fedweave.json_files import Damaged, parse

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

NAME = "lock"


class Busy(UserError):
    """Another process has the lock."""


class Holder(TypedDict):
    pid: int
    host: str


@contextmanager
def locked(folder: Path, name: str = NAME, patience: float = 0.0) -> Iterator[None]:
    """Hold the folder's lock, or say who does after so many seconds."""
    path = folder / name
    try:
        file = _wait(path, time.monotonic() + patience)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        file.close()


def require_unlocked(folder: Path) -> None:
    """A folder that no process works on."""
    if (folder / NAME).is_file():
        with locked(folder):
            pass


def alive(process: Holder) -> bool:
    """Whether a process may be there; of another machine nobody knows."""
    if process["host"] != socket.gethostname():
        return True
    try:
        os.kill(process["pid"], 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _wait(path: Path, until: float) -> TextIO:
    while True:
        try:
            return _take(path)
        except Busy:
            if time.monotonic() >= until:
                raise
        time.sleep(0.02)


def _take(path: Path) -> TextIO:
    """The open file, once it is ours and still the one of that name."""
    while True:
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 — it stays open as long as the lock is held
        try:
            if not _ours(file, path):
                raise _refusal(path)
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                file.truncate(0)
                file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
                file.flush()
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # its holder has removed it in the meantime


def _ours(file: TextIO, path: Path) -> bool:
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
        except OSError:  # no locks here
            pass
    holder = _holder(path)
    return holder is None or holder["pid"] == os.getpid() or not alive(holder)


def _holder(path: Path) -> Holder | None:
    try:
        return parse(path.read_bytes(), Holder)
    except (OSError, Damaged):
        return None


def _refusal(path: Path) -> Busy:
    holder = _holder(path)
    who = f"process {holder['pid']} on {holder['host']}" if holder else "another process"
    away = f", or remove {path} if it is gone" if holder and holder["host"] != socket.gethostname() else ""
    return Busy(f"{who} is working on the run {path.parent}; wait for its end, or stop it{away}.")
