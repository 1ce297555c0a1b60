"""Whole or not at all, and in words where it cannot be."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from fedweave.errors import UserError
from fedweave.files import atomic_file, atomic_folder, recover_folder, write_atomic, write_if_possible


@pytest.mark.parametrize("content", ["für alle\n", b"\x00\xff"])
@pytest.mark.parametrize("write", [write_atomic, write_if_possible])
def test_a_file_is_replaced_and_nothing_else_remains(tmp_path, content, write):
    path = tmp_path / "note"
    path.write_text("old")
    write(path, content)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert list(tmp_path.iterdir()) == [path]


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    for place in (tmp_path / "none" / "note", tmp_path / "file" / "note"):
        with pytest.raises(UserError, match=r"note cannot be written .*free some space and resume"):
            write_atomic(place, "x")
        write_if_possible(place, "x")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("shared", [False, True])
def test_what_fails_half_way_leaves_the_old(tmp_path, shared):
    file, folder = tmp_path / "file", tmp_path / "folder"
    write_atomic(file, "old")
    with atomic_folder(folder) as partial:
        (partial / "inner").mkdir()
        (partial / "inner" / "note").write_text("old")
    with pytest.raises(ZeroDivisionError), atomic_file(file, shared) as partial:
        partial.write_text("new")
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), atomic_folder(folder, replace=True, shared=shared) as partial:
        (partial / "note").write_text("new")
        raise ZeroDivisionError
    assert file.read_text() == (folder / "inner" / "note").read_text() == "old"
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "folder", "inner", "note"]


def test_a_folder_replaces_only_what_it_may(tmp_path):
    folder = tmp_path / "deep" / "folder"
    for attempt in ("first", "second"):
        with atomic_folder(folder, replace=True) as partial:
            (partial / attempt).touch()
    assert [p.name for p in folder.iterdir()] == ["second"]
    with pytest.raises(OSError), atomic_folder(folder) as partial:
        (partial / "third").touch()
    assert [p.name for p in folder.iterdir()] == ["second"]


@pytest.mark.parametrize("killed_at", [".x.removed", "x", "never"])
def test_a_folder_that_is_being_replaced_is_never_lost(tmp_path, monkeypatch, killed_at):
    folder, rename = tmp_path / "x", Path.rename

    def write(text):
        with atomic_folder(folder, replace=True) as partial:
            (partial / "file").write_text(text)

    def until(path, target):
        if target.name == killed_at:
            raise KeyboardInterrupt
        return rename(path, target)

    write("old")
    monkeypatch.setattr(Path, "rename", until)
    with pytest.raises(KeyboardInterrupt) if killed_at != "never" else nullcontext():
        write("new")
    monkeypatch.undo()
    recover_folder(folder)
    assert (folder / "file").read_text() == ("new" if killed_at == "never" else "old")
    write("newest")
    assert (folder / "file").read_text() == "newest" and [p.name for p in tmp_path.iterdir()] == ["x"]


def test_what_a_killed_process_left_is_taken_over(tmp_path):
    stale = tmp_path / ".folder.partial"
    stale.mkdir()
    (stale / "half").touch()
    with atomic_folder(tmp_path / "folder") as partial:
        (partial / "whole").touch()
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["folder", "whole"]
