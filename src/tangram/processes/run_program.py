"""Runs a short program and captures its output, with limits of time and size.

The program is in a session of its own. Promises that it has ended and that the rest of its process group is killed when
a call returns or raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tangram.processes.capture import Capture

SECONDS_MAX = 60.0
"""The default time limit."""
OUTPUT_BYTES_MAX = 1 << 24
"""The default limit of the output."""
ERROR_BYTES_MAX = 1 << 14
"""Bytes kept of standard error: its beginning and its end."""
READ_BYTES = 1 << 16


class OutputTooLong(OSError):
    """The program was killed because it wrote more than it may."""


class ProgramResult(NamedTuple):
    code: int
    """Negative for a signal."""
    stdout: bytes
    stderr: str

    @property
    def failure(self) -> str:
        """The last line of its standard error, or how it ended; empty if it ended with 0."""
        return "" if self.code == 0 else (self.stderr.splitlines() or [f"it ended with {self.code}"])[-1]


def run_program(
    argv: Sequence[str],
    *,
    request: bytes = b"",
    seconds: float = SECONDS_MAX,
    output_bytes_max: int = OUTPUT_BYTES_MAX,
) -> ProgramResult:
    """`request`: its standard input. Raises OSError if it cannot be started, TimeoutError, OutputTooLong."""
    return _collect(_start(argv, request), seconds, output_bytes_max)


async def run_program_async(
    argv: Sequence[str],
    *,
    request: bytes = b"",
    seconds: float = SECONDS_MAX,
    output_bytes_max: int = OUTPUT_BYTES_MAX,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    pass_fds: Sequence[int] = (),
) -> ProgramResult:
    """Like `run_program`, without blocking the event loop. If it is cancelled, the program is killed."""
    process = _start(argv, request, env, cwd, pass_fds)  # on this thread, because it may die with the thread
    cancelled, cancel = os.pipe()
    work = asyncio.ensure_future(asyncio.to_thread(_collect, process, seconds, output_bytes_max, cancelled))
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, cancel)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            stack.close()
            await asyncio.wait([work])
            raise


def _start(
    argv: Sequence[str],
    request: bytes,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    with open(os.memfd_create("request"), "w+b") as stdin:
        stdin.write(request)
        stdin.seek(0)
        return subprocess.Popen(
            argv,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            cwd=cwd,
            pass_fds=pass_fds,
            start_new_session=True,
        )


def _collect(
    process: subprocess.Popen[bytes], seconds: float, output_bytes_max: int, cancelled: int = -1
) -> ProgramResult:
    """Blocks until the program has ended. `cancelled`: the end of this pipe kills it. Closed here."""
    deadline = time.monotonic() + seconds
    stdout, stderr = bytearray(), Capture(ERROR_BYTES_MAX)
    with contextlib.ExitStack() as stack:
        if cancelled >= 0:
            stack.callback(os.close, cancelled)
        stack.enter_context(process)  # reaps it
        stack.callback(_kill_group, process)
        pidfd = os.pidfd_open(process.pid)
        stack.callback(os.close, pidfd)
        selector = stack.enter_context(selectors.PollSelector())
        assert process.stdout is not None and process.stderr is not None
        sinks = {process.stdout.fileno(): stdout.extend, process.stderr.fileno(): stderr.feed}
        for fd in {pidfd, *sinks, *([cancelled] if cancelled >= 0 else ())}:
            selector.register(fd, selectors.EVENT_READ)
        unfinished = {pidfd, *sinks}
        while unfinished:
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"it took longer than {seconds:g} seconds")
            for key, _ in ready:
                if key.fd in sinks and (data := os.read(key.fd, READ_BYTES)):
                    sinks[key.fd](data)
                    continue
                if key.fd == cancelled:
                    raise InterruptedError("it was cancelled")
                if key.fd == pidfd:
                    _kill_group(process)  # what it has left may hold its streams
                selector.unregister(key.fd)
                unfinished.discard(key.fd)
            if len(stdout) > output_bytes_max:
                raise OutputTooLong(f"it wrote more than {output_bytes_max} bytes")
    return ProgramResult(process.returncode, bytes(stdout), stderr.text().strip())


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """It has not been reaped, so its process id is not that of another group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
