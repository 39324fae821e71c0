"""File locks: one holder, released with its process, and only of the file that has the name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tangram.files import lock
from tangram.files.lock import is_locked, lock_directory, lock_file, locked, read_holder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock"


def test_a_lock_has_one_holder_until_its_descriptor_is_closed(path: Path) -> None:
    fd = lock_file(path)
    with pytest.raises(BlockingIOError):
        lock_file(path)
    assert is_locked(path)
    os.close(fd)
    assert not is_locked(path)
    os.close(lock_file(path))


HOLDER = (
    "import sys, pathlib; from tangram.files import lock; lock.lock_file(pathlib.Path(sys.argv[1])); print(); input()"
)


def test_the_kernel_releases_the_lock_of_a_killed_process(path: Path) -> None:
    argv = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert is_locked(path)
        process.kill()
        process.wait()
        assert not is_locked(path)


def test_the_holder_is_read_without_the_lock_and_replaces_the_previous_one(path: Path) -> None:
    path.write_text("a longer previous holder")
    assert read_holder(path) == "a longer previous holder"
    fd = lock_file(path, holder="4711\n")
    assert read_holder(path) == "4711" and path.read_text() == "4711\n"
    os.close(fd)
    os.close(lock_file(path))
    assert read_holder(path) == "4711"


def test_a_lock_that_is_not_acquired_leaves_the_holder_and_no_descriptor(path: Path) -> None:
    fd = lock_file(path, holder="first")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(BlockingIOError):
        lock_file(path, holder="second")
    assert read_holder(path) == "first" and os.listdir("/proc/self/fd") == before
    os.close(fd)


def test_looking_at_a_lock_creates_no_file_and_needs_no_write_permission(path: Path) -> None:
    assert not is_locked(path) and not path.exists()
    path.touch(mode=0o400)
    assert not is_locked(path)
    with pytest.raises(FileNotFoundError):
        lock_file(path.with_name("missing"), create=False)


def test_the_mode_is_that_of_a_new_file(path: Path) -> None:
    os.close(lock_file(path))
    assert path.stat().st_mode & 0o777 == 0o600
    os.close(lock_file(path.with_name("readable"), mode=0o640))
    assert path.with_name("readable").stat().st_mode & 0o777 == 0o640


def test_a_directory_is_locked_like_a_file(tmp_path: Path) -> None:
    fd = lock_directory(tmp_path)
    with pytest.raises(BlockingIOError):
        lock_directory(tmp_path)
    os.close(fd)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        lock_directory(tmp_path / "file")


def test_a_block_holds_the_lock_also_when_it_raises(path: Path) -> None:
    def fail() -> None:
        with locked(path):
            assert is_locked(path)
            raise RuntimeError("in the block")

    with pytest.raises(RuntimeError, match="in the block"):
        fail()
    assert not is_locked(path)


@pytest.mark.parametrize("change", ["removed", "renamed", "replaced"])
def test_a_file_that_loses_its_name_before_it_is_locked_is_not_found(
    path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    path.touch()
    real_flock = lock.fcntl.flock

    def flock(fd: int, operation: int) -> None:
        path.unlink() if change == "removed" else path.rename(path.with_name("elsewhere"))
        if change == "replaced":
            path.touch()
        real_flock(fd, operation)

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError):
        lock_file(path)
    assert os.listdir("/proc/self/fd") == before


def test_a_link_is_not_followed(path: Path) -> None:
    path.with_name("target").touch()
    path.symlink_to(path.with_name("target"))
    with pytest.raises(OSError, match="symbolic links"):
        lock_file(path)
