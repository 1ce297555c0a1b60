"""Files and folders that a crash cannot harm.

Each is written under another name, forced to the disk and renamed, so that it exists whole or not at all.
"""

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedweave.errors import UserError


def write_atomic(path: Path, content: str | bytes) -> None:
    try:
        with atomic_file(path) as partial:
            _write(partial, content)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); free some space and resume.") from error


def write_if_possible(path: Path, content: str | bytes) -> None:
    """The same for what is written often and nobody needs: not forced to the disk, and silent where it fails."""
    partial = _beside(path, shared=False)
    try:
        _write(partial, content)
        os.replace(partial, path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


@contextmanager
def atomic_file(path: Path, shared: bool = False) -> Iterator[Path]:
    """The name to write a file under, which then replaces ``path``. ``shared``: several processes may be at it."""
    partial = _beside(path, shared)
    try:
        yield partial
        _force_to_disk(partial)
        os.replace(partial, path)
        _force_to_disk(path.parent)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path, replace: bool = False, shared: bool = False) -> Iterator[Path]:
    """An empty folder to fill, which then becomes ``path``; a folder that has something in it is an error there,
    unless it is to be replaced."""
    partial, before = _beside(path, shared), _aside(path)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        for part in (*partial.rglob("*"), partial):
            _force_to_disk(part)
        replaced = replace and path.exists()
        if replaced:  # whole until the new one has the name
            shutil.rmtree(before, ignore_errors=True)
            path.rename(before)
        partial.rename(path)
        _force_to_disk(path.parent)
        if replaced:
            shutil.rmtree(before, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def recover_folder(path: Path) -> None:
    """A folder that was being replaced when its process was killed, between two names, has its own again."""
    if not path.exists() and _aside(path).is_dir():
        _aside(path).rename(path)


def remove_folder(path: Path) -> None:
    """Whole or not at all: it loses its name first."""
    gone = _aside(path)
    shutil.rmtree(gone, ignore_errors=True)  # what a killed process left
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def read_text(path: Path) -> str:
    """A text file that a user may have written."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text; save it as UTF-8.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as source:
        while chunk := source.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def files_sha256(paths: Iterable[Path]) -> list[str]:
    """The same of many; one that has several names is read once."""
    known: dict[tuple[int, int], str] = {}
    found = []
    for path in paths:
        what = path.stat()
        key = what.st_dev, what.st_ino
        known[key] = known.get(key) or file_sha256(path)
        found.append(known[key])
    return found


def _beside(path: Path, shared: bool) -> Path:
    """One name for whoever comes after a crash, or one for each process."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial" if shared else f".{path.name}.partial")


def _aside(path: Path) -> Path:
    """The name of what goes."""
    return path.with_name(f".{path.name}.removed")


def _write(path: Path, content: str | bytes) -> None:
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def _force_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
