"""The contract of managers: shells that are held between commands."""

from __future__ import annotations

import asyncio
import os
import time

import pytest
from tests.contracts.conftest import TICK, Harness, alive, until

needs_programs = pytest.mark.needs_programs


async def test_the_directory_of_a_session_stays(harness: Harness) -> None:
    box = await harness.open()
    await box.write("sub/note", b"below")
    assert not (await box.run("cd sub", session="s")).session_ended
    assert await box.says("cat note", session="s") == "below"
    assert (await box.run("cat note", session="other")).exit_code == 1
    assert (await box.run("cat note")).exit_code == 1
    assert (await box.says("pwd", session="s", cwd="/work")).endswith("/sub") is False


@needs_programs
async def test_variables_and_functions_of_a_session_stay(harness: Harness) -> None:
    box = await harness.open()
    await box.run("x='a  b'; declare -A map; map[k]=v; twice() { echo $1 $1; return 3; }", session="s")
    done = await box.run('echo "$x ${map[k]}"; twice z', session="s")
    assert (done.exit_code, done.stdout, done.session_ended) == (3, b"a  b v\nz z\n", False)
    assert await box.says('echo "[$x]"', session="other") == "[]"


@needs_programs
@pytest.mark.parametrize("command", ["continue", "break", "break 1", "return 2", "if then", "exec 3>file", "8<&-"])
async def test_no_odd_command_makes_a_session_hang(harness: Harness, command: str) -> None:
    box = await harness.open()
    await box.run("x=kept", session="s")
    assert not (await box.run(command, session="s")).session_ended
    assert await box.says("echo $x", session="s") == "kept"


@needs_programs
async def test_a_session_gets_a_new_width(harness: Harness) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs 2 cores")
    box = await harness.open()
    ask = "echo $TANGRAM_CPUS $OMP_NUM_THREADS {cpus}; (unset OMP_NUM_THREADS OMP_THREAD_LIMIT; nproc)"
    assert await box.says(ask, session="s", width=1000) == "1 1 1\n1"
    assert await box.says(ask, session="s", width=2000) == "2 2 2\n2"


@needs_programs
async def test_the_output_of_commands_of_a_session_is_kept_apart(harness: Harness) -> None:
    box = await harness.open()
    long = "head -c 300000 /dev/zero | tr '\\0' x"
    first = await box.run(f"{long}; echo err >&2", session="s")
    second = await box.run("echo second", session="s")
    assert (first.stdout, first.stderr) == (b"x" * 300_000, b"err\n")
    assert (second.stdout, second.stderr) == (b"second\n", b"")


@needs_programs
async def test_a_command_as_long_as_allowed_reaches_its_session(harness: Harness) -> None:
    box = await harness.open()
    text = "'" * 100 + "y" * 120_000
    assert await box.says(f"cat <<'END'\n{text}\nEND\n", session="s") == text


async def test_a_session_ends_with_its_shell_and_reports_it(harness: Harness) -> None:
    box = await harness.open()
    await box.write("sub/note", b"below")
    await box.run("cd sub", session="s")
    done = await box.run("echo last; exit 3", session="s")
    assert (done.exit_code, done.stdout, done.session_ended) == (3, b"last\n", True)
    assert not (await box.says("pwd", session="s")).endswith("/sub")


async def test_stopping_a_command_ends_its_session_and_reports_it(harness: Harness) -> None:
    box = await harness.open()
    await box.write("sub/note", b"below")
    await box.run("cd sub", session="s")
    lease = await box.start("sleep 1000", session="s")
    await lease.stop()
    executed = (await lease.wait()).executed
    assert executed is not None
    assert (executed.exit_code, executed.session_ended) == (None, True)
    assert not (await box.says("pwd", session="s")).endswith("/sub")


@needs_programs
async def test_stopping_a_command_of_a_session_ends_what_it_started_and_nothing_else(harness: Harness) -> None:
    box = await harness.open()
    before, child, daemon, own = (harness.marker() for _ in range(4))
    await box.run(f"sleep {before} > /dev/null 2>&1 &", session="s")
    lease = await box.start(
        f"sleep {child} & (setsid sh -c 'sleep {daemon}' > /dev/null 2>&1 &); sleep {own}", session="s"
    )
    await until(lambda: all(map(alive, (before, child, daemon, own))))
    await lease.stop()
    await lease.wait()
    assert not any(map(alive, (child, daemon, own)))
    assert alive(before)


@needs_programs
async def test_a_session_stands_still_between_its_commands_and_goes_on(harness: Harness) -> None:
    box = await harness.open()
    await box.run(f"x=kept; ({TICK}) > /dev/null 2>&1 & while [ ! -s ticks ]; do sleep 0.01; done", session="s")
    stopped_at = time.time()
    await asyncio.sleep(0.3)  # in which it would tick many times
    started_at = time.time()
    assert await box.says("echo $x; kill $!; wait", session="s") == "kept"
    ticks = [float(line) for line in (await box.read("ticks")).split()]
    assert [tick for tick in ticks if stopped_at < tick < started_at] == []


@needs_programs
async def test_concurrent_first_commands_of_a_session_start_one_shell(harness: Harness) -> None:
    box = await harness.open()
    marker = harness.marker()
    command = f"shell=$$; sleep {marker}"
    started = await asyncio.gather(*[box.start(command, session="s") for _ in range(3)], return_exceptions=True)
    (lease,) = [each for each in started if not isinstance(each, BaseException)]
    assert all("runs a command already" in str(each) for each in started if isinstance(each, BaseException))
    await until(lambda: alive(marker))
    await lease.stop()
    result = (await lease.wait()).executed
    assert result is not None and result.session_ended
    assert await box.says("echo $shell$(( $$ > 0 ))", session="s") == "1"
    assert await box.says("echo next", session="s") == "next"
