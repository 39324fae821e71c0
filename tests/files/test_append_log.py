"""The append-only log: what is in the file after errors, limits and kills, and what its readers return."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from tangram.errors import InvalidInput, InvalidTrace, ManagerError
from tangram.files import append_log
from tangram.files.append_log import (
    AppendLog,
    LineReader,
    check_line_length,
    complete_lines_bytes,
    encode_frame,
    read_frame,
)


def limited_disk(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """`os.write` fails after `room` bytes."""
    write, left = os.write, [room]

    def limited(fd: int, data: bytes) -> int:
        if not left[0]:
            raise OSError(28, "No space left on device")
        count = write(fd, data[: left[0]])
        left[0] -= count
        return count

    monkeypatch.setattr(append_log.os, "write", limited)


def test_a_record_is_in_the_file_when_append_returns(tmp_path: Path) -> None:
    with AppendLog(tmp_path / "new" / "log") as log:
        log.append(b"one\n")
        assert log.path.read_bytes() == b"one\n" and log.size == 4


def test_a_failed_write_leaves_the_records_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with AppendLog(tmp_path / "log") as log:
        with monkeypatch.context() as full:
            limited_disk(full, 6)
            log.append(b"one\n")
            with pytest.raises(ManagerError, match=r"log: the log cannot be written \(No space left on device\)"):
                log.append(b"two\n")
        assert log.path.read_bytes() == b"one\n" and log.size == 4
        log.append(b"three\n")
    assert log.path.read_bytes() == b"one\nthree\n"


def test_of_buffered_records_those_that_fit_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = AppendLog(tmp_path / "log", buffer_bytes=100)
    for record in (b"one\n", b"two\n", b"three\n"):
        log.append(record)
    assert log.path.read_bytes() == b""
    limited_disk(monkeypatch, 10)
    with pytest.raises(ManagerError, match="cannot be written"):
        log.flush()
    log.close()
    assert log.path.read_bytes() == b"one\ntwo\n"


def test_a_log_that_cannot_be_truncated_takes_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int, size: int) -> None:
        raise OSError(5, "Input/output error")

    with AppendLog(tmp_path / "log") as log:
        with monkeypatch.context() as broken:
            limited_disk(broken, 2)
            broken.setattr(append_log.os, "ftruncate", fail)
            with pytest.raises(ManagerError, match="No space"):
                log.append(b"one\n")
        with pytest.raises(ManagerError, match="ends with an incomplete record"):
            log.append(b"two\n")
    assert log.path.read_bytes() == b"on"


def test_the_limit_of_a_log(tmp_path: Path) -> None:
    with AppendLog(tmp_path / "log", bytes_max=6) as log:
        log.append(b"one\n")
        with pytest.raises(ManagerError, match="the log has 4 bytes, of at most 6"):
            log.append(b"two\n")
    assert log.path.read_bytes() == b"one\n"


@pytest.mark.parametrize("torn", [b"", b"half", b"x" * 200_000])
def test_recovery_cuts_off_an_incomplete_line(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\n" + torn)
    with AppendLog(path, recover=complete_lines_bytes) as log:
        assert log.size == 8
        log.append(b"three\n")
    assert path.read_bytes() == b"one\ntwo\nthree\n"


def test_recovery_that_fails_closes_the_file(tmp_path: Path) -> None:
    def fail(file: object) -> int:
        raise ManagerError("unknown format")

    path = tmp_path / "log"
    path.write_bytes(b"one\n")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ManagerError, match="unknown format"):
        AppendLog(path, recover=fail)
    assert len(os.listdir("/proc/self/fd")) == before and path.read_bytes() == b"one\n"


def test_a_closed_log_takes_nothing(tmp_path: Path) -> None:
    log = AppendLog(tmp_path / "log")
    log.close()
    log.close()
    with pytest.raises(ManagerError, match="closed"):
        log.append(b"one\n")


def test_a_snapshot_ends_where_the_log_ended(tmp_path: Path) -> None:
    with AppendLog(tmp_path / "log") as log:
        log.append(b"one\n")
        with log.open_snapshot() as snapshot:
            log.append(b"two\n")
            assert snapshot.read() == b"one\n"


def test_lines_are_numbered_and_an_incomplete_one_is_named(tmp_path: Path) -> None:
    lines = LineReader(io.BytesIO(b"one\n\nthr"), tmp_path / "log")
    assert list(lines) == [b"one", b""] and lines.number == 2
    assert lines.rest == b"thr" and lines.torn == f"{tmp_path}/log:3: 3 bytes of an incomplete line are skipped"


def test_a_line_that_is_too_long_is_refused_by_writer_and_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(append_log, "LINE_BYTES_MAX", 10)
    monkeypatch.setattr(append_log, "CHUNK_BYTES", 8)
    with pytest.raises(InvalidInput, match="at most 10 bytes"):
        check_line_length(b"x" * 11)
    with pytest.raises(InvalidTrace, match=r"log:2.*at most 10 bytes"):
        list(LineReader(io.BytesIO(b"one\n" + b"x" * 50), tmp_path / "log"))


def test_frames_are_read_up_to_the_first_damaged_one() -> None:
    content = encode_frame(b"one") + encode_frame(b"two")
    file = io.BytesIO(content)
    assert [read_frame(file), read_frame(file), read_frame(file)] == [b"one", b"two", None]
    for cut in range(1, len(content) // 2):
        file = io.BytesIO(content[:-cut])
        assert [read_frame(file), read_frame(file)] == [b"one", None]
    flipped = io.BytesIO(content[:-1] + b"?")
    assert [read_frame(flipped), read_frame(flipped)] == [b"one", None]
