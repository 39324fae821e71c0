"""Processes of the machine without control groups: watched, signalled and reaped."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time

import pytest

from tangram.processes import process_tree
from tangram.processes.process_tree import (
    KERNEL_THREAD,
    Process,
    ProcessTable,
    SpawnedChild,
    processes_below,
    read_environment,
    read_process,
    resident_bytes,
)


def test_an_abandoned_child_is_reaped_when_it_ends() -> None:
    async def main() -> int:
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        child = SpawnedChild(["sleep", "1000"], env={"PATH": os.defpath}, cwd="/", streams=(null, null, null))
        os.close(null)
        assert child.reap_or_abandon()[0] is None
        os.kill(child.pid, signal.SIGKILL)
        async with asyncio.timeout(30):
            await child.exited
        await asyncio.sleep(0)
        return child.pid

    pid = asyncio.run(main())
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def test_processes_below_are_those_of_all_generations() -> None:
    with subprocess.Popen(["sh", "-c", "sh -c 'sleep 1000; :' & wait"], start_new_session=True) as first:
        try:
            deadline = time.monotonic() + 60.0
            while len(below := pids_below(first.pid)) < 2:
                assert time.monotonic() < deadline, "expected a shell and its program below the first one"
            assert below < pids_below(os.getpid())
        finally:
            os.killpg(first.pid, signal.SIGKILL)


def pids_below(pid: int) -> set[int]:
    return {process.pid for process in processes_below(pid)}


def test_the_environment_is_that_of_the_start_of_a_program() -> None:
    with subprocess.Popen(["sleep", "1000"], env={"PATH": os.defpath, "NAME": "a=b"}) as child:
        try:
            deadline = time.monotonic() + 60.0
            while read_environment(child.pid) == [b""]:  # exec has not set it yet
                assert time.monotonic() < deadline, "expected the environment of a program"
            assert b"NAME=a=b" in read_environment(child.pid)
            assert 0 < resident_bytes(child.pid) < resident_bytes(os.getpid())
        finally:
            child.kill()
    with pytest.raises(FileNotFoundError):
        read_environment(child.pid)


def test_a_process_with_the_id_of_an_ended_kernel_thread_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_as_kernel_thread(pid: int) -> Process | None:
        process = read_process(pid)
        return process._replace(flags=KERNEL_THREAD) if process is not None else None

    table = ProcessTable()
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as child:
        try:
            with monkeypatch.context() as patch:
                patch.setattr(process_tree, "read_process", read_as_kernel_thread)
                assert table.scan() == {}
            assert table.scan()[child.pid].session == child.pid
        finally:
            child.kill()
