"""The trace log: what a reader gets of it while it grows, what is in it when the disk is full, what a kill leaves."""

from __future__ import annotations

import asyncio
import gzip
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import tangram
from tangram.core.limits import Limits
from tangram.core.messages import Tick
from tangram.core.trace import Header
from tangram.errors import InvalidTrace
from tangram.files import append_log
from tangram.files.atomic_file import partial_path_of
from tangram.runtime.trace_recorder import FLUSH_INTERVAL_S, TraceLog, open_trace, record_trace


def many(log: TraceLog, count: int, now: float = 0.0) -> None:
    for _ in range(count):
        log(now, Tick(), [])


@contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch, room_bytes: int) -> Iterator[None]:
    room = [room_bytes]

    def write(fd: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        written = os.pwrite(fd, data[: room[0]], os.fstat(fd).st_size)
        room[0] -= written
        return written

    with monkeypatch.context() as full:
        full.setattr(append_log.os, "write", write)
        yield


def test_a_reader_gets_what_there_was_when_it_began_however_much_is_written_since(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = TraceLog(path, Header(policy="adaptive"))
    many(log, 100)
    file, size = log.open_snapshot()
    with file:
        content = file.read(1000)
        many(log, 5000)
        log.flush()
        while piece := file.read(1000):
            content += piece
    log.close()
    assert len(content) == size < path.stat().st_size
    assert content == path.read_bytes()[:size] and content.count(b"\n") == 101


def test_an_event_is_in_the_file_with_the_first_one_after_a_while(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = TraceLog(path, Header(policy="adaptive"))
    many(log, 1, now=0.0)
    many(log, 1, now=0.5)
    before = path.read_bytes().count(b"\n")
    many(log, 1, now=0.5 + FLUSH_INTERVAL_S)
    assert before < 4 == path.read_bytes().count(b"\n")
    log.close()


def test_when_the_disk_is_full_the_log_ends_with_its_last_whole_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    log = TraceLog(path, Header(policy="adaptive"))
    many(log, 10)
    with full_disk(monkeypatch, room_bytes=250):
        log.flush()
    many(log, 10)
    file, size = log.open_snapshot()
    with file:
        content = file.read()
    log.close()
    assert content == path.read_bytes() and len(content) == size and content.endswith(b"\n")
    with open_trace(path) as (_, lines):
        assert 0 < len(list(lines)) < 10


def test_a_full_disk_ends_the_trace_of_a_connection_and_none_of_its_actions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.jsonl"

    async def main() -> list[int]:
        async with tangram.connect(backend="process", record=path) as t, t.sandbox() as sandbox:
            with full_disk(monkeypatch, room_bytes=0):
                first = await sandbox.exec("head -c 100000 /dev/zero | tr '\\0' x", cpus=1)
                results = [first, *[await sandbox.exec("true", cpus=1) for _ in range(100)]]
            return [result.exit_code for result in results]

    assert asyncio.run(main()) == [0] * 101
    assert "No space left on device" in caplog.text
    with open_trace(path) as (header, lines):
        assert header.note == "process"
        list(lines)


def test_what_a_killed_process_recorded_is_beside_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    pid = os.fork()
    if pid == 0:
        with record_trace(path, policy="fcfs", pools=(), limits=Limits()) as trace:
            many(trace, 10)
            trace.flush()
            os._exit(0)
    os.waitpid(pid, 0)
    with open_trace(partial_path_of(path)) as (_, lines):
        assert len(list(lines)) == 10
    with record_trace(path, policy="fcfs", pools=(), limits=Limits()):
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace.jsonl"]


def test_a_compressed_trace_is_read_and_an_incomplete_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    with record_trace(tmp_path / "trace.jsonl", policy="adaptive", pools=(), limits=Limits()) as log:
        many(log, 50)
    content = gzip.compress((tmp_path / "trace.jsonl").read_bytes())
    path.write_bytes(content)
    with open_trace(path) as (header, lines):
        assert header.policy == "adaptive" and len(list(lines)) == 50
    path.write_bytes(content[:-10])
    with pytest.raises(InvalidTrace, match=r"trace\.jsonl\.gz:\d+"), open_trace(path) as (_, lines):
        list(lines)
