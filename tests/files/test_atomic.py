"""Atomic files and directories: complete under their name, or not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tangram.errors import InvalidConfig, ManagerError
from tangram.files.atomic_directory import UNFINISHED_PREFIX, atomic_directory, remove_atomically, remove_unfinished
from tangram.files.atomic_file import atomic_file, atomic_write, check_writable, partial_path_of, write_file


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_only_when_it_is_complete(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "file"
    write_file(path, b"old", durable=durable)
    with atomic_file(path, durable=durable) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_file(path, b"old")

    def interrupted() -> None:
        with atomic_file(path) as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_what_a_killed_writer_left_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "file"
    partial_path_of(path).write_bytes(b"a longer text than the new one")
    write_file(path, b"new")
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


def test_an_option_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="record"), atomic_write("record", tmp_path / "no" / "file"):
        pass
    with pytest.raises(InvalidConfig, match="it is a folder"):
        check_writable("record", tmp_path)
    check_writable("record", tmp_path / "new" / "file")
    assert list((tmp_path / "new").iterdir()) == []


def test_a_directory_appears_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "parent" / "directory"
    with atomic_directory(path) as unfinished:
        (unfinished / "file").write_bytes(b"new")
        assert not path.exists()
    assert (path / "file").read_bytes() == b"new" and list(path.parent.iterdir()) == [path]


def test_a_directory_with_content_is_replaced_only_on_request(tmp_path: Path) -> None:
    path = tmp_path / "directory"
    path.mkdir()
    (path / "old").touch()
    with pytest.raises(ManagerError, match="exists already"), atomic_directory(path):
        pass
    with pytest.raises(ValueError, match="stop"), atomic_directory(path, replace=True):
        raise ValueError("stop")
    assert [each.name for each in path.iterdir()] == ["old"]
    with atomic_directory(path, replace=True) as unfinished:
        (unfinished / "new").touch()
    assert [each.name for each in path.iterdir()] == ["new"] and list(tmp_path.iterdir()) == [path]


def test_directories_are_removed_with_what_is_unfinished(tmp_path: Path) -> None:
    path = tmp_path / "directory"
    path.mkdir()
    (path / "file").touch()
    (tmp_path / f"{UNFINISHED_PREFIX}1").mkdir()
    remove_atomically(path)
    remove_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ManagerError, match="cannot be removed"):
        remove_atomically(path)
