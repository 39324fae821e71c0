"""Leases of programs in sandboxes: what the three backends share.

Owns the life cycle of a lease: it starts once, ends once, is stopped with a grace period, closes its streams and
reports one result. A backend launches the program, signals it, and reports its exit status and usage. Promises what
`managers.base` requires of a lease: `wait` returns in any case, also for a caller that was cancelled and calls it
again."""

from __future__ import annotations

import asyncio
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Self

import msgspec

from tangram.core.action import NO_USAGE, Usage
from tangram.errors import ManagerError
from tangram.managers.base import UnmeteredLease
from tangram.managers.work import Exec, ExecResult, LeaseResult
from tangram.processes.capture import Capture
from tangram.processes.streams import Output, ShellStreams, Stream
from tangram.processes.width import substitute_width, whole_cores

BASE_ENVIRONMENT = {"LANG": "C.UTF-8", "TERM": "dumb"}
"""Variables that every program has, unless its image, sandbox or action sets others."""
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class CompletedLease(UnmeteredLease):
    """A lease of work that has ended before `start` returns."""

    def __init__(self, result: LeaseResult) -> None:
        self._result = result

    async def wait(self) -> LeaseResult:
        return self._result

    async def stop(self) -> None:
        pass


class ProgramExit(msgspec.Struct, frozen=True, kw_only=True):
    """How a program ended, as its backend reports it."""

    code: int | None = None
    lost: str = ""
    """The error of the backend; empty if the program ran to its end or was stopped."""
    usage: Usage = NO_USAGE
    out_of_memory: bool = False
    session_ended: bool = False


class ExecLease(ABC):
    """The lease of a program, or of a command for the shell of a session."""

    def __init__(self, work: Exec, width: int, output: Output | None) -> None:
        self.work = work
        self.width = width
        """Milli-cores that its environment states."""
        self.streams: tuple[Stream, ...] = ()
        """Pipes that `_captures` is fed from; a backend without pipes feeds it in another way."""
        self._output = output
        self._captures = (Capture(work.capture_bytes_max), Capture(work.capture_bytes_max))
        self._loop = asyncio.get_running_loop()
        self._started_s = 0.0
        self._end_signal = asyncio.Event()
        """Set when the program may have ended."""
        self._result_task: asyncio.Task[LeaseResult] | None = None
        self._stop_task: asyncio.Task[None] | None = None
        self._is_ending = False
        """The end of the program was detected; resources are being released."""

    # ---- for backends to implement

    @abstractmethod
    async def _launch(self) -> None:
        """Start the program. If it raises, it leaves nothing behind."""

    @abstractmethod
    def _end_futures(self) -> tuple[asyncio.Future[Any], ...]:
        """Futures that signal that the program may have ended, as soon as one is done; empty: it has ended."""

    @abstractmethod
    async def _terminate(self) -> None:
        """Ask the processes of the action to end, kill them after STOP_GRACE_S, and return when none is left."""

    @abstractmethod
    async def _collect_exit(self) -> ProgramExit:
        """Release everything and report how the program ended. Called once, after `_terminate` if it is stopped."""

    @abstractmethod
    def resize(self, *, reserved: int, limit: int) -> None: ...

    @abstractmethod
    def cpu_seconds(self) -> float | None: ...

    # ---- the life cycle of a lease

    async def begin(self) -> None:
        """Returns when the program runs. Raises what `_launch` raises, and leaves nothing behind then."""
        await self._launch()
        self._started_s = self._loop.time()
        self._result_task = self._loop.create_task(self._run())

    @property
    def is_stopped(self) -> bool:
        return self._stop_task is not None

    @property
    def result(self) -> asyncio.Future[LeaseResult]:
        assert self._result_task is not None, "begin() comes first"
        return self._result_task

    def add_done_callback(self, callback: Callable[[Self], None]) -> None:
        self.result.add_done_callback(lambda _: callback(self))

    async def wait(self) -> LeaseResult:
        return await asyncio.shield(self.result)

    async def stop(self) -> None:
        if self._stop_task is None and not self._is_ending:
            self._stop_task = self._loop.create_task(self._terminate())
            self._stop_task.add_done_callback(self._signal_end)
        await self.wait()

    def capture_output(self, streams: tuple[Stream, ...]) -> None:
        self.streams = streams
        for stream, capture in zip(streams, self._captures, strict=True):
            stream.begin(capture, self._output)

    def _signal_end(self, _: asyncio.Future[Any]) -> None:
        self._end_signal.set()

    async def _wait_end(self) -> None:
        futures = self._end_futures()
        if not futures:
            return
        for future in futures:
            future.add_done_callback(self._signal_end)
        await self._end_signal.wait()
        for future in futures:
            future.remove_done_callback(self._signal_end)

    async def _run(self) -> LeaseResult:
        await self._wait_end()
        if self._stop_task is not None:
            await asyncio.wait({self._stop_task})
        self._is_ending = True
        ended_s = self._loop.time()
        for stream in self.streams:
            stream.end()
        try:
            end = await self._collect_exit()
        except Exception as error:  # a waiter must get a result
            end = ProgramExit(lost=f"the end of the action failed: {error!r}")
        return self._result_of(end, self._loop.time() - ended_s)

    @property
    def _stop_error(self) -> str:
        """The error of stopping the program; empty if it was stopped, or no stop was requested."""
        if self._stop_task is None or not self._stop_task.done():
            return ""
        error = self._stop_task.exception()
        if error is not None and not isinstance(error, ManagerError | OSError):
            raise error
        return str(error) if error is not None else ""

    def _result_of(self, end: ProgramExit, overhead_s: float) -> LeaseResult:
        out, err = self._captures
        executed = ExecResult(
            exit_code=None if self.is_stopped or end.lost else end.code,
            stdout=out.content(),
            stderr=err.content(),
            stdout_bytes=out.total_bytes,
            stderr_bytes=err.total_bytes,
            out_of_memory=end.out_of_memory,
            cpus=whole_cores(self.width),
            session_ended=end.session_ended,
        )
        usage = msgspec.structs.replace(end.usage, overhead_s=overhead_s)
        return LeaseResult(usage=usage, executed=executed, lost=end.lost)


class ShellSession:
    """A shell that is kept between commands, so that its directory, variables and functions stay.

    Owns the streams of the shell and the future of its running command. An exit code that the shell reports applies
    only to its own commands.
    """

    def __init__(self) -> None:
        self.streams: tuple[Stream, ...] = ()
        self.width = 0
        """The width that its environment variables state."""
        self.busy = False
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """The exit code of the last command."""
        self._shell = ShellStreams(self._on_status)

    def run(self, command: str) -> None:
        """Send a command. `status` becomes its exit code."""
        self.busy = True
        self.status = asyncio.get_running_loop().create_future()
        self._shell.send(command)

    def _on_status(self, code: int) -> None:
        if not self.status.done():
            self.status.set_result(code)

    def close(self) -> None:
        self._shell.close()


def session_command(work: Exec, width: int, exports: Mapping[str, str], directory: str) -> str:
    """The text that a shell evaluates for a command. `directory`: where it runs; empty leaves the shell where it is.
    Docker does without it: its message to the shell separates the exports from the command (output_framing.py)."""
    command = substitute_width(work.command, width)
    assert isinstance(command, str)
    # Evaluated on its own: a syntax error in it does not affect the lines before it.
    run = f"eval {shlex.quote(command)}"
    if directory:
        run = f"cd -- {shlex.quote(directory)} && {run}"
    return "\n".join([*export_lines(exports), run])


def export_lines(variables: Mapping[str, str]) -> list[str]:
    return [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
