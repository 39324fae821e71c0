"""The trajectory log: records are read back to the last bit, and malformed content is reported."""

from __future__ import annotations

import errno
import gzip
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rl import recordings

from tangram.errors import InvalidConfig, InvalidInput, InvalidTrace, ManagerError
from tangram.files import append_log
from tangram.rl.config.rollout_settings import RolloutSettings, TaskSettings
from tangram.rl.inference.router_records import EngineLost
from tangram.rl.runs import trajectory_log
from tangram.rl.runs.trajectory_log import (
    LOG_FORMAT,
    EngineEvent,
    GroupClosing,
    StatisticsRecord,
    TrajectoryLog,
    engine_event,
    read,
)
from tangram.rl.trajectories.trajectory import Ending, Trajectory, Turn

each_suffix = pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])


def bits(value: object) -> str:
    """A representation that distinguishes -0.0 from 0.0 and in which nan equals itself."""
    return repr(value)


def trajectory(number: int = 0, **changes: object) -> Trajectory:
    turn = Turn(
        observation="a lake", observation_tokens=(4, 2), action="north", tokens=(5, 1), logprobs=(-0.25, -1e-3),
        versions=(3, 4),
    )  # fmt: skip
    usual: dict[str, object] = dict(
        id=f"lake/{number}/0.0", task="lake", group=f"lake/{number}", member=0, attempt=0, seed=7, turns=(turn,),
        ending=Ending.FINISHED, reward=1.0,
    )  # fmt: skip
    return Trajectory(**{**usual, **changes})  # type: ignore[arg-type]


def written(path: Path, *found: trajectory_log.LogRecord) -> Path:
    with TrajectoryLog(path, began_at=5.0) as log:
        for record in found:
            log.append(record)
    return path


# ---- both ways ------------------------------------------------------------------------------------------------


@each_suffix
@given(found=st.lists(recordings.records, max_size=5))
def test_what_is_read_equals_what_was_written(tmp_path_factory, suffix: str, found) -> None:
    path = written(tmp_path_factory.mktemp("log") / f"run.{suffix}", *found)
    reading = read(path)
    assert [bits(record) for record in reading] == [bits(record) for record in found]
    assert reading.torn == ""


@given(
    found=st.lists(st.integers(0, 9), max_size=3, unique=True).flatmap(
        lambda ns: st.tuples(*map(recordings.groups, ns))
    )
)
def test_groups_come_back_whole(tmp_path_factory, found) -> None:
    with TrajectoryLog(tmp_path_factory.mktemp("log") / "run.jsonl") as log:
        for group in found:
            for each in group.all_trajectories():
                log.append(each)
            log.append(GroupClosing.of(group, at_s=1.0))
    assert [bits(group) for group in read(log.path).groups()] == [bits(group) for group in found]


def test_the_header_contains_how_it_was_played(tmp_path: Path) -> None:
    settings = RolloutSettings(seed=3, tasks=(TaskSettings(name="lake", options={"size": 4, "way": [1, "b"]}),))
    with TrajectoryLog(tmp_path / "run.jsonl", settings=settings, words=("<pad>", "north"), note="first", began_at=9.5):
        pass
    header = read(tmp_path / "run.jsonl").header
    assert (header.format, header.settings, header.words, header.note) == (
        LOG_FORMAT,
        settings,
        ("<pad>", "north"),
        "first",
    )
    assert header.began_at == 9.5


@each_suffix
def test_a_log_is_read_while_it_is_written(tmp_path: Path, suffix: str) -> None:
    with TrajectoryLog(tmp_path / f"run.{suffix}") as log:
        for count in range(4):
            assert [each.id for each in read(log.path).trajectories()] == [f"lake/{n}/0.0" for n in range(count)]
            log.append(trajectory(count))
    assert read(log.path).torn == ""


def test_a_compressed_log_is_what_gzip_reads_and_the_other_way_round(tmp_path: Path) -> None:
    packed = written(tmp_path / "run.jsonl.gz", trajectory(0), trajectory(1))
    unpacked = tmp_path / "run.jsonl"
    unpacked.write_bytes(gzip.decompress(packed.read_bytes()))
    again = tmp_path / "again.gz"
    again.write_bytes(gzip.compress(unpacked.read_bytes()))
    for path in (packed, unpacked, again):
        assert read(path).trajectories() == [trajectory(0), trajectory(1)]


def test_a_router_event_is_kept_with_all_fields(tmp_path: Path) -> None:
    lost = EngineLost(at_s=105.0, engine="engine-0", reason="killed by signal 9", requests=3, deaths=1)
    path = written(tmp_path / "run.jsonl", engine_event(lost, since=100.0))
    (records,) = read(path)
    assert isinstance(records, EngineEvent) and (records.at_s, records.name) == (5.0, "EngineLost")
    assert records.words == {"engine": "engine-0", "reason": "killed by signal 9", "requests": 3, "deaths": 1}


def test_two_iterations_read_the_same(tmp_path: Path) -> None:
    reading = read(written(tmp_path / "run.jsonl", trajectory(0), EngineEvent(at_s=1.0, name="died")))
    assert list(reading) == list(reading) and len(list(reading)) == 2


# ---- what ends in the middle ------------------------------------------------------------------------------------


@each_suffix
def test_a_truncated_log_returns_the_records_before_and_reports_it(tmp_path: Path, suffix: str) -> None:
    whole = written(tmp_path / f"run.{suffix}", trajectory(0), trajectory(1)).read_bytes()
    first = len(written(tmp_path / f"one.{suffix}", trajectory(0)).read_bytes())
    cut = tmp_path / f"cut.{suffix}"
    for size in range(first, len(whole) + 1):
        cut.write_bytes(whole[:size])
        reading = read(cut)
        trajectories = reading.trajectories()
        assert trajectories in ([trajectory(0)], [trajectory(0), trajectory(1)])
        assert (reading.torn == "") == (size in (first, len(whole)))
        if suffix == "jsonl":
            assert len(trajectories) == (2 if size == len(whole) else 1)


def test_a_whole_record_without_its_line_end_is_left_out(tmp_path: Path) -> None:
    path = written(tmp_path / "run.jsonl", trajectory(0), trajectory(1))
    path.write_bytes(path.read_bytes()[:-1])
    reading = read(path)
    assert len(reading.trajectories()) == 1
    assert "run.jsonl:3" in reading.torn and "skipped" in reading.torn


def test_a_killed_process_leaves_all_that_it_appended(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from tangram.rl.runs.trajectory_log import *\n"
        "log = TrajectoryLog(sys.argv[1])\n"
        "for n in range(50): log.append(EngineEvent(at_s=float(n), name='n'))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = tmp_path / "run.jsonl.gz"
    ended = subprocess.run([sys.executable, "-c", program, path], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert [record.at_s for record in read(path)] == [float(n) for n in range(50)]


# ---- what cannot be written -------------------------------------------------------------------------------------


@each_suffix
def test_a_full_disk_is_reported_and_leaves_only_complete_records(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"run.{suffix}"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with TrajectoryLog(path) as log:
        log.append(trajectory(0))
        size = path.stat().st_size
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, before[1]))
            with pytest.raises(ManagerError, match=r"run.*cannot be written.*all records before are complete"):
                log.append(trajectory(1))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert path.stat().st_size == size and log.records == 1
        log.append(trajectory(2))
    reading = read(path)
    assert [each.id for each in reading.trajectories()] == ["lake/0/0.0", "lake/2/0.0"] and reading.torn == ""


def test_a_log_that_cannot_even_begin_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ManagerError, match=os.strerror(errno.ENOSPC)):
        TrajectoryLog("/dev/full")
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    path = written(tmp_path / "run.jsonl", trajectory(0))
    with pytest.raises(InvalidConfig, match="a new file"):
        TrajectoryLog(path)
    assert len(read(path).trajectories()) == 1
    with pytest.raises(InvalidConfig, match="can be written"):
        TrajectoryLog(tmp_path)


def test_after_its_end_nothing_is_appended(tmp_path: Path) -> None:
    with TrajectoryLog(tmp_path / "run.jsonl") as log:
        pass
    log.close()
    with pytest.raises(ManagerError, match="closed"):
        log.append(trajectory())


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    with TrajectoryLog(tmp_path / "run.jsonl") as log:
        with pytest.raises(InvalidInput, match="surrogates"):
            log.append(StatisticsRecord(at_s=0.0, values={"\udc80": 1.0}))
        log.append(trajectory())
    assert len(read(log.path).trajectories()) == 1


def test_a_record_that_is_too_long_is_refused_by_both(tmp_path: Path, monkeypatch) -> None:
    path = written(tmp_path / "run.jsonl", trajectory(0))
    with TrajectoryLog(tmp_path / "other.jsonl") as log:
        monkeypatch.setattr(append_log, "LINE_BYTES_MAX", 100)
        with pytest.raises(InvalidInput, match="at most 100 bytes"):
            log.append(trajectory())
    monkeypatch.setattr(append_log, "CHUNK_BYTES", 64)
    with pytest.raises(InvalidTrace, match=r"run\.jsonl:2.*at most 100 bytes"):
        list(read(path))


# ---- what is no log ---------------------------------------------------------------------------------------------


NO_HEADERS = [
    b"",
    b"\n",
    b"hello\n",
    b"{}\n",
    b'{"format": 1}',
    b"[1]\n",
    b"\xff\xfe\n",
    b'{"format":1,"began_at":"x"}\n',
    b"[" * 100_000 + b"\n",
]


@pytest.mark.parametrize("content", NO_HEADERS, ids=range(len(NO_HEADERS)))
def test_a_file_that_is_no_log_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(InvalidTrace, match=r"x\.jsonl:1.*header of a rollout log"):
        read(path)


def test_an_unknown_format_is_reported_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"format": 99, "everything": "is new"}\n')
    with pytest.raises(InvalidTrace, match=f"format: expected rollout log format {LOG_FORMAT}, got 99"):
        read(path)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(InvalidConfig, match="can be read"):
            read(path)


BROKEN = [
    b"hello",
    b'{"kind":"other","record":{}}',
    b'{"kind":"trajectory","record":{}}',
    b'{"kind":"trajectory"}',
    b"\xff",
    b"[" * 5000,
    b'{"kind":"statistics","record":{"at_s":{"$number":"many"}}}',
    b'{"kind":"engine","record":{"at_s":1.0,"name":{"$text":"xyz"}}}',
    b'{"kind":"engine","record":{"at_s":1.0,"name":{"$text":"ff"}}}',
]


@pytest.mark.parametrize("line", BROKEN, ids=range(len(BROKEN)))
@each_suffix
def test_a_malformed_line_is_reported_with_its_number(tmp_path: Path, line: bytes, suffix: str) -> None:
    path = written(tmp_path / f"run.{suffix}", trajectory(0))
    with path.open("ab") as file:
        file.write(gzip.compress(line + b"\n") if suffix == "jsonl.gz" else line + b"\n")
    reading = iter(read(path))
    assert next(reading) == trajectory(0)
    with pytest.raises(InvalidTrace, match=rf"run\.{suffix}:3: expected a line of a rollout log"):
        next(reading)


def test_a_contradictory_line_is_reported_without_control_characters(tmp_path: Path) -> None:
    path = written(tmp_path / "run.jsonl", trajectory(0, id="\x1b[2J"))
    path.write_bytes(path.read_bytes().replace(b'"ending":"finished"', b'"ending":"stale"'))
    with pytest.raises(InvalidTrace, match=r"run\.jsonl:2.*reward 1\.0") as caught:
        list(read(path))
    assert str(caught.value).isprintable()
    path.write_bytes(path.read_bytes().replace(b'"stale"', b'"finished"').replace(b"[3,4]", b"[3]"))
    with pytest.raises(InvalidTrace, match="each token has"):
        list(read(path))


def test_damaged_compression_is_reported(tmp_path: Path) -> None:
    path = written(tmp_path / "run.jsonl.gz", trajectory(0), trajectory(1))
    content = bytearray(path.read_bytes())
    content[-30] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(InvalidTrace, match="what gzip writes"):
        list(read(path))


def test_closing_an_unknown_record_is_reported(tmp_path: Path) -> None:
    closing = GroupClosing(id="lake/0", task="lake", seed=0, members=("lake/0/9.0",), wanted=1)
    path = written(tmp_path / "run.jsonl", trajectory(0), closing)
    with pytest.raises(InvalidTrace, match="precedes it"):
        list(read(path).groups())
    stale = trajectory(1, ending=Ending.STALE, reward=None)
    path = written(tmp_path / "b.jsonl", stale, msgspec.structs.replace(closing, members=(stale.id,)))
    with pytest.raises(InvalidTrace, match="members with a reward"):
        list(read(path).groups())


def test_empty_lines_are_nothing(tmp_path: Path) -> None:
    path = written(tmp_path / "run.jsonl", trajectory(0))
    with path.open("ab") as file:
        file.write(b"\n  \n")
    assert len(list(read(path))) == 1
