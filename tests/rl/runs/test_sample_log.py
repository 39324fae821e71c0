"""The log of samples: whole records, whatever happens to the process or the disk."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.rl.recordings import HOSTILE, groups
from tests.rl.samples import group

from tangram.errors import ManagerError
from tangram.files.append_log import FRAME_HEADER, encode_frame
from tangram.rl.runs.sample_log import (
    GroupLost,
    GroupPut,
    SampleLog,
    SampleLogs,
    log_files,
    merge_after,
    prune_logs,
)
from tangram.rl.trajectories.training_batch import strip_for_training
from tangram.rl.trajectories.trajectory import Group


def ids(folder: Path, step: int = 0) -> list[str]:
    return [each.group.id if isinstance(each, GroupPut) else f"-{each.id}" for each in SampleLogs(folder, step)]


def test_what_training_needs_of_a_group_is_kept_and_the_rest_is_not(tmp_path: Path) -> None:
    played = group(3, 7, 8)
    with SampleLog(tmp_path, 0) as log:
        log.append(played)
        log.append_lost("lake/4", "stale")
    (put, lost) = SampleLogs(tmp_path, 0)
    assert lost == GroupLost(id="lake/4", cause="stale")
    assert isinstance(put, GroupPut) and put.group == strip_for_training(played)
    before, after = played.members[1], put.group.members[1]
    for name in (
        "id",
        "tokens",
        "action_mask",
        "logprobs",
        "versions",
        "reward",
        "seed",
        "member",
        "attempt",
        "ending",
    ):
        assert getattr(after, name) == getattr(before, name), name
    assert put.group.left_out == () and after.spans == () and after.turns[0].action == ""


@settings(max_examples=30, deadline=None)
@given(played=st.lists(groups(), max_size=3))
def test_any_group_that_may_be_is_read_as_it_was(tmp_path_factory: pytest.TempPathFactory, played: list[Group]) -> None:
    folder = tmp_path_factory.mktemp("samples")
    # Ids are made of names in settings, which are text; all else may be anything.
    played = [
        replace(each, members=tuple(replace(member, task="t", group=each.id) for member in each.members))
        for each in played
    ]
    with SampleLog(folder, 0) as log:
        for each in played:
            log.append(each)
    back = [each.group for each in SampleLogs(folder, 0) if isinstance(each, GroupPut)]
    assert msgspec.msgpack.encode(back) == msgspec.msgpack.encode([strip_for_training(each) for each in played])


@pytest.mark.parametrize("text", HOSTILE)
def test_a_cause_may_contain_any_text(tmp_path: Path, text: str) -> None:
    with SampleLog(tmp_path, 0) as log:
        log.append_lost("lake/4", text)
        log.append(replace(group(5, 1), cause=text))
    assert ids(tmp_path) == ["-lake/4", "lake/5"]


def test_what_is_after_a_checkpoint_is_in_its_log_and_in_those_that_follow(tmp_path: Path) -> None:
    with SampleLog(tmp_path, 0) as log:
        log.append(group(1, 0))
        log.rotate(20)
        log.append(group(2, 0))
        log.rotate(20)  # the checkpoint failed and is tried again
        log.append(group(3, 0))
        log.rotate(40)
        log.append(group(4, 0))
    assert [path.name for _, path in log_files(tmp_path)] == ["00000000.log", "00000020.log", "00000040.log"]
    assert [ids(tmp_path, step) for step in (0, 20, 40, 60)] == [
        ["lake/1", "lake/2", "lake/3", "lake/4"],
        ["lake/2", "lake/3", "lake/4"],
        ["lake/4"],
        [],
    ]
    prune_logs(tmp_path, 40)
    assert ids(tmp_path) == ["lake/4"]


@pytest.mark.parametrize("cut", [1, 5, 8, 9, 30])
def test_an_incomplete_last_frame_is_skipped_with_a_warning_and_the_log_continues(tmp_path: Path, cut: int) -> None:
    with SampleLog(tmp_path, 0) as log:
        log.append(group(1, 0))
        whole = log.path.stat().st_size
        log.append(group(2, 0))
    os.truncate(log.path, whole + cut)
    logs = SampleLogs(tmp_path, 0)
    assert len(list(logs)) == 1
    assert logs.torn == [f"{log.path}: {cut} bytes at its end could not be read"]
    with SampleLog(tmp_path, 0) as again:
        assert f"{cut} bytes" in again.torn
        again.append(group(3, 0))
    assert ids(tmp_path) == ["lake/1", "lake/3"]


@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
@settings(max_examples=60, deadline=None)
def test_a_flipped_bit_costs_what_follows_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, at: int, bit: int
) -> None:
    folder = tmp_path_factory.mktemp("samples")
    ends: list[int] = []
    with SampleLog(folder, 0) as log:
        for number in range(4):
            ends.append(log.path.stat().st_size)
            log.append(group(number, 0))
    content = bytearray(log.path.read_bytes())
    at %= len(content)
    content[at] ^= 1 << bit
    log.path.write_bytes(content)
    logs = SampleLogs(folder, 0)
    group_ids = [each.group.id for each in logs if isinstance(each, GroupPut)]
    assert group_ids == [f"lake/{number}" for number in range(4)][: sum(end <= at for end in ends[1:])]
    assert len(logs.torn) == 1


def test_a_full_disk_is_reported_and_leaves_only_complete_records(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with SampleLog(tmp_path, 0) as log:
        log.append(group(1, 0))
        size = log.path.stat().st_size
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, before[1]))
            with pytest.raises(ManagerError, match=r"00000000.log: the log cannot be written \(File too large\)"):
                log.append(group(2, 0))
            assert ids(tmp_path) == ["lake/1"]
            resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
            with pytest.raises(ManagerError, match=r"00000020.log: the log cannot be written"):
                log.rotate(20)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        log.append(group(3, 0))  # as before it was tried to rotate
        assert log.step == 0
        log.rotate(20)
        log.append(group(4, 0))
    logs = SampleLogs(tmp_path, 0)
    assert [each.group.id for each in logs if isinstance(each, GroupPut)] == ["lake/1", "lake/3", "lake/4"]
    assert logs.torn == []


def test_a_closed_log_raises(tmp_path: Path) -> None:
    log = SampleLog(tmp_path, 0)
    log.close()
    with pytest.raises(ManagerError, match="closed"):
        log.append(group(1, 0))


def test_a_log_of_another_format_is_not_guessed_at(tmp_path: Path) -> None:
    content = msgspec.msgpack.encode({"type": "log", "format": 2, "step": 0})
    (tmp_path / "00000000.log").write_bytes(encode_frame(content))
    with pytest.raises(ManagerError, match="expected a log of format 1, got 2"):
        list(SampleLogs(tmp_path, 0))
    with pytest.raises(ManagerError, match="expected a log of format 1, got 2"):
        SampleLog(tmp_path, 0)
    assert (tmp_path / "00000000.log").stat().st_size > FRAME_HEADER.size


def test_logs_of_a_lineage_that_is_lost_become_one(tmp_path: Path) -> None:
    with SampleLog(tmp_path, 0) as log:
        for number, step in enumerate((20, 40, 60)):
            log.append(group(number, 0))
            log.rotate(step)
        log.append(group(3, 0))
    merge_after(tmp_path, 20)
    assert [path.name for _, path in log_files(tmp_path)] == ["00000000.log", "00000020.log"]
    assert ids(tmp_path, 20) == ["lake/1", "lake/2", "lake/3"] and ids(tmp_path) == [f"lake/{n}" for n in range(4)]
    assert not list(tmp_path.glob(".*")) and len(list(tmp_path.iterdir())) == 2
    with SampleLog(tmp_path, 20) as log:
        log.append(group(4, 0))
    assert ids(tmp_path, 20)[-1] == "lake/4"


PROGRAM = """
import sys
from tangram.rl.runs.sample_log import SampleLog
from tests.rl.samples import group
with SampleLog(sys.argv[1], 0) as log:
    number = 0
    while True:
        log.append(group(number, 0, tokens=2000))
        number += 1
        print(number, flush=True)
"""


def test_a_killed_process_leaves_the_appended_records(tmp_path: Path) -> None:
    for killed_after in (3, 17, 40):
        folder = tmp_path / str(killed_after)
        child = subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        last = 0
        with child:
            while last < killed_after:
                last = int(child.stdout.readline())
            os.kill(child.pid, signal.SIGKILL)
            last = max([last, *map(int, child.stdout.read().split())])
        assert child.returncode == -signal.SIGKILL
        group_ids = ids(folder)
        assert group_ids == [f"lake/{number}" for number in range(len(group_ids))] and len(group_ids) >= last
