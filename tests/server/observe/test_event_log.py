"""The event log: what a reader gets of it while it grows, and what is in it when the disk is full."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tangram.core.messages import Tick
from tangram.core.trace import Header
from tangram.files import append_log
from tangram.runtime.trace_recorder import open_trace
from tangram.server.observe.event_log import FLUSH_INTERVAL_S, EventLog


def many(log: EventLog, count: int, now: float = 0.0) -> None:
    for _ in range(count):
        log(now, Tick(), [])


def test_a_reader_gets_what_there_was_when_it_began_however_much_is_written_since(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", Header(policy="adaptive"))
    many(log, 100)
    file, size = log.open_snapshot()
    with file:
        content = file.read(1000)
        many(log, 5000)
        log.flush()
        while piece := file.read(1000):
            content += piece
    log.close()
    assert len(content) == size < log.path.stat().st_size
    assert content == log.path.read_bytes()[:size] and content.count(b"\n") == 101


def test_an_event_is_in_the_file_with_the_first_one_after_a_while(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", Header(policy="adaptive"))
    many(log, 1, now=0.0)
    many(log, 1, now=0.5)
    before = log.path.read_bytes().count(b"\n")
    many(log, 1, now=0.5 + FLUSH_INTERVAL_S)
    assert before < 4 == log.path.read_bytes().count(b"\n")
    log.close()


def test_when_the_disk_is_full_the_log_ends_with_its_last_whole_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(tmp_path / "events.jsonl", Header(policy="adaptive"))
    many(log, 10)
    room = [250]

    def write(fd: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        written = os.pwrite(fd, data[: room[0]], os.fstat(fd).st_size)
        room[0] -= written
        return written

    with monkeypatch.context() as full:
        full.setattr(append_log.os, "write", write)
        log.flush()
    many(log, 10)
    file, size = log.open_snapshot()
    with file:
        content = file.read()
    log.close()
    assert content == log.path.read_bytes() and len(content) == size and content.endswith(b"\n")
    with open_trace(log.path) as (_, lines):
        assert 0 < len(list(lines)) < 10
