"""Short programs: their output, and what ends them."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from tangram.processes.process_tree import read_process
from tangram.processes.run_program import ERROR_BYTES_MAX, OutputTooLong, run_program, run_program_async


def sh(script: str) -> list[str]:
    return ["sh", "-c", script]


def wait_ended(pid_file: Path) -> None:
    """Blocks until a process has ended that has been killed."""
    while (process := read_process(int(pid_file.read_text()))) is not None and process.is_alive:
        time.sleep(0.001)


def test_its_output_and_its_exit_code() -> None:
    result = run_program(sh("cat; echo first >&2; echo last >&2; exit 3"), request=b"in")
    assert (result.code, result.stdout, result.stderr) == (3, b"in", "first\nlast")
    assert result.failure == "last"
    assert run_program(sh("kill -9 $$")).failure == "it ended with -9"
    assert run_program(sh("echo warning >&2")).failure == ""


def test_a_request_longer_than_a_pipe_holds_arrives() -> None:
    request = os.urandom(1 << 20)
    assert run_program(["cat"], request=request).stdout == request
    assert run_program(["true"], request=request).code == 0


def test_a_program_that_does_not_exist() -> None:
    with pytest.raises(FileNotFoundError):
        run_program(["/no/such/program"])


def test_its_time_limit_ends_its_whole_group(tmp_path: Path) -> None:
    script = f"sh -c 'echo $$ > {tmp_path}/below; sleep 600' & echo $$ > {tmp_path}/first; wait"
    with pytest.raises(TimeoutError, match="it took longer than 1 seconds"):
        run_program(sh(script), seconds=1.0)
    assert not Path("/proc", (tmp_path / "first").read_text().strip()).exists()
    wait_ended(tmp_path / "below")


def test_what_it_leaves_in_its_group_is_killed_and_delays_nothing(tmp_path: Path) -> None:
    result = run_program(sh(f"sleep 600 & echo $! > {tmp_path}/left; echo done"), seconds=300.0)
    assert result.stdout == b"done\n"
    wait_ended(tmp_path / "left")


def test_too_much_output_ends_it(tmp_path: Path) -> None:
    with pytest.raises(OutputTooLong, match="it wrote more than 1000 bytes"):
        run_program(sh(f"echo $$ > {tmp_path}/pid; exec yes"), output_bytes_max=1000)
    wait_ended(tmp_path / "pid")


def test_long_errors_are_shortened() -> None:
    result = run_program(
        [sys.executable, "-c", "import sys; sys.stderr.write('a' * 100_000 + '\\nthe reason\\n'); 1 / 0"]
    )
    assert len(result.stderr) < 2 * ERROR_BYTES_MAX
    assert result.failure == "ZeroDivisionError: division by zero"


def test_cancelling_kills_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pid")

    async def main() -> int:
        script = f"echo $$ > {tmp_path}/pid; sleep 600"
        task = asyncio.ensure_future(run_program_async(sh(script), cwd="/"))
        pid = int(await asyncio.to_thread((tmp_path / "pid").read_text))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return pid

    fds = len(os.listdir("/proc/self/fd"))
    assert read_process(asyncio.run(main())) is None
    assert len(os.listdir("/proc/self/fd")) == fds


def test_it_gets_descriptors_and_an_environment() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"x\n")
    script = f"read -r line < /proc/self/fd/{reader}; echo $line $NAME"
    result = asyncio.run(run_program_async(sh(script), env={"NAME": "y"}, pass_fds=[reader]))
    os.close(reader)
    os.close(writer)
    assert result.stdout == b"x y\n"
